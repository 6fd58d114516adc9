"""flash-linear-attention (0.6.0): the gated delta rule in Triton.

Owns the call. Its kernels are tuned at their first call for each number of heads, which takes a minute or so.
"""

from __future__ import annotations

from torch import Tensor

from denim.recurrence.backends.packed import Packed

LOG_DECAY = True


def run(packed: Packed) -> tuple[Tensor, Tensor]:
    """Outputs and last states."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        packed.q,
        packed.k,
        packed.v,
        packed.decay,
        packed.beta,
        scale=packed.scale,
        initial_state=packed.states,
        output_final_state=True,
        cu_seqlens=packed.cu_seqlens,
        state_v_first=True,
    )
