"""Decode steps of the delta rules with deferred writes beside those that write every step.

Owns the rings of these measurements. Rows stand at different places of their rings, as in a running batch,
and so does a row in the sets that calls rotate among.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.rules.clock import Floors
from bench.rules.delta_decode import DIM, HEADS, Step, fused, state_bytes, step_of
from bench.rules.kimi import KIMI_HEADS, fused_kimi
from bench.rules.measure import measured
from bench.rules.tables import Row
from denim.recurrence.deferred import Ring

BATCHES = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = (5, 9)  # steps from a write to the next


def rows(floors: Floors) -> Iterator[Row]:
    """Gated DeltaNet and KDA. The floor is that of a step which reads and writes the state."""
    for batch in BATCHES:
        for key_heads, value_heads in HEADS:
            step = step_of(key_heads, value_heads, batch)
            yield from _rows(floors, f"{key_heads}/{value_heads} heads", step, partial(fused, step), ())
    for batch in BATCHES:
        step = step_of(KIMI_HEADS, KIMI_HEADS, batch)
        yield from _rows(floors, f"KDA, {KIMI_HEADS} heads", step, fused_kimi(step), (DIM,))


def _rows(
    floors: Floors, layer: str, step: Step, run: Callable[..., Tensor], decay: tuple[int, ...]
) -> Iterator[Row]:
    """run: (set, ring, records of each row) -> a step. decay: shape of a head's log-decay."""
    section, shape = "deferred writes, µs a step", f"{layer}, batch {step.batch}"
    floor = floors.microseconds(2 * state_bytes(step.value_heads, step.batch))
    yield measured(section, shape, "write each", run, step.sets, floor)
    first = torch.arange(step.batch, device="cuda", dtype=torch.int32)
    for length in LENGTHS:
        ring = _ring(step, length, decay)
        pending = [(first + i) % length for i in range(step.sets)]
        recorded = partial(_recorded, run, ring, pending)
        yield measured(section, shape, f"L = {length}", recorded, step.sets, floor)


def _ring(step: Step, length: int, decay: tuple[int, ...]) -> Ring:
    slots, place = len(step.state), {"device": "cuda"}
    return Ring(
        torch.randn(slots, length, step.key_heads, DIM, **place) * 0.1,
        torch.randn(slots, length, step.value_heads, DIM, **place) * 0.1,
        -torch.rand(slots, length, step.value_heads, *decay, **place),
    )


def _recorded(run: Callable[..., Tensor], ring: Ring, pending: list[Tensor], i: int) -> Tensor:
    return run(i, ring, pending[i])
