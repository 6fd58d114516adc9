"""LFM2's own rules: the inner width, where attention stands, tied embeddings, one key given twice."""

from __future__ import annotations

from typing import Any

import pytest

from denim.errors import ConfigError
from denim.ledger.cost import ledger_of
from denim.memory.layout import SLOT, ArenaLayout
from denim.spec.reader import read_spec


def config(**changes: Any) -> dict[str, Any]:
    values = {
        "model_type": "lfm2",
        "vocab_size": 100,
        "hidden_size": 64,
        "block_ff_dim": 1000,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "full_attn_idxs": [1, 3],
        "dtype": "bfloat16",
    } | changes
    return {key: value for key, value in values.items() if value != "missing"}


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 768),  # 666 up to a multiple of 256
        ({"block_multiple_of": 10}, 670),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.5}, 1000),  # int(1.5 x 666) = 999
        ({"block_ffn_dim_multiplier": None}, 666),  # no factor, no rounding either
        ({"block_auto_adjust_ff_dim": False}, 1000),
        ({"block_ff_dim": "missing", "intermediate_size": 500}, 512),
        ({"intermediate_size": 512}, 768),  # what the vendor's key says
    ],
)
def test_inner_width(changes: dict[str, Any], width: int) -> None:
    assert {layer.ffn.intermediate for layer in read_spec(config(**changes)).layers} == {width}


def test_layer_types_and_indices() -> None:
    types = ["conv", "full_attention", "conv", "full_attention"]
    for changes in ({}, {"layer_types": types}, {"layer_types": types, "full_attn_idxs": "missing"}):
        assert read_spec(config(**changes)).pattern == "CFCF"


def test_tied_unless_told() -> None:
    assert read_spec(config()).tie_embeddings
    assert not read_spec(config(tie_embedding=False)).tie_embeddings
    assert not read_spec(config(tie_word_embeddings=False)).tie_embeddings


def test_a_slot_is_windows_alone() -> None:
    """No recurrent state: two windows of width - 1 = 2 columns in bf16, one behind the other."""
    spec = read_spec(config())
    ledger = ledger_of(spec)
    assert (ledger.state_bytes, ledger.conv_bytes) == (0, 2 * 2 * 64 * 2)
    layout = ArenaLayout.of(spec, 16)
    assert [place.role for place in layout.slot_tensors] == ["conv", "conv"]
    assert layout.size_class(SLOT).entry_bytes == ledger.conv_bytes
    assert read_spec(config(), state_dtype="bfloat16").linear_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"full_attn_idxs": [4]}, "full_attn_idxs"),
        ({"full_attn_idxs": "missing"}, "layer_types"),
        ({"layer_types": ["conv"] * 4}, "full_attn_idxs"),
        ({"layer_types": ["conv", "sliding_attention", "conv", "conv"]}, "layer_types"),
        ({"conv_dim": 32}, "conv_dim"),
        ({"num_heads": 8}, "num_heads"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"theta": 1e4}, "theta"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        read_spec(config(**changes))
