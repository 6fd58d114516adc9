"""What the reader of Zamba2 refuses, and how it counts what layers share."""

from __future__ import annotations

import json

import pytest

from denim.errors import ConfigError
from denim.spec.families.zamba2 import SharedAttention
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_dimension", 4),
        ("add_bias_linear", True),
        ("use_long_context", True),
        ("hidden_act", "silu"),
        ("mamba_headdim", 32),
        ("attention_head_dim", 64),
        ("hybrid_layer_ids", [1]),
        ("num_key_value_heads", 8),
        ("layers_block_type", ["attention"] * 38),
    ],
)
def test_refused(key: str, value: object) -> None:
    config = json.loads((CONFIGS / "zamba2-1.2b.json").read_text())
    with pytest.raises(ConfigError, match=key):
        read_spec(config | {key: value})


def test_layers_take_turns_with_two_blocks() -> None:
    spec = read_spec(json.loads((CONFIGS / "zamba2-7b.json").read_text()))
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, SharedAttention)]
    assert [mixer.block for mixer in mixers] == [0, 1] * 6 + [0]
    assert [mixer.first for mixer in mixers] == [True, True] + [False] * 11
    assert mixers[0].parameters(3584) - mixers[2].parameters(3584) > 300e6
    assert mixers[0].projection_parameters(3584) == mixers[2].projection_parameters(3584)
