"""Reader of Kimi Linear configs, as published and as transformers saves them.

Owns what this family's keys mean and which values Denim's model code covers. Knows nothing of files.

The linear layers stand in `linear_attn_config` (published; layers counted from 1) or in `linear_*` keys
beside `layer_types` (transformers). Positions are nowhere turned, so that RoPE's keys do not matter.
"""

from __future__ import annotations

from denim.errors import ConfigError
from denim.spec.fields import Fields
from denim.spec.latent_keys import MAX_POSITION, one_of, read_ffns, read_latent_attention
from denim.spec.linear import KimiDelta
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.standard_keys import (
    LAYER_LETTERS,
    read_dtype,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

# A linear layer's values: the key in linear_attn_config, and transformers' beside it.
LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.demand("mla_use_nope", [True])
    fields.demand("moe_layer_freq", [1])
    fields.demand("moe_router_activation_func", ["sigmoid"])
    fields.demand("use_grouped_topk", [True])
    fields.demand("num_nextn_predict_layers", [0])
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "pretraining_tp")

    count = fields.layer_count()
    linear, pattern = _linear_layers(fields, count)
    mixers: dict[str, Mixer] = {"L": linear, "F": read_latent_attention(fields, gated=False)}
    ffns = read_ffns(fields, count)
    spec = ModelSpec(
        family="kimi_linear",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter, ffn in zip(pattern, ffns, strict=True)),
        rope=None,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=fields.positive_int(one_of(fields, MAX_POSITION)),
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
    )
    fields.finish()
    return spec


def _linear_layers(fields: Fields, count: int) -> tuple[KimiDelta, str]:
    """The linear mixer, and one letter a layer. What stands in both places must agree."""
    published = "linear_attn_config" in fields
    section = fields.section("linear_attn_config", default={})
    sizes = {}
    for inner, outer in LINEAR_KEYS.items():
        if not published:
            sizes[inner] = fields.positive_int(outer)
        else:
            sizes[inner] = section.positive_int(inner)
            fields.demand(outer, [sizes[inner]])
    pattern = _numbered(section, count) if published else ""
    section.finish()
    if "layer_types" in fields or not published:
        listed = read_layer_types(fields, "layer_types", LAYER_LETTERS, count)
        if published and listed != pattern:
            raise ConfigError(
                f"{fields.where}: 'layer_types' gives {listed}, but 'linear_attn_config' gives {pattern}; "
                "correct one of them or delete it"
            )
        pattern = listed
    dim = sizes["head_dim"]
    # The low-rank projections of decay and output gate are as wide inside as a head.
    mixer = KimiDelta(sizes["num_heads"], dim, dim, sizes["short_conv_kernel_size"], dim, dim)
    return mixer, pattern


def _numbered(section: Fields, count: int) -> str:
    """One letter a layer from two lists of layer numbers, counted from 1, that name each layer once."""
    numbers = {"L": section.get("kda_layers"), "F": section.get("full_attn_layers")}
    named = {
        number: letter
        for letter, listed in numbers.items()
        if isinstance(listed, list)
        for number in listed
        if isinstance(number, int)
    }
    stated = sum(len(listed) for listed in numbers.values() if isinstance(listed, list))
    if stated != count or sorted(named) != list(range(1, count + 1)):
        raise section.error(
            "kda_layers",
            f"numbers from 1 to {count}, each there or in full_attn_layers, and in one of the two",
        )
    return "".join(named[number] for number in range(1, count + 1))


READERS = {"kimi_linear": read}
