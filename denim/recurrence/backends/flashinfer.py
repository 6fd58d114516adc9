"""FlashInfer (0.7.4): the gated delta rule for heads of 128 on Hopper and later, in bf16 and fp16.

Owns the call. It cuts long sequences over the device by itself.
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
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q[0],
        k[0],
        v[0],
        log_decay[0].exp(),
        beta[0],
        scale,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )


gated_delta_chunks = partial(through, _run)
