"""What the engine adds to the forward pass: everything else in a decode step.

    python -m bench.engine_overhead [--model qwen3.5-0.8b] [--device cpu|cuda] [--batch 8] [--json FILE]

Of the embedded model, or of random weights of published dimensions (bench/configs), which have no tokenizer.

On a CPU a step's time less the time inside the model's forward and head: scheduling, packing, sampling, stop
rules, detokenisation. On a CUDA device, where steps overlap and are replayed from graphs, a step's time less
the wait for its tokens and what CUDA takes to launch its graph: in all, in the quickest tenth of the steps
(what is left where others do not disturb the host), and by what it does: plan a step, pack, launch and draw
it, and take the tokens of the one before.
"""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import Any

import torch

from bench.random_model import engine
from bench.report import parser_of, write
from denim import SamplingParams
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from denim.runner.landing import Landing
from denim.runner.runner import Runner
from denim.scheduler.scheduler import Scheduler

STEPS = 200
WARM_STEPS = 4  # prefill, and what is made once for a batch
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True),
    "greedy, token ids": SamplingParams(
        temperature=0, max_tokens=STEPS + 8, ignore_eos=True, detokenize=False
    ),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=STEPS + 8, ignore_eos=True),
    "sampled, token ids": SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, max_tokens=STEPS + 8, ignore_eos=True, detokenize=False
    ),
}


def engine_of(model: str | None, device: str) -> EngineCore:
    if model is None:
        return EngineCore(EngineOptions(device=device, memory="1GiB"))
    dtype = "bfloat16" if device == "cuda" else "float32"
    return engine(model, dtype, device, memory="8GiB", max_model_len=4096)


class TimedModel:
    """The model, with the time spent in it added up."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0

    def _timed(self, call: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args)
        self.seconds += time.perf_counter() - begin
        return result

    def __call__(self, *args: Any) -> Any:
        return self._timed(self.model, *args)

    def logits(self, hidden: Any) -> Any:
        return self._timed(self.model.logits, hidden)


WAITING, GRAPH_LAUNCH = "waiting", "graph launch"
CALLS: dict[str, list[tuple[type, str]]] = {
    WAITING: [(Landing, "wait")],
    GRAPH_LAUNCH: [(torch.cuda.CUDAGraph, "replay")],
    "plan": [(Scheduler, "schedule"), (Scheduler, "launched")],
    "launch": [(Runner, "launch")],
    "take": [(EngineCore, "_take")],
}


class TimedCalls:
    """Adds up the seconds of a step that are spent in each of `CALLS`, what they call included."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CALLS, 0.0)
        for name, methods in CALLS.items():
            for owner, method in methods:
                self._time(name, owner, method)

    def _time(self, name: str, owner: type, method: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args)
            self.seconds[name] += time.perf_counter() - begin
            return result

        setattr(owner, method, timed)


def on_cuda(core: EngineCore, calls: TimedCalls) -> dict[str, float]:
    """Milliseconds of the next steps, medians."""
    python, parts = [], []
    for _ in range(STEPS):
        calls.seconds = dict.fromkeys(CALLS, 0.0)
        begin = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - begin
        calls.seconds["launch"] -= calls.seconds[GRAPH_LAUNCH]
        python.append(seconds - calls.seconds[WAITING] - calls.seconds[GRAPH_LAUNCH])
        parts.append(calls.seconds)
    row = {"python ms": median(python) * 1e3, "quickest tenth": quantiles(python, n=10)[0] * 1e3}
    for name in ("plan", "launch", "take", GRAPH_LAUNCH, WAITING):
        row[name] = median(part[name] for part in parts) * 1e3
    return row


def on_cpu(core: EngineCore, model: TimedModel) -> dict[str, float]:
    """The same outside and inside the model."""
    outside, inside = [], []
    for _ in range(STEPS):
        model.seconds = 0.0
        begin = time.perf_counter()
        core.step()
        outside.append(time.perf_counter() - begin - model.seconds)
        inside.append(model.seconds)
    return {"outside forward ms": median(outside) * 1e3, "forward ms": median(inside) * 1e3}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="one of bench/configs; without it the embedded model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    core = engine_of(args.model, args.device)
    model = TimedModel(core.loaded.model)
    if not cuda:
        core.runner.forward.model = model
    calls = TimedCalls() if cuda else None
    rows = []
    for name, params in PARAMS.items():
        if params.detokenize and core.tokenizer is None:
            continue
        for i in range(args.batch):
            core.add([100 + i, *range(200, 205)], params)
        for _ in range(WARM_STEPS):
            core.step()
        measured = on_cpu(core, model) if calls is None else on_cuda(core, calls)
        rows.append({"model": core.loaded.name, "sampling": name, "batch": args.batch, **measured})
        for request_id in list(core.requests):
            core.abort(request_id)
    write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
