"""What deferred writes save: a ring of recorded updates beside the state, which is written every L steps.

Owns the traffic of a decode step's states and rings, and the choice of L. A step reads the
state and the pending records, and writes one record; every L-th step writes the state in its place. Knows
specs; not how fast a kernel is.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.spec.model import ModelSpec

# A longer ring costs memory for ever less traffic: the shortest within this share of the least is taken. A
# record also costs more time than its bytes (two to five times, on an H200), so the share is not small.
ENOUGH = 0.06
LONGEST = 33
# Kernels take records by powers of two, and the step that fills a ring writes the state in place of one.
LENGTHS = (2, 3, 5, 9, 17, LONGEST)


class DeferredCost(NamedTuple):
    """Of one request: a step moves `step_bytes` of states and records, on average over L = `length` steps."""

    length: int
    step_bytes: float


def deferred_cost(spec: ModelSpec, length: int) -> DeferredCost | None:
    """The cost of rings of `length` records in all layers that can defer writes; None if there are none."""
    states = ring = 0
    for layer in spec.layers:
        records = sum(tensor.bytes for tensor in layer.mixer.record_tensors(length))
        if records:
            ring += records
            tensors = layer.mixer.state_tensors(spec.state_dtype, spec.dtype)
            states += sum(tensor.bytes for tensor in tensors if tensor.role == "recurrent")
    if not ring:
        return None
    record = ring // length
    read = (length - 1) / 2 * record  # 0 .. L - 1 pending, each equally often
    written = (states + (length - 1) * record) / length
    return DeferredCost(length, states + read + written)


def ring_length(spec: ModelSpec) -> int:
    """The L to take: the shortest of `LENGTHS` whose traffic is within `ENOUGH` of the least; 0 if no layer
    defers.

    The least lies near sqrt(2 state / record): 11 for heads of 128 x 128 in fp32 with a decay a head.
    """
    costs = [cost for length in LENGTHS if (cost := deferred_cost(spec, length))]
    if not costs:
        return 0
    enough = (1 + ENOUGH) * min(cost.step_bytes for cost in costs)
    return next(cost.length for cost in costs if cost.step_bytes <= enough)
