"""Nemotron-H configs: the two spellings of layers, and what is refused."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec.ffn import MoEFFN
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec

CONFIG = json.loads((CONFIGS / "nemotron-h-8b.json").read_text())
SHORT = "M*-"
NAMES = ["mamba", "attention", "mlp"]


def config(**changes: Any) -> dict[str, Any]:
    return CONFIG | {"hybrid_override_pattern": SHORT, "num_hidden_layers": 3} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hybrid_override_pattern": None, "layers_block_type": NAMES},
        {"layers_block_type": NAMES},
        {"hybrid_override_pattern": None, "layer_types": ["linear_attention", "full_attention", "mlp"]},
        {"num_hidden_layers": None},
    ],
)
def test_layers_are_read_from_either_spelling(changes: dict[str, Any]) -> None:
    spec = read_spec(config(**changes))
    assert spec.pattern == "LF-"
    assert spec.rope is None
    assert spec.details.time_step_limit == (0.001, inf)  # type: ignore[attr-defined]


def test_the_dtype_of_states_is_the_config_s_unless_it_is_asked_for() -> None:
    for written, asked, dtype in (
        (None, "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ):
        assert read_spec(config(mamba_ssm_cache_dtype=written), state_dtype=asked).state_dtype == dtype


def test_a_config_without_epsilon_and_least_time_step() -> None:
    """As transformers reads it."""
    absent = dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps", "norm_eps", "time_step_min"))
    spec = read_spec(config(**absent))
    assert spec.norm_eps == 1e-5
    assert spec.details.time_step_limit == (0.001, inf)  # type: ignore[attr-defined]


SPARSE = json.loads((CONFIGS / "nemotron-3-nano-30b-a3b.json").read_text())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_group": 3}, "'n_group' is 3; supported: equal groups, of 2 or more of the 128 experts"),
        ({"n_group": 128}, "'n_group' is 128; supported: equal groups, of 2"),
        ({"n_group": 4, "topk_group": 5}, "'topk_group' is 5; supported: at most the number of groups"),
        ({"n_group": 64, "topk_group": 2}, "'num_experts_per_tok' is 6; supported: at most the experts of 2"),
    ],
)
def test_groups_of_experts_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    grouped = read_spec(SPARSE | {"n_group": 4, "topk_group": 2}).layers
    assert {layer.ffn.groups for layer in grouped if isinstance(layer.ffn, MoEFFN)} == {4}
    with pytest.raises(ConfigError, match=told):
        read_spec(SPARSE | changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layers_block_type": ["mamba", "mlp", "mlp"]}, "contradict"),
        ({"hybrid_override_pattern": "MX-"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (
            {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "conv", "mlp"]},
            "layers_block_type",
        ),
        ({"num_hidden_layers": 4}, "num_hidden_layers"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"time_step_limit": [1.0]}, "time_step_limit"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"n_groups": 7}, "n_groups"),
        ({"num_query_groups": 4}, "num_query_groups"),
        ({"head_dim": 64}, "attention_head_dim"),
        ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read_spec(config(**changes))
