"""Reader of OLMo-hybrid configs.

Owns what the family's keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: every fourth layer full attention, as many key-value heads and
linear heads as query heads, linear keys of 3/4 hidden size in all and values of twice their width, a
convolution of width 4, linear_allow_neg_eigval true. Published models turn nothing: an explicit null as
rope_theta, beside rope_parameters or inside it, means no RoPE. One of the two must be stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.fields import Fields
from denim.spec.linear import GatedDeltaNet
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    LAYER_LETTERS,
    read_dtype,
    read_head_counts,
    read_head_dim,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

DEFAULT_INTERVAL = 4
DEFAULT_KEY_SHARE = 0.75  # of the hidden size
DEFAULT_VALUE_EXPANSION = 2
DEFAULT_WIDTH = 4

# How gates were drawn before training.
HARMLESS_HERE = (
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
)


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of an `olmo_hybrid` config."""
    fields.ignore(*HARMLESS_HERE)
    refuse_quantised(fields)
    fields.demand("attention_bias", [False])
    fields.demand("linear_use_gate", [True])
    fields.choice("hidden_act", ["silu"], default="silu")

    heads, kv_heads = read_head_counts(fields)
    head_dim = read_head_dim(fields, heads)
    max_position = fields.positive_int("max_position_embeddings")
    rope, rotary_dim = None, 0
    if _turns_nothing(fields.raw):
        fields.ignore("rope_parameters")
    else:
        rope, rotary_dim, max_position = read_rope(fields, head_dim, max_position)
    attention = FullAttention(heads, kv_heads, head_dim, rotary_dim, qk_norm=True, qk_norm_whole=True)
    mixers: dict[str, Mixer] = {"L": _gated_delta_net(fields, heads), "F": attention}
    ffn = DenseFFN(fields.positive_int("intermediate_size"))
    spec = ModelSpec(
        family="olmo_hybrid",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter in _pattern(fields)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
    )
    fields.finish()
    return spec


def _turns_nothing(config: Mapping[str, Any]) -> bool:
    """`Fields` cannot tell a null from a missing key; here the two differ."""
    places = [config, config.get("rope_parameters")]
    stated = [place["rope_theta"] for place in places if isinstance(place, Mapping) and "rope_theta" in place]
    return bool(stated) and all(theta is None for theta in stated)


def _gated_delta_net(fields: Fields, heads: int) -> GatedDeltaNet:
    key_heads = fields.positive_int("linear_num_key_heads", default=heads)
    value_heads = fields.positive_int("linear_num_value_heads", default=heads)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    hidden = fields.positive_int("hidden_size")
    key_dim = fields.positive_int("linear_key_head_dim", default=int(DEFAULT_KEY_SHARE * hidden / key_heads))
    return GatedDeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=fields.positive_int("linear_value_head_dim", default=DEFAULT_VALUE_EXPANSION * key_dim),
        conv_width=fields.positive_int("linear_conv_kernel_dim", default=DEFAULT_WIDTH),
        beta_limit=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


def _pattern(fields: Fields) -> str:
    """One letter a layer; without layer_types the last layer is attention if no other would be."""
    count = fields.layer_count()
    if "layer_types" in fields:
        return read_layer_types(fields, "layer_types", LAYER_LETTERS, count)
    regular = "".join("L" if (i + 1) % DEFAULT_INTERVAL else "F" for i in range(count))
    return regular if "F" in regular else regular[:-1] + "F"


READERS = {"olmo_hybrid": read}
