"""FlashQLA (0.1.3): the gated delta rule for heads of 128 on Hopper and later, in bf16 and fp16.

Owns the call. It cuts long sequences over the device by itself; where the decay has faded a segment's past
below e^-10 it leaves that out.
"""

from __future__ import annotations

from torch import Tensor

from denim.recurrence.backends.packed import Packed, by_fla_signature

LOG_DECAY = True


def run(packed: Packed) -> tuple[Tensor, Tensor]:
    """Outputs and last states."""
    from flash_qla import chunk_gated_delta_rule

    return by_fla_signature(chunk_gated_delta_rule, packed)
