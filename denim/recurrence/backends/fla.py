"""flash-linear-attention (0.6.0): the gated delta rule in Triton.

Owns the call. Its kernels are tuned at their first call for each number of heads, which takes a minute or so.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from denim.recurrence.backends.packed import through


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q,
        k,
        v,
        log_decay,
        beta,
        scale=scale,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )


gated_delta_chunks = partial(through, _run)
