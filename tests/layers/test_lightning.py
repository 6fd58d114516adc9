"""The decays of lightning attention against transformers'."""

from __future__ import annotations

import pytest
import torch

from denim.layers.lightning import log_decay_of


@pytest.mark.parametrize(("heads", "layers"), [(64, 80), (4, 3), (1, 1)])
def test_decays(heads: int, layers: int) -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=heads, head_dim=1, num_attention_heads=heads, num_hidden_layers=layers, block_size=1
    )
    for layer in {0, layers // 2, layers - 1}:
        expected = -MiniMaxLightningAttention(config, layer).slope_rate.flatten()
        ours = log_decay_of(heads, layer, layers)
        assert (ours < 0).all()
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-9)
