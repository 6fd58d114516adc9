"""Mamba2, Bamba and Granite-4 configs: limits of Δ, layers, and what is refused by name."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from denim.errors import ConfigError
from denim.ledger.cost import ledger_of
from denim.spec.families.granitemoehybrid import Details
from denim.spec.linear import Mamba2
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec


def config(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text()) | changes


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        (None, (0.0, inf)),
        ([0.0, inf], (0.0, inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, inf)),
        ([0.001, 0.5], (0.001, 0.5)),
    ],
)
@pytest.mark.parametrize("name", ["mamba-codestral-7b", "bamba-9b", "granite-4.0-h-tiny"])
def test_limits_of_the_time_step(name: str, written: Any, limit: tuple[float, float]) -> None:
    spec = read_spec(config(name, time_step_limit=written))
    assert spec.details.time_step_limit == limit  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", [[0.5, 0.1], [0.5, 0.5], [0.1], 3, ["0", "1"], [-1.0, 1.0]])
def test_limits_that_are_none(written: Any) -> None:
    with pytest.raises(ConfigError, match="time_step_limit"):
        read_spec(config("bamba-9b", time_step_limit=written))


def test_a_model_of_states_alone_has_no_crossover() -> None:
    ledger = ledger_of(read_spec(config("mamba-codestral-7b")))
    assert ledger.kv_bytes_per_token == 0
    assert ledger.crossover_tokens is None
    assert ledger.all_full_bytes(1000) is None


def test_granite_without_mamba_layers_and_with_none_but_them() -> None:
    assert read_spec(config("granite-4.0-micro")).rope is not None
    spec = read_spec(config("granite-4.0-h-tiny", layer_types=None))
    assert spec.rope is None and all(isinstance(layer.mixer, Mamba2) for layer in spec.layers)


def test_granite_without_multipliers_and_positions() -> None:
    """As transformers reads it: nothing is scaled or turned."""
    multipliers = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    absent = dict.fromkeys((*multipliers, "position_embedding_type"))
    spec = read_spec(config("granite-4.0-h-tiny", **absent))
    assert spec.details == Details(1.0, 1.0, 1.0, 1.0, (0.0, inf))
    assert spec.rope is None


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("mamba-codestral-7b", {"expand": 3}, "expand"),
        ("mamba-codestral-7b", {"n_groups": 5}, "n_groups"),
        ("mamba-codestral-7b", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba-codestral-7b", {"rms_norm": False}, "rms_norm"),
        ("mamba-codestral-7b", {"window": 3}, "window"),
        ("bamba-9b", {"mamba_d_head": 32}, "mamba_d_head"),
        ("bamba-9b", {"dtype": "float16", "torch_dtype": "bfloat16"}, "'torch_dtype' is 'bfloat16'"),
        ("bamba-9b", {"mamba_n_heads": 100}, "mamba_n_heads"),
        ("bamba-9b", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("bamba-9b", {"attn_layer_indices": [32]}, "attn_layer_indices"),
        ("bamba-9b", {"layers_block_type": ["mamba"] * 32}, "layers_block_type"),
        ("bamba-9b", {"attn_rotary_emb": 128}, "attn_rotary_emb"),
        ("bamba-9b", {"attention_bias": True}, "attention_bias"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"]}, "layer_types"),
        ("granite-4.0-h-tiny", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granite-4.0-h-tiny", {"normalization_function": "layernorm"}, "normalization_function"),
        ("granite-4.0-h-tiny", {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ("granite-4.0-h-tiny", {"num_attention_heads": 20}, "'head_dim' is missing"),
        ("granite-4.0-h-tiny", {"residual_multiplier": -1}, "residual_multiplier"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read_spec(config(name, **changes))
