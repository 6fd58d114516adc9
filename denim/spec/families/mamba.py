"""Readers of Mamba and Falcon-Mamba configs, in the form of the published `-hf` checkpoints.

Owns what these families' keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: conv_kernel 4, expand 2, time_step_rank "auto" (a sixteenth of the
hidden size, rounded up), layer_norm_epsilon 1e-5, mixer_rms_eps 1e-6, residual_in_fp32, use_conv_bias and
tie_word_embeddings true, use_bias false. `intermediate_size` goes before `expand`, which Falcon-Mamba
publishes as 16 beside an intermediate size of twice the hidden one.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.ffn import NoFFN
from denim.spec.fields import Fields
from denim.spec.linear import Mamba1
from denim.spec.model import MAX_POSITION_WITHOUT_POSITIONS, Layer, ModelSpec
from denim.spec.standard_keys import read_dtype, read_state_dtype, refuse_quantised


@dataclass(frozen=True)
class MambaDetails:
    """`wide_residual`: hidden states are added up in fp32, whatever the model's dtype. `mixer_norm_eps`: of
    the norms without weights on Δ, B and C; None: there are none."""

    wide_residual: bool
    mixer_norm_eps: float | None


def read_mamba(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    return _read(fields, "mamba", dtype, state_dtype)


def read_falcon_mamba(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    return _read(fields, "falcon_mamba", dtype, state_dtype)


def _read(fields: Fields, family: str, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.choice("hidden_act", ["silu"], default="silu")
    # Of the original code's checkpoints, kept beside the keys that replace them.
    fields.demand("rms_norm", [True])
    fields.demand("ssm_cfg", [{}])
    fields.demand("d_model", [fields.get("hidden_size")])
    fields.demand("n_layer", [fields.get("num_hidden_layers")])
    fields.ignore("d_inner", "fused_add_norm", "pad_vocab_size_multiple")
    # How weights begin before training, and which kernel trains them.
    fields.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_floor")
    fields.ignore("time_step_init_scheme", "rescale_prenorm_residual")
    fields.ignore("use_mambapy", "use_falcon_mambapy", "use_associative_scan")

    hidden = fields.positive_int("hidden_size")
    mixer = Mamba1(
        inner=fields.positive_int(
            "intermediate_size", default=hidden * fields.positive_int("expand", default=2)
        ),
        state_dim=fields.positive_int("state_size"),
        dt_rank=read_dt_rank(fields, "time_step_rank", hidden),
        conv_width=fields.positive_int("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias", default=False),
    )
    falcon = family == "falcon_mamba"
    spec = ModelSpec(
        family=family,
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=(Layer(mixer, NoFFN()),) * fields.layer_count(),
        rope=None,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        max_position=fields.positive_int("max_position_embeddings", default=MAX_POSITION_WITHOUT_POSITIONS),
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=MambaDetails(
            wide_residual=fields.flag("residual_in_fp32", default=True),
            mixer_norm_eps=fields.number("mixer_rms_eps", default=1e-6) if falcon else None,
        ),
    )
    fields.finish()
    return spec


def read_dt_rank(fields: Fields, key: str, hidden: int) -> int:
    """The inner width of Δ's projection: a number, or "auto" for a sixteenth of the hidden size."""
    if fields.get(key) in (None, "auto"):
        return -(-hidden // 16)
    return fields.positive_int(key)


READERS = {"mamba": read_mamba, "falcon_mamba": read_falcon_mamba}
