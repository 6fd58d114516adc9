"""The reader of OLMo-hybrid: defaults, RoPE or none, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec import read_spec
from denim.spec.attention import FullAttention
from denim.spec.linear import GatedDeltaNet
from denim.spec.published import FOLDER as CONFIGS

CONFIG = CONFIGS / "olmo_hybrid_7b.json"
DEFAULTED = (
    "layer_types",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "linear_allow_neg_eigval",
    "tie_word_embeddings",
)


def published(**changes: Any) -> dict[str, Any]:
    return json.loads(CONFIG.read_text()) | changes


def test_published() -> None:
    spec = read_spec(published())
    assert spec.rope is None
    assert spec.layers[0].mixer == GatedDeltaNet(30, 30, 96, 192, 4, beta_limit=2.0)
    assert spec.layers[3].mixer == FullAttention(30, 30, 128, 0, qk_norm=True, qk_norm_whole=True)


def test_defaults_are_those_of_the_published_model() -> None:
    short = {key: value for key, value in published().items() if key not in DEFAULTED}
    assert read_spec(short) == read_spec(published())


def test_few_layers_have_one_with_attention() -> None:
    assert read_spec(published(layer_types=None, num_hidden_layers=2)).pattern == "LF"


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": None, "rope_theta": None}, None),
        ({"rope_theta": None}, None),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, 1e4),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": None}, 1e4),
    ],
    ids=str,
)
def test_null_is_no_rope(changes: dict[str, Any], theta: float | None) -> None:
    spec = read_spec(published(**changes))
    assert (None if spec.rope is None else spec.rope.theta) == theta
    assert spec.layers[3].mixer.turned_dim == (0 if theta is None else 128)


def test_strength_of_writing() -> None:
    mixer = read_spec(published(linear_allow_neg_eigval=False)).layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet) and mixer.beta_limit == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "'rope_theta' is missing"),
        ({"attention_bias": True}, "'attention_bias' is True"),
        ({"linear_num_key_heads": 4}, r"'linear_num_value_heads' is 30; supported: a multiple"),
        ({"layer_types": ["sliding_attention"] * 32}, "'layer_types' is .*supported: a list of"),
        ({"linear_use_gate": False}, "'linear_use_gate' is False; supported: True"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is"),
        ({"sliding_window": 4096}, "unknown key 'sliding_window'"),
    ],
    ids=str,
)
def test_unusable_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(published(**changes))
