"""Reader of MiniMax-Text-01 and MiniMax-M1 configs, as the vendor and as transformers write them.

Owns what the family's keys mean and which values Denim's model code covers. Knows nothing of files.

Both spellings of a key are read wherever they stand, and must agree where both do. Defaults: residual
factors 1 (both), all of a head turned by RoPE where neither `rotary_dim` nor a factor is given
(transformers), bfloat16 (what the vendor's checkpoints are in, whose configs name no dtype).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from denim.errors import ConfigError
from denim.spec.attention import FullAttention
from denim.spec.ffn import MoEFFN
from denim.spec.fields import Fields
from denim.spec.linear import Lightning
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec, Rope
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    LAYER_LETTERS,
    read_dtype,
    read_expert_counts,
    read_head_counts,
    read_head_dim,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

PATTERN_KEYS: dict[str, dict[Any, str]] = {
    "attn_type_list": {0: "L", 1: "F"},
    "layer_types": LAYER_LETTERS,
}


@dataclass(frozen=True)
class Residual:
    """y = alpha · x + beta · f(x), where x is what the norm before f gives."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class MiniMaxDetails:
    linear: Residual
    full: Residual
    ffn: Residual


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of a `minimax_text_01`, `minimax_m1` or `minimax` config."""
    refuse_quantised(fields)
    fields.choice("hidden_act", ["silu"])
    fields.demand("sliding_window", [None])
    fields.demand("shared_intermediate_size", [0])
    # Of shared experts, of which there are none; of training; of how transformers cuts a prompt.
    fields.ignore("shared_moe_mode", "router_jitter_noise", "block_size")
    if not fields.flag("postnorm", default=fields.get("model_type") == "minimax"):
        raise fields.error("postnorm", "true: residuals taken behind the norm, as all published models do")

    heads, kv_heads = read_head_counts(fields)
    if heads & (heads - 1):
        raise fields.error("num_attention_heads", "a power of two; for others the decays' definitions differ")
    head_dim = read_head_dim(fields, heads)
    rope, rotary_dim, max_position = _rope(fields, head_dim)
    mixers: dict[str, Mixer] = {
        "L": Lightning(heads, head_dim),
        "F": FullAttention(heads, kv_heads, head_dim, rotary_dim),
    }
    experts, top_k = read_expert_counts(fields, "num_local_experts")
    ffn = MoEFFN(experts, top_k, fields.positive_int("intermediate_size"))
    spec = ModelSpec(
        family="minimax",
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter in _pattern(fields)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype, default="bfloat16"),
        state_dtype=read_state_dtype(state_dtype),
        details=MiniMaxDetails(
            linear=_residual(fields, "linear_attn", "layernorm_linear_attention"),
            full=_residual(fields, "full_attn", "layernorm_full_attention"),
            ffn=_residual(fields, "mlp", "layernorm_mlp"),
        ),
    )
    fields.finish()
    return spec


def _pattern(fields: Fields) -> str:
    """One letter a layer, from either list, or from both if they agree."""
    count = fields.layer_count()
    stated = {
        key: read_layer_types(fields, key, letters, count)
        for key, letters in PATTERN_KEYS.items()
        if key in fields
    }
    if not stated:
        raise fields.error("layer_types", "a list of linear_attention, full_attention, or attn_type_list")
    if len(set(stated.values())) > 1:
        raise ConfigError(f"{fields.where}: {stated} contradict each other; correct one or delete it")
    return next(iter(stated.values()))


def _rope(fields: Fields, head_dim: int) -> tuple[Rope, int, int]:
    """The rotary embedding, how many dims of a head it turns, and the context."""
    max_position = fields.positive_int("max_position_embeddings")
    rotary_dim = fields.positive_int("rotary_dim", default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise fields.error("rotary_dim", f"an even number of at most head_dim ({head_dim})")
    reading = read_rope(fields, head_dim, max_position, rotary_dim / head_dim)
    if "rotary_dim" not in fields:
        return reading
    if abs(reading.rotary_dim - rotary_dim) > 1:  # 1: the share of a head may have been rounded
        raise fields.error(
            "rotary_dim", f"{reading.rotary_dim}, as partial_rotary_factor says, or no such key"
        )
    return reading.rope, rotary_dim, reading.max_position


def _residual(fields: Fields, ours: str, vendors: str) -> Residual:
    """The factors around one part, under transformers' key or the vendor's."""

    def factor(which: str) -> float:
        new, old = f"{ours}_{which}_factor", f"{vendors}_{which}"
        value = fields.number(new, default=fields.number(old, default=1.0))
        if old in fields and fields.number(old) != value:
            raise fields.error(old, f"{value!r}, as {new} says, or only one of the two")
        return value

    return Residual(factor("alpha"), factor("beta"))


READERS = {"minimax": read, "minimax_text_01": read, "minimax_m1": read}
