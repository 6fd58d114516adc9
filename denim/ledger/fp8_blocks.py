"""What FP8 blocks of a checkpoint save in memory, on a device that multiplies them as they are.

Owns which matrices those are, by the spec alone: the projections that Qwen publishes in FP8 (all but those of
β, decay, router and gates) whose parts are whole blocks. What is really kept the loader decides from the
files (`denim.models.fp8_kept`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.linear import GatedDeltaNet
from denim.spec.mixers import DTYPE_BYTES
from denim.spec.model import Layer, ModelSpec

BLOCK = 128
SCALE_BYTES = 4
SCALE_MULTIPLE = 4  # scales of a row of blocks, rounded up to what the product reads


def fp8_saving(spec: ModelSpec, *, mtp: bool = True) -> int:
    """Bytes that weights take less than in the model's dtype; `mtp`: the MTP head's too.

    0 unless the checkpoint has blocks of 128 x 128 and the dtype is bfloat16.
    """
    if not _can_stay(spec):
        return 0
    layers = (*spec.layers, *spec.mtp_layers) if mtp else spec.layers
    hidden = spec.hidden_size
    saved = sum(_saved(*matrix) for layer in layers for matrix in _matrices(layer, hidden))
    return saved + sum(expert_saving(spec, layer.ffn) for layer in layers if isinstance(layer.ffn, MoEFFN))


def expert_saving(spec: ModelSpec, ffn: MoEFFN) -> int:
    """The part of it that all routed experts of one layer have.

    Denim's own product takes them, which asks nothing of the scales' place in memory.
    """
    hidden, width = spec.hidden_size, ffn.intermediate
    if not _can_stay(spec) or hidden % BLOCK or width % BLOCK:
        return 0
    return ffn.num_experts * (_saved(hidden, width, width, multiple=1) + _saved(width, hidden, multiple=1))


def _can_stay(spec: ModelSpec) -> bool:
    return spec.weight_blocks == (BLOCK, BLOCK) and spec.dtype == "bfloat16"


def _saved(columns: int, *parts: int, multiple: int = SCALE_MULTIPLE) -> int:
    """Of one matrix in memory that is published as `parts` of so many rows."""
    if columns % BLOCK or any(rows % BLOCK for rows in parts):
        return 0
    scales = -(-columns // (BLOCK * multiple)) * multiple * SCALE_BYTES
    return sum(rows * columns * (DTYPE_BYTES["bfloat16"] - 1) - rows // BLOCK * scales for rows in parts)


def _matrices(layer: Layer, hidden: int) -> Iterable[tuple[int, ...]]:
    """Columns, then rows of the published parts, of each matrix in memory."""
    match layer.mixer:
        case FullAttention() as attention:
            queries = attention.num_heads * attention.head_dim
            keys = attention.num_kv_heads * attention.head_dim
            yield hidden, queries * (2 if attention.gated else 1), keys, keys
            yield queries, hidden
        case GatedDeltaNet() as linear:
            values = linear.num_value_heads * linear.value_dim
            yield hidden, linear.conv_channels, values
            yield values, hidden
    match layer.ffn:
        case DenseFFN(intermediate=width) | MoEFFN(shared_intermediate=width) if width:
            yield hidden, width, width
            yield width, hidden
