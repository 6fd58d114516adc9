"""What a checkpoint in fewer bits costs: its state, and what the model says behind it.

    python -m bench.checkpoint_drift [--text FILE] [--windows 8]

denim-tiny in fp32, on its own texts at temperature 1 or on a file. After `prefix` tokens the states of all
linear layers are kept in each way and brought back, once; KV and convolution windows stay as they are. Then
the text goes on from there: `AFTER` tokens, scored.

* state: Frobenius norm of the state's error over that of the state, the mean over layers and heads, and the
  largest; and the mean again behind the following tokens
* mnats: mean |difference of the following tokens' log-probabilities| from those behind the exact state, of
  the first `NEAR` and of all
* perplexity of the following tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.report import parser_of, write
from denim.commands.study.inputs import texts_of
from denim.engine import LLM
from denim.memory.layout import PAGE
from denim.runner.plan import Span

AFTER, NEAR = 256, 16  # tokens
PREFIXES = (256, 1024, 2048)
INT8_MAX, FP8_MAX = 127, 448
ROW, COLUMN, HEAD = -1, -2, (-2, -1)  # dims of a state [heads, d_v, d_k] that share a scale


class Kept(NamedTuple):
    """`bits` of an element, scales of heads of 64 by 64 counted."""

    name: str
    bits: float
    keep: Callable[[Tensor], Tensor]


def scaled(largest: float, dims: int | tuple[int, int], store: Callable[[Tensor], Tensor]) -> Any:
    def keep(state: Tensor) -> Tensor:
        scale = (state.abs().amax(dims, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
        return store(state / scale) * scale

    return keep


def fp8(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn).float()


WAYS = (
    Kept("bf16", 16, lambda state: state.bfloat16().float()),
    Kept("int8, a scale a row", 8.5, scaled(INT8_MAX, ROW, torch.round)),
    Kept("int8, a column", 8.5, scaled(INT8_MAX, COLUMN, torch.round)),
    Kept("int8, a head", 8, scaled(INT8_MAX, HEAD, torch.round)),
    Kept("fp8, a row", 8.5, scaled(FP8_MAX, ROW, fp8)),
    Kept("fp8, a head", 8, scaled(FP8_MAX, HEAD, fp8)),
)


class Model:
    """denim-tiny over slots 0 (what a checkpoint holds), 1 (where it is read) and 2 (behind the text)."""

    def __init__(self, llm: LLM) -> None:
        core = llm.core
        self.forward, self.storage, self.layout = core.parts.forward, core.parts.storage, core.layout
        pages = core.layout.size_class(PAGE)
        self.pages = list(range(3 * pages.count, pages.count * core.capacity.num_slabs))
        self.layers = [p.layer for p in self.layout.slot_tensors if p.role == "recurrent"]

    @torch.inference_mode()
    def run(self, tokens: list[int], start: int, end: int, slot_in: int, slot_out: int) -> Tensor:
        """Logits [end - start, vocabulary] behind each of tokens[start:end]."""
        pages = self.pages[: -(-end // self.layout.page_size)]
        span = Span(0, start, tokens[start:end], pages, slot_in, slot_out)
        _, hidden = self.forward.run(self.forward.arrange([span]))
        return self.forward.model.logits(hidden)

    def states(self, slot: int) -> list[Tensor]:
        return [self.storage.state(layer, "recurrent")[slot] for layer in self.layers]

    def bring_back(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Slot 1 becomes what slot 0 is after it was kept in another way."""
        for place in self.layout.slot_tensors:
            view = self.storage.state(place.layer, place.role)
            view[1] = keep(view[0]) if place.role == "recurrent" else view[0]


def error(states: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """(mean, largest) over layers and heads."""
    each = torch.cat(
        [(a - b).norm(dim=(-2, -1)) / b.norm(dim=(-2, -1)) for a, b in zip(states, exact, strict=True)]
    )
    return each.mean().item(), each.max().item()


def measure(model: Model, windows: list[list[int]], prefix: int) -> list[dict[str, Any]]:
    sums: dict[str, list[float]] = {}
    exact_loss = 0.0
    for text in windows:
        model.run(text, 0, prefix, -1, 0)
        follows = torch.tensor(text[prefix + 1 : prefix + AFTER + 1])

        def score(text: list[int] = text, follows: Tensor = follows) -> Tensor:
            logits = model.run(text, prefix, prefix + AFTER, 1, 2)
            return logits.double().log_softmax(-1).gather(1, follows[:, None])[:, 0]

        model.bring_back(lambda state: state)
        exact = score()
        exact_loss -= exact.mean().item()
        behind = [state.clone() for state in model.states(2)]
        for way in WAYS:
            model.bring_back(way.keep)
            at_once = error(model.states(1), model.states(0))
            scored = score()
            away = (scored - exact).abs()
            found = [
                *at_once,
                error(model.states(2), behind)[0],
                away[:NEAR].mean().item(),
                away.mean().item(),
            ]
            found.append(-scored.mean().item())
            known = sums.setdefault(way.name, [0.0] * len(found))
            sums[way.name] = [a + b for a, b in zip(known, found, strict=True)]
    n = len(windows)
    sums["fp32"] = [0.0, 0.0, 0.0, 0.0, 0.0, exact_loss]
    rows = []
    for way in (Kept("fp32", 32, lambda state: state), *WAYS):
        mean, largest, after, near, all_, loss = (value / n for value in sums[way.name])
        rows.append(
            {
                "prefix": prefix,
                "kept": way.name,
                "bits": way.bits,
                "state": f"{mean:.2e}",
                "largest": f"{largest:.2e}",
                f"behind {AFTER}": f"{after:.2e}",
                f"mnats, {NEAR}": 1e3 * near,
                f"mnats, {AFTER}": 1e3 * all_,
                "perplexity": f"{math.exp(loss):.4f}",
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    length = max(PREFIXES) + AFTER + 1
    kinds = {"dtype": "float32", "kv_dtype": "float32", "state_dtype": "float32", "deferred_writes": None}
    llm = LLM(
        device=args.device, memory="64MiB", max_model_len=length + 8, max_num_seqs=args.windows, **kinds
    )
    windows = texts_of(llm, args.text, length, args.windows)
    llm.reset_prefix_cache()
    model = Model(llm)
    rows = [row for prefix in PREFIXES for row in measure(model, windows, prefix)]
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
