"""Reader of Granite-4 configs: Mamba2 layers with a few attention layers, dense or with sparse experts.

Owns what this family's keys mean. Defaults, all of them transformers' own: all layers are Mamba2 where
layer_types is missing, multipliers 1, no positions, no limits of Δ, untied embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.attention import FullAttention
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.fields import Fields
from denim.spec.mamba2_keys import read_mamba2, read_time_step_limit
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec, Rope
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    ANY_LAYER_LETTERS,
    read_dtype,
    read_expert_counts,
    read_head_counts,
    read_head_dim,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

ROPE, NO_ROPE = "rope", "nope"
MAMBA_KEYS = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias")


@dataclass(frozen=True)
class Details:
    """What embeddings, scores of attention, outputs of mixers and networks, and logits are scaled by."""

    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_scale: float
    time_step_limit: tuple[float, float]


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.demand("attention_bias", [False])
    fields.demand("normalization_function", ["rmsnorm"])
    fields.choice("hidden_act", ["silu"], default="silu")
    fields.ignore("init_method")

    count = fields.layer_count()
    pattern = "L" * count
    if "layer_types" in fields:
        pattern = read_layer_types(fields, "layer_types", ANY_LAYER_LETTERS, count)
    rope, attention, max_position = _attention(fields)
    mixers: dict[str, Mixer] = {"F": attention}
    if "L" in pattern:
        mixers["L"] = read_mamba2(fields, fields.positive_int("hidden_size"))
    else:
        fields.ignore(*(f"mamba_{key}" for key in MAMBA_KEYS), "mamba_proj_bias")
    ffn = _ffn(fields)
    spec = ModelSpec(
        family="granitemoehybrid",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter in pattern),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=Details(
            embedding_scale=fields.number("embedding_multiplier", default=1.0),
            attention_scale=fields.number("attention_multiplier", default=1.0),
            residual_scale=fields.number("residual_multiplier", default=1.0),
            logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
            time_step_limit=read_time_step_limit(fields),
        ),
    )
    fields.finish()
    return spec


def _attention(fields: Fields) -> tuple[Rope | None, FullAttention, int]:
    """RoPE if the model has it, the attention layers, and the longest sequence."""
    heads, kv_heads = read_head_counts(fields)
    head_dim = read_head_dim(fields, heads)
    max_position = fields.positive_int("max_position_embeddings")
    if fields.choice("position_embedding_type", [ROPE, NO_ROPE], default=NO_ROPE) == NO_ROPE:
        fields.ignore("rope_theta", "rope_scaling", "rope_parameters")
        return None, FullAttention(heads, kv_heads, head_dim, rotary_dim=0), max_position
    rope, rotary_dim, max_position = read_rope(fields, head_dim, max_position)
    return rope, FullAttention(heads, kv_heads, head_dim, rotary_dim), max_position


def _ffn(fields: Fields) -> FFN:
    """Sparse experts beside a shared one, or, with num_local_experts 0, the shared one alone."""
    shared = fields.positive_int("shared_intermediate_size")
    if fields.integer("num_local_experts") == 0:
        fields.ignore("num_experts_per_tok", "intermediate_size")
        return DenseFFN(shared)
    experts, top_k = read_expert_counts(fields, "num_local_experts")
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate=fields.positive_int("intermediate_size"),
        shared_intermediate=shared,
        scoring="softmax_top_k",
        shared_gate=False,
    )


READERS = {"granitemoehybrid": read}
