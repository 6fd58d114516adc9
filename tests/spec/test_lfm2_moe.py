"""LFM2-MoE: which layers are dense, how wide, and how the router weighs."""

from __future__ import annotations

from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.reader import read_spec


def config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lfm2_moe",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 1000,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention"] * 2,
        "dtype": "bfloat16",
    } | changes


def test_defaults() -> None:
    sparse = MoEFFN(8, 3, 40, scoring="sigmoid", guard=1e-6, selection_bias=True)
    dense = DenseFFN(1000)  # as it stands: LFM2's rule would make 768 of it
    assert [layer.ffn for layer in read_spec(config()).layers] == [dense, dense, sparse, sparse]


def test_all_layers_sparse() -> None:
    spec = read_spec(config(num_dense_layers=0, norm_topk_prob=False, routed_scaling_factor=2.5))
    assert {(layer.ffn.renormalise, layer.ffn.scale) for layer in spec.layers} == {(False, 2.5)}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_dense_layers": -1}, "num_dense_layers"),
        ({"block_auto_adjust_ff_dim": True}, "block_auto_adjust_ff_dim"),
        ({"n_group": 2}, "n_group"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        read_spec(config(**changes))
