"""A model that nobody published, with round numbers, on which rules are shown and from which dials start.

Owns that one spec.
"""

from __future__ import annotations

from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.linear import GatedDeltaNet
from denim.spec.model import Layer, ModelSpec, Rope


def illustrative(dtype: str = "bfloat16", state_dtype: str = "float32") -> ModelSpec:
    """48 layers, 12 of them full, no convolution. In bf16 with fp32 states a full layer has 2 KiB of KV per
    token, a linear one 2 MiB of state."""
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
        dtype=dtype,
        state_dtype=state_dtype,
    )
