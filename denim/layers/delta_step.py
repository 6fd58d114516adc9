"""The delta rule for the decode rows of a batch, in plain torch: written at once, or recorded.

Owns the choice between the two, which the batch decides. Knows where states and rings lie; no projection.
"""

from __future__ import annotations

from torch import Tensor

from denim.layers.batch import StepBatch
from denim.recurrence.deferred import gated_delta_step_deferred
from denim.recurrence.gated_delta import gated_delta_step


def delta_step(
    batch: StepBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """One token for each of R decode rows, in place on the slots that the batch names: [R, Hv, d_v] in v's
    dtype. Arguments as in `gated_delta_step`."""
    states = batch.memory.state(layer, "recurrent")
    ring = batch.ring(layer)
    if ring is None or batch.pending is None:
        with batch.in_place(states) as rows:
            return gated_delta_step(q, k, v, log_decay, beta, rows)
    return gated_delta_step_deferred(
        q, k, v, log_decay, beta, states, ring, batch.decode_slots, batch.pending
    )
