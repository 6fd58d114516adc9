"""Reader of Qwen3-Next configs.

Owns what the family's keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: full_attention_interval 4, partial_rotary_factor 0.25,
decoder_sparse_step 1, mlp_only_layers [], tie_word_embeddings false, norm_topk_prob true. No published
config counts the MTP layers, and every published checkpoint has one: that is the default here. Every other
key that describes the model must be there.
"""

from __future__ import annotations

from dataclasses import replace

from denim.spec.ffn import FFN, DenseFFN
from denim.spec.fields import Fields
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.quantisation import read_weight_blocks
from denim.spec.qwen_keys import (
    DEFAULT_PARTIAL_ROTARY,
    read_attention,
    read_gated_delta_net,
    read_moe,
    read_mtp_count,
    read_pattern,
)
from denim.spec.rope import read_rope
from denim.spec.standard_keys import read_dtype, read_state_dtype

MTP_LAYERS = 1


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of a `qwen3_next` config."""
    fields.demand("attention_bias", [False])
    fields.demand("use_sliding_window", [False])
    fields.choice("hidden_act", ["silu"])

    head_dim = fields.positive_int("head_dim")
    max_position = fields.positive_int("max_position_embeddings")
    rope, rotary_dim, max_position = read_rope(fields, head_dim, max_position, DEFAULT_PARTIAL_ROTARY)
    attention = read_attention(fields, head_dim, rotary_dim)
    mixers: dict[str, Mixer] = {"L": read_gated_delta_net(fields), "F": attention}
    moe = replace(read_moe(fields), renormalise=fields.flag("norm_topk_prob", default=True))
    pattern = read_pattern(fields)
    ffns = _ffns(fields, moe, len(pattern))
    spec = ModelSpec(
        family="qwen3_next",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter, ffn in zip(pattern, ffns, strict=True)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        mtp_layers=(Layer(attention, moe),) * read_mtp_count(fields, MTP_LAYERS),
        weight_blocks=read_weight_blocks(fields),
    )
    fields.finish()
    return spec


def _ffns(fields: Fields, moe: FFN, count: int) -> list[FFN]:
    """Sparse at every `decoder_sparse_step`-th layer, dense between them and where `mlp_only_layers` says."""
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense_at = fields.get("mlp_only_layers") or []
    if not isinstance(dense_at, list) or not all(type(i) is int and 0 <= i < count for i in dense_at):
        raise fields.error("mlp_only_layers", f"a list of layers from 0 to {count - 1}")
    sparse = [i not in dense_at and (i + 1) % step == 0 for i in range(count)]
    if all(sparse):
        fields.ignore("intermediate_size")  # of dense layers, of which there are none
        return [moe] * count
    dense = DenseFFN(fields.positive_int("intermediate_size"))
    return [moe if is_sparse else dense for is_sparse in sparse]


READERS = {"qwen3_next": read}
