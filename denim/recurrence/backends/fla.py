"""flash-linear-attention (0.6.0): the gated delta rule in Triton.

Owns the call. Its kernels are tuned at their first call for each number of heads, which takes a minute or so.
"""

from __future__ import annotations

from torch import Tensor

from denim.recurrence.backends.packed import Packed, by_fla_signature

LOG_DECAY = True


def run(packed: Packed) -> tuple[Tensor, Tensor]:
    """Outputs and last states."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return by_fla_signature(chunk_gated_delta_rule, packed)
