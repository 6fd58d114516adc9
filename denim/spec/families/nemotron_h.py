"""Reader of Nemotron-H configs: every layer is one Mamba2, attention or feed-forward part, dense or sparse.

Owns what this family's keys mean. Two spellings of the layers: `hybrid_override_pattern`, one character each
(M Mamba2, * attention, - dense network, E experts), and the list `layers_block_type` of names.

Defaults, all of them transformers' own: heads of 128, layer_norm_epsilon 1e-5, 8 groups, Δ of at least 0.001,
a bias in the convolution alone, one group of experts, residuals in the model's dtype, untied embeddings.

The least Δ is `time_step_min`, to which the authors' plain code and transformers clamp prompts; a prompt and
its decode steps must agree, so Denim clamps both.
"""

from __future__ import annotations

from math import inf

from denim.errors import ConfigError
from denim.spec.attention import FullAttention
from denim.spec.families.mamba2 import Details
from denim.spec.ffn import DenseFFN, MoEFFN, NoFFN
from denim.spec.fields import Fields
from denim.spec.linear import Mamba2
from denim.spec.mamba2_keys import NO_LIMIT, read_groups, read_time_step_limit
from denim.spec.mixers import NoMixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.standard_keys import (
    read_dtype,
    read_expert_counts,
    read_expert_groups,
    read_head_counts,
    read_layer_types,
    refuse_quantised,
)

KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
STATE_DTYPES = ("float32", "bfloat16", "float16")


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.demand("attention_bias", [False])
    fields.demand("mlp_bias", [False])
    if "sliding_window" in fields:
        raise fields.error("sliding_window", "full attention, no such key")
    if read_time_step_limit(fields) != NO_LIMIT:
        raise fields.error("time_step_limit", "[0, Infinity] or no such key; time_step_min is the limit")
    # Attention has no positions, whatever these say; training's own; MTP heads, which are not loaded.
    fields.ignore("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters")
    fields.ignore("rescale_prenorm_residual", "hidden_dropout", "time_step_max", "time_step_floor")
    fields.ignore("time_step_rank", "time_step_scale", "time_step_init_scheme")
    fields.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    fields.ignore("chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_proj_bias", "expand")
    fields.ignore("moe_shared_expert_overlap")

    norm_eps = fields.number("layer_norm_epsilon", default=1e-5)
    fields.demand("rms_norm_eps", [norm_eps])
    fields.demand("norm_eps", [norm_eps])
    hidden = fields.positive_int("hidden_size")
    layers = {"M": Layer(_mamba2(fields), NoFFN()), "*": Layer(_attention(fields), NoFFN())}
    pattern = _pattern(fields)
    activation = fields.choice("mlp_hidden_act", ["relu2", "silu", "gelu"], default="relu2")
    if "-" in pattern:
        dense = DenseFFN(fields.positive_int("intermediate_size"), activation, gated=False)
        layers["-"] = Layer(NoMixer(), dense)
    if "E" in pattern:
        layers["E"] = Layer(NoMixer(), _moe(fields, activation))
    fields.ignore("intermediate_size", *MOE_KEYS)  # of kinds of layers that this model may lack
    stated = fields.choice("mamba_ssm_cache_dtype", STATE_DTYPES, default="float32")
    spec = ModelSpec(
        family="nemotron_h",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(layers[kind] for kind in pattern),
        rope=None,
        norm_eps=norm_eps,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=fields.positive_int("max_position_embeddings"),
        dtype=read_dtype(fields, dtype),
        state_dtype=stated if state_dtype == "auto" else state_dtype,
        details=Details(
            time_step_limit=(fields.number("time_step_min", default=0.001), inf),
            fp32_residual=fields.flag("residual_in_fp32", default=False),
        ),
    )
    fields.finish()
    return spec


def _pattern(fields: Fields) -> str:
    """One of `KINDS`' letters a layer, from whichever spellings are there; they must agree."""
    found: dict[str, str] = {}
    short = fields.get("hybrid_override_pattern")
    if short is not None:
        if not isinstance(short, str) or not short or set(short) - set(KINDS.values()):
            raise fields.error("hybrid_override_pattern", f"a string of {', '.join(set(KINDS.values()))}")
        found["hybrid_override_pattern"] = short
    for key in ("layers_block_type", "layer_types"):
        if key in fields:
            types = fields.get(key)
            count = len(types) if isinstance(types, list) else 0
            found[key] = read_layer_types(fields, key, KINDS, count)
    if not found:
        raise fields.error("hybrid_override_pattern", "one character a layer, or layers_block_type")
    if len(set(found.values())) > 1:
        raise ConfigError(f"{fields.where}: {found} contradict each other; keep one of them")
    pattern = next(iter(found.values()))
    if fields.get("num_hidden_layers") not in (None, len(pattern)):
        raise fields.error("num_hidden_layers", f"{len(pattern)}, as the layers' kinds say, or no such key")
    return pattern


def _attention(fields: Fields) -> FullAttention:
    heads, kv_heads = read_head_counts(fields)
    fields.demand("num_query_groups", [kv_heads])
    stated = [key for key in ("head_dim", "attention_head_dim") if key in fields]
    head_dim = fields.positive_int(stated[0] if stated else "head_dim", default=128)
    fields.demand("attention_head_dim", [head_dim])
    return FullAttention(heads, kv_heads, head_dim, rotary_dim=0)


def _mamba2(fields: Fields) -> Mamba2:
    fields.choice("mamba_hidden_act", ["silu"], default="silu")
    heads = fields.positive_int("mamba_num_heads")
    return Mamba2(
        num_heads=heads,
        head_dim=fields.positive_int("mamba_head_dim"),
        state_dim=fields.positive_int("ssm_state_size"),
        num_groups=read_groups(fields, "n_groups", heads, 8),
        conv_width=fields.positive_int("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias", default=False),
    )


MOE_KEYS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "n_shared_experts",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
)


def _moe(fields: Fields, activation: str) -> MoEFFN:
    fields.demand("n_shared_experts", [1])
    experts, top_k = read_expert_counts(fields, "n_routed_experts")
    keys = ("n_group", "topk_group", "num_experts_per_tok")
    groups, best = read_expert_groups(fields, keys, experts, default=1)
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate=fields.positive_int("moe_intermediate_size"),
        shared_intermediate=fields.positive_int("moe_shared_expert_intermediate_size"),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        selection_bias=True,
        groups=groups,
        top_groups=best,
        exact_router=True,
        shared_gate=False,
        activation=activation,
        gated=False,
        latent=fields.positive_int("moe_latent_size") if "moe_latent_size" in fields else 0,
    )


READERS = {"nemotron_h": read}
