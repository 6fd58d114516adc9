"""The reader of Qwen3-Next: sparse and dense layers, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec import read_spec
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.published import FOLDER as CONFIGS


def published(**changes: Any) -> dict[str, Any]:
    return json.loads((CONFIGS / "qwen3_next_80b_a3b.json").read_text()) | changes


def sparse(config: dict[str, Any]) -> list[int]:
    """Layers with experts."""
    layers = read_spec(config).layers
    assert all(isinstance(layer.ffn, DenseFFN | MoEFFN) for layer in layers)
    return [i for i, layer in enumerate(layers) if isinstance(layer.ffn, MoEFFN)]


def test_published() -> None:
    spec = read_spec(published())
    assert spec.family == "qwen3_next" and spec.weight_blocks is None
    moe = spec.layers[0].ffn
    assert moe == MoEFFN(512, 10, 512, 512)
    assert len(spec.mtp_layers) == 1 and spec.mtp_layers[0].ffn == moe
    assert spec.rope is not None and spec.rope.theta == 1e7
    assert spec.layers[3].mixer.turned_dim == 64


def test_published_in_fp8() -> None:
    quantised = json.loads((CONFIGS / "qwen3_next_80b_a3b_fp8.json").read_text())
    assert read_spec(quantised).weight_blocks == (128, 128)


def test_which_layers_are_sparse() -> None:
    assert sparse(published()) == list(range(48))
    assert sparse(published(decoder_sparse_step=2)) == list(range(1, 48, 2))
    assert sparse(published(mlp_only_layers=[0, 5])) == [i for i in range(48) if i not in (0, 5)]
    assert sparse(published(decoder_sparse_step=3, mlp_only_layers=[2])) == list(range(5, 48, 3))


def test_router_without_renormalisation() -> None:
    ffn = read_spec(published(norm_topk_prob=False)).layers[0].ffn
    assert isinstance(ffn, MoEFFN) and not ffn.renormalise


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [48]}, r"'mlp_only_layers' is \[48\]; supported: a list of layers from 0 to 47"),
        ({"mlp_only_layers": "all"}, "'mlp_only_layers' is 'all'"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
        ({"mlp_only_layers": [1], "intermediate_size": None}, "'intermediate_size' is missing"),
        ({"num_experts_per_tok": 513}, r"'num_experts_per_tok' is 513; supported: at most num_experts"),
        ({"linear_num_value_heads": 24}, "'linear_num_value_heads' is 24"),
        ({"attention_bias": True}, "'attention_bias' is True"),
        ({"use_sliding_window": True}, "'use_sliding_window' is True"),
        ({"vision_config": {}}, "unknown key 'vision_config'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'quantization_config' is .*FP8"),
    ],
    ids=str,
)
def test_unusable_value_is_named(changes: dict[str, Any], message: str) -> None:
    """BS-07: windowed layers among full and linear ones are refused at the start."""
    with pytest.raises(ConfigError, match=message):
        read_spec(published(**changes))
