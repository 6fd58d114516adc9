"""Reader of Falcon-H1 configs: attention and Mamba2 side by side in every layer, with muP's multipliers.

Owns what this family's keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: every multiplier 1, no gated norm (mamba_rms_norm false; if there is
one, it stands before the gate), no limits of Δ, untied embeddings, rms_norm_eps 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.fields import Fields, is_number
from denim.spec.mamba2_keys import read_mamba2, read_time_step_limit
from denim.spec.model import Layer, ModelSpec
from denim.spec.parallel import Parallel
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    read_dtype,
    read_head_counts,
    read_head_dim,
    read_state_dtype,
    refuse_quantised,
)


@dataclass(frozen=True)
class FalconH1Details:
    """What is multiplied with which number, in the words of the config, and options of the Mamba2 layer.

    `ssm_parts`: of z, x, B, C and Δ. `norm_before_gate` matters only where the spec has a gated norm.
    """

    embedding: float
    lm_head: float
    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    ssm_parts: tuple[float, ...]
    mlp_gate: float
    mlp_down: float
    norm_before_gate: bool
    time_step_limit: tuple[float, float]


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.demand(key, [False])
    fields.demand("mamba_use_mlp", [True])
    fields.choice("hidden_act", ["silu"], default="silu")
    fields.ignore("num_logits_to_keep", "mlp_expansion_factor")

    hidden = fields.positive_int("hidden_size")
    heads, kv_heads = read_head_counts(fields)
    head_dim = read_head_dim(fields, heads)
    rope, rotary_dim, max_position = read_rope(
        fields, head_dim, fields.positive_int("max_position_embeddings"), 1.0
    )
    linear = replace(read_mamba2(fields, hidden), gate_norm=fields.flag("mamba_rms_norm", default=False))
    mixer = Parallel(FullAttention(heads, kv_heads, head_dim, rotary_dim), linear)
    ffn = DenseFFN(fields.positive_int("intermediate_size"))
    count = fields.layer_count()
    for key in ("layers_block_type", "layer_types"):
        fields.demand(key, [["hybrid"] * count])
    spec = ModelSpec(
        family="falcon_h1",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=(Layer(mixer, ffn),) * count,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=_details(fields),
    )
    fields.finish()
    return spec


def _details(fields: Fields) -> FalconH1Details:
    mlp_gate, mlp_down = _multipliers(fields, "mlp_multipliers", 2)
    return FalconH1Details(
        embedding=fields.number("embedding_multiplier", default=1.0),
        lm_head=fields.number("lm_head_multiplier", default=1.0),
        attention_in=fields.number("attention_in_multiplier", default=1.0),
        attention_out=fields.number("attention_out_multiplier", default=1.0),
        key=fields.number("key_multiplier", default=1.0),
        ssm_in=fields.number("ssm_in_multiplier", default=1.0),
        ssm_out=fields.number("ssm_out_multiplier", default=1.0),
        ssm_parts=_multipliers(fields, "ssm_multipliers", 5),
        mlp_gate=mlp_gate,
        mlp_down=mlp_down,
        norm_before_gate=fields.flag("mamba_norm_before_gate", default=True),
        time_step_limit=read_time_step_limit(fields),
    )


def _multipliers(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    values = fields.get(key)
    if values is None:
        return (1.0,) * count
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(is_number(value) and 0 < value < inf for value in values)
    ):
        raise fields.error(key, f"a list of {count} positive numbers")
    return tuple(float(value) for value in values)


READERS = {"falcon_h1": read}
