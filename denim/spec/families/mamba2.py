"""Reader of Mamba2 configs: a stack of state-space layers with nothing between them.

Owns what this family's keys mean. Defaults, all of them transformers' own: a bias in the convolution, none in
the projections, residuals in fp32, no limits of Δ, untied embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.ffn import NoFFN
from denim.spec.fields import Fields
from denim.spec.linear import Mamba2
from denim.spec.mamba2_keys import read_groups, read_time_step_limit
from denim.spec.model import MAX_POSITION_WITHOUT_POSITIONS, Layer, ModelSpec
from denim.spec.standard_keys import read_dtype, read_state_dtype, refuse_quantised


@dataclass(frozen=True)
class Details:
    """`fp32_residual`: the sum of the layers' outputs is kept in fp32 whatever the model's dtype."""

    time_step_limit: tuple[float, float]
    fp32_residual: bool


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    hidden = fields.positive_int("hidden_size")
    heads, head_dim = fields.positive_int("num_heads"), fields.positive_int("head_dim")
    inner = heads * head_dim
    if fields.positive_int("expand", default=2) * hidden != inner:
        raise fields.error("expand", f"num_heads × head_dim ({inner}) over hidden_size ({hidden})")
    fields.demand("intermediate_size", [inner])
    fields.demand("rms_norm", [True])
    fields.choice("hidden_act", ["silu", "swish"], default="silu")
    # The published code norms behind the gate whatever this key says.
    fields.ignore("norm_before_gate")
    fields.ignore("chunk_size", "rescale_prenorm_residual", "time_step_rank", "time_step_scale")
    fields.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme")
    mixer = Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=fields.positive_int("state_size"),
        num_groups=read_groups(fields, "n_groups", heads),
        conv_width=fields.positive_int("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias", default=False),
    )
    spec = ModelSpec(
        family="mamba2",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=(Layer(mixer, NoFFN()),) * fields.layer_count(),
        rope=None,
        norm_eps=fields.number("layer_norm_epsilon"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=fields.positive_int("max_position_embeddings", default=MAX_POSITION_WITHOUT_POSITIONS),
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=Details(
            time_step_limit=read_time_step_limit(fields),
            fp32_residual=fields.flag("residual_in_fp32", default=True),
        ),
    )
    fields.finish()
    return spec


READERS = {"mamba2": read}
