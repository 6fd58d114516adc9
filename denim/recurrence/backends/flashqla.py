"""FlashQLA (0.1.3): the gated delta rule for heads of 128 on Hopper and later, in bf16 and fp16.

Owns the call. It cuts long sequences over the device by itself; where the decay has faded a segment's past
below e^-10 it leaves it out.
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
    from flash_qla import chunk_gated_delta_rule

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
