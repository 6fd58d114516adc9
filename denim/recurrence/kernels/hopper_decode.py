"""Which kernel for Hopper takes a decode step of the delta rules, if one does.

Owns the choice alone; the kernels know what suits them. Needs Triton with Gluon.
"""

from __future__ import annotations

from torch import Tensor

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels import hopper_delta_spread as spread
from denim.recurrence.kernels import hopper_delta_step as whole
from denim.recurrence.kernels.delta_inputs import DeltaInputs


def hopper_decode(inputs: DeltaInputs, ring: Ring | None, pending: Tensor | None) -> Tensor | None:
    """What `fused_delta_step` gives, or None: its portable kernel is to take the step."""
    state, rows, key_heads = inputs.state, inputs.rows, inputs.key_heads
    if ring is None and spread.suits(state, rows, key_heads):
        return spread.hopper_delta_spread(inputs)
    if whole.suits(state, rows, key_heads, 0 if ring is None else ring.length):
        return whole.hopper_delta_step(inputs, ring, pending)
    return None
