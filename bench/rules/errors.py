"""How far kernels are from float64: what an error is, and a table of them.

Owns the comparison. An error is the norm of the difference over the norm of the reference, of outputs and of
last states. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Run = Callable[[], tuple[Tensor, Tensor]]
"""Gives outputs and last states, in any shape with as many numbers as the reference has."""


class Error(NamedTuple):
    """Of one kernel on one kind of input; NaN where it could not run, then `note` says why."""

    rule: str
    inputs: str
    name: str
    out: float
    state: float
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        figures = {} if self.note else {"out": self.out, "state": self.state}
        return {"rule": self.rule, "inputs": self.inputs, "name": self.name, **figures, "note": self.note}


def compared(
    rule: str, inputs: str, reference: tuple[Tensor, Tensor], runs: Mapping[str, Run]
) -> Iterator[Error]:
    """One error a run; what cannot run leaves a reason, as in `measure.measured`."""
    for name, run in runs.items():
        try:
            figures = [_relative(made, true) for made, true in zip(run(), reference, strict=True)]
            yield Error(rule, inputs, name, *figures)
        except Exception as error:  # a peer's failure is a result
            note = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            yield Error(rule, inputs, name, float("nan"), float("nan"), note)


def lines(errors: Iterable[Error]) -> Iterator[str]:
    """A line for each kernel and kind of input."""
    for error in errors:
        figures = f"out {error.out:.2e}, state {error.state:.2e}"
        yield f"{error.rule:>22}  {error.inputs:>12}  {error.name:<10} {error.note or figures}"


def _relative(made: Tensor, reference: Tensor) -> float:
    difference = made.reshape(reference.shape).double() - reference
    return (difference.norm() / reference.norm()).item()
