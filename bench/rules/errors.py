"""How far kernels are from float64, on random inputs and on strong and weak decay.

Owns the inputs and the reference: Denim's chunked form in float64, which agrees with the recurrence token by
token to 1e-10. An error is the norm of the difference over the norm of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.rules import peers
from bench.rules.delta_prefill import CHUNK, Prompt, prompt_of
from denim.recurrence.gated_delta import gated_delta_chunked
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks

TOKENS = 4096
HEADS = (16, 16)
# Shifts of a before softplus: the mean decay of a token is then about e^-0.3, e^-20 and e^-0.0005.
DECAYS = {"random": 0.0, "strong decay": 8.0, "weak decay": -7.0}


class Error(NamedTuple):
    """Of one kernel on one kind of input: relative errors of the outputs and of the last state."""

    inputs: str
    name: str
    out: float
    state: float
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def gated_delta_errors() -> Iterator[Error]:
    """Denim's prefill, fla's and FlashQLA's, in bf16 from a state that is not zero."""
    for inputs, shift in DECAYS.items():
        yield from _gated_delta(inputs, _shifted(prompt_of(TOKENS, 1, *HEADS), shift))


def _gated_delta(inputs: str, prompt: Prompt) -> Iterator[Error]:
    q, k, v = (x[:1] for x in prompt.split())
    gates = (prompt.log_decay[:1], prompt.beta[:1])
    begin = prompt.states[:1].clone()
    out, state = gated_delta_chunked(
        *(x[0].double() for x in (q, k, v, *gates)),
        cu_seqlens=[0, TOKENS],
        initial_state=begin.double(),
        chunk_size=CHUNK,
    )
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")

    def denim() -> tuple[Tensor, Tensor]:
        made = gated_delta_chunks(
            prompt.rows[0],
            prompt.b[0],
            prompt.a[0],
            prompt.a_log,
            prompt.dt_bias,
            prompt.table(0, CHUNK),
            prompt.states,
            prompt.key_heads,
        )
        return made, prompt.states[:1]

    runs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "Denim": denim,
        "fla": lambda: peers.fla_delta_prefill(q, k, v, *gates, begin, None),
        "FlashQLA": lambda: peers.flashqla_delta_prefill(q, k, v, *gates, begin, cu_seqlens),
    }
    for name, run in runs.items():
        try:
            made, last = run()
            yield Error(inputs, name, _relative(made.view(out.shape), out), _relative(last, state))
        except Exception as error:  # as in `measured`
            nan = float("nan")
            yield Error(inputs, name, nan, nan, f"{type(error).__name__}: {error}".split("\n")[0][:160])


def lines(errors: Iterator[Error] | list[Error]) -> Iterator[str]:
    """A line for each kind of input, outputs and states for each kernel."""
    for error in errors:
        figures = f"out {error.out:.2e}, state {error.state:.2e}"
        yield f"{error.inputs:>13}  {error.name:<10} {error.note or figures}"


def _shifted(prompt: Prompt, shift: float) -> Prompt:
    a = prompt.a + shift
    softplus = torch.nn.functional.softplus(a.float() + prompt.dt_bias)
    return prompt._replace(a=a, log_decay=-prompt.a_log.exp() * softplus)


def _relative(made: Tensor, reference: Tensor) -> float:
    difference = made.double() - reference
    return (difference.norm() / reference.norm()).item()
