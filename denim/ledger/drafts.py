"""What drafts cost in memory: compact records of a few tokens, or a state for every draft position.

Owns the size of a record. A record is what the recurrence needs to apply one token again: the convolution's
input, and what the rule adds to and takes from the state. Gates are fp32, all else is in the model's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.ledger.cost import ledger_of
from denim.spec.linear import GatedDeltaNet, KimiDelta, Lightning, Mamba1, Mamba2
from denim.spec.mixers import DTYPE_BYTES, Mixer
from denim.spec.model import ModelSpec
from denim.spec.parallel import Parallel

GATE_BYTES = 4  # fp32


class DraftCost(NamedTuple):
    """Bytes per request that verifies `drafts` drafts in a step.

    A step applies the last sampled token and the drafts, drafts + 1 tokens: so many records, or so many
    states of which one is there anyway. `mtp_kv_bytes_per_token` is what the MTP head's own KV adds.
    """

    drafts: int
    record_bytes: int
    records_bytes: int
    snapshots_bytes: int
    mtp_kv_bytes_per_token: int


def draft_cost(spec: ModelSpec, drafts: int, kv_dtype: str = "auto") -> DraftCost:
    """The cost of `drafts` drafts. Raises ConfigError for an unknown `kv_dtype`."""
    ledger = ledger_of(spec, kv_dtype)
    record = record_bytes(spec)
    return DraftCost(
        drafts,
        record,
        (drafts + 1) * record,
        drafts * ledger.bytes_per_request,
        ledger.mtp_kv_bytes_per_token,
    )


def record_bytes(spec: ModelSpec) -> int:
    """Bytes of one token's record over all layers."""
    return sum(_record(layer.mixer, spec) for layer in spec.layers)


def _record(mixer: Mixer, spec: ModelSpec) -> int:
    tensors = mixer.state_tensors(spec.state_dtype, spec.dtype)
    inputs = sum(t.shape[1] for t in tensors if t.role == "conv")
    written, gates = _update(mixer)
    return (inputs + written) * DTYPE_BYTES[spec.dtype] + gates * GATE_BYTES


def _update(mixer: Mixer) -> tuple[int, int]:
    """(numbers of keys and values, numbers of gates) that one token brings to a layer's state."""
    match mixer:
        case GatedDeltaNet():
            keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_value_heads * mixer.value_dim
            return keys + values, 2 * mixer.num_value_heads  # decay, β
        case KimiDelta():
            return mixer.num_heads * (mixer.key_dim + mixer.value_dim), mixer.num_heads * (mixer.key_dim + 1)
        case Lightning():
            return 2 * mixer.num_heads * mixer.head_dim, 0  # the decay is constant
        case Mamba2():
            return mixer.inner + mixer.num_groups * mixer.state_dim, mixer.num_heads  # x, B; Δ
        case Mamba1():
            return mixer.inner + mixer.state_dim, mixer.inner  # x, B; Δ
        case Parallel():
            return _update(mixer.linear)
    return 0, 0
