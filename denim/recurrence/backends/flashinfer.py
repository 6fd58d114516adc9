"""FlashInfer (0.7.4): the gated delta rule for heads of 128 on Hopper and later, in bf16 and fp16.

Owns the call. It cuts long sequences over the device by itself where few heads and sequences would leave
most of it idle.
"""

from __future__ import annotations

import logging

from torch import Tensor

from denim.recurrence.backends.packed import Packed

log = logging.getLogger("denim")

LOG_DECAY = False
OFFSETS_ALIGNMENT = 8  # bytes; its kernels read cu_seqlens in pairs


def has_kernels() -> bool:
    """Without the CuTe DSL (nvidia-cutlass-dsl) it installs and imports, but has no kernels of this rule."""
    try:
        from flashinfer import gdn_prefill
    except ImportError as error:
        log.warning("flashinfer is installed but does not import, and is left out: %s", error)
        return False
    return gdn_prefill.chunk_gated_delta_rule_sm90 is not None


def run(packed: Packed) -> tuple[Tensor, Tensor]:
    """Outputs and last states."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    offsets = packed.cu_seqlens
    if offsets.data_ptr() % OFFSETS_ALIGNMENT:
        offsets = offsets.clone()
    return chunk_gated_delta_rule(
        packed.q[0],
        packed.k[0],
        packed.v[0],
        packed.decay[0],
        packed.beta[0],
        packed.scale,
        initial_state=packed.states,
        output_final_state=True,
        cu_seqlens=offsets,
        max_seqlen=packed.longest,
    )
