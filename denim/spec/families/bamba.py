"""Reader of Bamba configs: Mamba2 layers with a few attention layers, each with a dense network behind it.

Owns what this family's keys mean. Defaults, all of them transformers' own: RoPE turns half of a head, no
attention layer where attn_layer_indices is missing, no limits of Δ, untied embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.fields import Fields
from denim.spec.mamba2_keys import read_mamba2, read_time_step_limit
from denim.spec.model import Layer, ModelSpec
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    ANY_LAYER_LETTERS,
    read_dtype,
    read_head_counts,
    read_head_dim,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

PARTIAL_ROTARY = 0.5


@dataclass(frozen=True)
class Details:
    time_step_limit: tuple[float, float]


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.demand("attention_bias", [False])
    fields.demand("mlp_bias", [False])
    fields.choice("hidden_act", ["silu"], default="silu")
    fields.ignore("num_logits_to_keep", "z_loss_coefficient")

    hidden = fields.positive_int("hidden_size")
    heads, kv_heads = read_head_counts(fields)
    head_dim = read_head_dim(fields, heads)
    rope, rotary_dim, max_position = read_rope(
        fields, head_dim, fields.positive_int("max_position_embeddings"), PARTIAL_ROTARY
    )
    fields.demand("attn_rotary_emb", [rotary_dim])
    attention = FullAttention(heads, kv_heads, head_dim, rotary_dim)
    linear = read_mamba2(fields, hidden)
    ffn = DenseFFN(fields.positive_int("intermediate_size"))
    spec = ModelSpec(
        family="bamba",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(attention if kind == "F" else linear, ffn) for kind in _pattern(fields)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=Details(read_time_step_limit(fields)),
    )
    fields.finish()
    return spec


def _pattern(fields: Fields) -> str:
    """One letter a layer, from attn_layer_indices; a list of layer types beside it must say the same."""
    count = fields.layer_count()
    indices = fields.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(i in range(count) for i in indices):
        raise fields.error("attn_layer_indices", f"a list of layers from 0 to {count - 1}")
    pattern = "".join("F" if i in indices else "L" for i in range(count))
    for key in ("layer_types", "layers_block_type"):
        if key in fields and read_layer_types(fields, key, ANY_LAYER_LETTERS, count) != pattern:
            raise fields.error(key, f"the layers that attn_layer_indices gives, {pattern}, or no such key")
    return pattern


READERS = {"bamba": read}
