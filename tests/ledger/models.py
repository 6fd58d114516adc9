"""The illustrative model whose figures the ledger must give."""

from __future__ import annotations

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.linear import GatedDeltaNet
from denim.spec.model import Layer, ModelSpec, Rope


def illustrative() -> ModelSpec:
    """48 layers, 12 of them full: 2 KiB of KV per token and full layer, 2 MiB of state per linear layer,
    no convolution."""
    full = Layer(FullAttention(num_heads=16, num_kv_heads=2, head_dim=256, rotary_dim=64), DenseFFN(8192))
    linear = Layer(GatedDeltaNet(16, 32, key_dim=128, value_dim=128, conv_width=1), DenseFFN(8192))
    return ModelSpec(
        family="illustrative",
        hidden_size=2048,
        vocab_size=100_000,
        layers=(linear, linear, linear, full) * 12,
        rope=Rope(theta=1e6),
        norm_eps=1e-6,
        tie_embeddings=False,
        max_position=262144,
    )
