"""Reader of Ling-3.0 configs (model type bailing_hybrid), as published and as transformers saves them.

Owns what this family's keys mean and which values Denim's model code covers. Knows nothing of files.

The last layer of each `layer_group_size` is latent attention, the others are KDA. All of `qk_rope_head_dim`
is turned: a `partial_rotary_factor` beside it is the share of `head_dim`, which is of KDA, and is not read.
transformers writes qk_rope_head_dim over `head_dim` and keeps the latter as `linear_head_dim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from denim.spec.fields import Fields, is_number
from denim.spec.latent_keys import MAX_POSITION, one_of, read_ffns, read_latent_attention
from denim.spec.linear import KimiDelta
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    LAYER_LETTERS,
    read_dtype,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
ROPE_SHARE = "partial_rotary_factor"

# Keys of the vendor's code, and the values that the published checkpoints give them.
FIXED: dict[str, list[Any]] = {
    "gated_attention_proj_granularity_type": ["head_wise"],
    "group_norm_size": [1],
    "linear_silu": [True],
    "mlp_bias": [False],
    "moe_router_enable_expert_bias": [True],
    "no_kda_lora": [True],
    "num_kv_heads_for_linear_attn": [0],
    "rope_interleave": [True],
    "router_dtype": ["fp32"],
    "routing_group_score_top_k": [2],
    "scale_router_input": [False],
    "score_function": ["sigmoid"],
    "scoring_func": ["sigmoid"],
    "up_proj_norm": [False],
    "use_bias": [False],
    "use_kda_lora": [False],
    "use_mla_nope": [False],
    "use_nGPT": [False],
    "use_qk_norm": [True],
    "use_qkv_bias": [False],
    "value_norm": [False],
    # A limit of 0 is none.
    "expert_swiglu_limit_list": [[]],
    "share_expert_swiglu_limit_list": [[]],
}
# Training, dropout, and the MTP head, which is not served.
UNUSED = (
    "embedding_dropout",
    "hidden_dropout",
    "max_window_layers",
    "mtp_loss_scaling_factor",
    "mtp_use_kda",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_dropout",
    "pretraining_tp",
    "seq_aux",
)


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    fields = Fields(_without_share(fields.raw), fields.where)
    refuse_quantised(fields)
    for key, supported in FIXED.items():
        fields.demand(key, supported)
    fields.ignore(*UNUSED)

    count = fields.layer_count()
    attention = read_latent_attention(fields, gated=True)
    fields.demand("rotary_dim", [attention.rope_dim])
    context = fields.positive_int(one_of(fields, MAX_POSITION))
    reading = read_rope(fields, attention.rope_dim, context)
    if reading.rope.kind != "default":
        key = next(key for key in ROPE_SECTIONS if key in fields)
        raise fields.error(key, "RoPE without scaling, as this family is published")
    mixers: dict[str, Mixer] = {"L": _kimi_delta(fields), "F": attention}
    ffns = read_ffns(fields, count)
    pattern = _pattern(fields, count)
    spec = ModelSpec(
        family="bailing_hybrid",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter, ffn in zip(pattern, ffns, strict=True)),
        rope=reading.rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=context,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
    )
    fields.finish()
    return spec


def _without_share(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without partial_rotary_factor, wherever it stands; see the module's docstring."""
    cleaned = {key: value for key, value in config.items() if key != ROPE_SHARE}
    for section in ROPE_SECTIONS:
        if isinstance(cleaned.get(section), Mapping):
            cleaned[section] = {k: v for k, v in cleaned[section].items() if k != ROPE_SHARE}
    return cleaned


def _kimi_delta(fields: Fields) -> KimiDelta:
    """Heads and widths stand under transformers' own keys, or else under those of attention."""
    dim = fields.positive_int("linear_head_dim" if "linear_head_dim" in fields else "head_dim")
    fields.ignore("head_dim")
    heads = fields.positive_int("num_attention_heads")
    fields.demand("linear_num_heads", [heads])
    width = fields.positive_int(one_of(fields, ("short_conv_kernel_size", "linear_conv_kernel_dim")))
    floor = None
    if fields.flag("kda_safe_gate", default=True):
        floor = fields.get("kda_lower_bound")
        if not is_number(floor) or floor >= 0:
            raise fields.error("kda_lower_bound", "a negative number, since kda_safe_gate is on")
        floor = float(floor)
    fields.ignore("kda_lower_bound")
    return KimiDelta(heads, dim, dim, width, decay_rank=0, gate_rank=0, decay_floor=floor)


def _pattern(fields: Fields, count: int) -> str:
    """One letter a layer, from layer_types or else from layer_group_size.

    The vendor's code and transformers differ on layers behind the last whole group, so these must be listed.
    """
    if "layer_types" in fields:
        fields.ignore("layer_group_size")
        return read_layer_types(fields, "layer_types", LAYER_LETTERS, count)
    group = fields.positive_int("layer_group_size")
    if count % group:
        raise fields.error("layer_group_size", f"a divisor of num_hidden_layers ({count}), or layer_types")
    return ("L" * (group - 1) + "F") * (count // group)


READERS = {"bailing_hybrid": read}
