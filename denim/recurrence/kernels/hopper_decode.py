"""Which kernel for Hopper takes a decode step of the delta rules, if one does.

Owns the choice alone; the kernels know what suits them. Needs Triton with Gluon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels import hopper_delta_spread as spread
from denim.recurrence.kernels import hopper_delta_step as whole


def step_for(
    state: Tensor, rows: int, key_heads: int, ring: Ring | None, pending: Tensor | None
) -> Callable[..., Tensor] | None:
    """A kernel for so many rows with states [slots, Hv, d_v, d_k], that writes, or records in `ring`: of all
    arguments of `hopper_delta_step` but ring and pending. None: the portable one is to be taken."""
    if ring is None and spread.suits(state, rows, key_heads):
        return spread.hopper_delta_spread
    if whole.suits(state, rows, key_heads, 0 if ring is None else ring.length):
        return partial(whole.hopper_delta_step, ring=ring, pending=pending)
    return None
