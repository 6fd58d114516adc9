"""MiniMax: two spellings of most keys, and what is not served."""

from __future__ import annotations

from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec.attention import FullAttention
from denim.spec.families.minimax import Residual
from denim.spec.reader import read_spec


def config(**changes: Any) -> dict[str, Any]:
    values = {
        "model_type": "minimax_text_01",
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 32,
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rotary_dim": 16,
        "rope_theta": 10000,
        "max_position_embeddings": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "postnorm": True,
        "attn_type_list": [0, 1, 0, 1],
        "layernorm_mlp_alpha": 3.5,
    } | changes
    return {key: value for key, value in values.items() if value != "missing"}


def attention(**changes: Any) -> FullAttention:
    mixer = read_spec(config(**changes)).layers[1].mixer
    assert isinstance(mixer, FullAttention)
    return mixer


def test_vendor_s_form() -> None:
    spec = read_spec(config())
    assert (spec.pattern, spec.dtype, spec.state_dtype) == ("LFLF", "bfloat16", "float32")
    assert (spec.details.ffn, spec.details.full) == (Residual(3.5, 1.0), Residual(1.0, 1.0))
    assert not spec.tie_embeddings


def test_turned_dims() -> None:
    assert attention().rotary_dim == 16
    assert attention(rotary_dim="missing").rotary_dim == 24
    assert attention(rotary_dim="missing", partial_rotary_factor=0.5).rotary_dim == 12


def test_both_spellings_at_once() -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    assert read_spec(config(layer_types=kinds, mlp_alpha_factor=3.5)) == read_spec(config())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"attn_type_list": "missing"}, "layer_types"),
        ({"attn_type_list": [0, 1, 2, 1]}, "attn_type_list"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"mlp_alpha_factor": 1.0}, "layernorm_mlp_alpha"),
        ({"postnorm": "missing"}, "postnorm"),
        ({"postnorm": False}, "postnorm"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({"num_attention_heads": 6}, "num_attention_heads"),
        ({"rotary_dim": 26}, "rotary_dim"),
        ({"partial_rotary_factor": 0.5}, "rotary_dim"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        read_spec(config(**changes))
