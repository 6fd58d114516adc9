"""Mixers that attend over a growing cache: what they store per token and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.mixers import Mixer


@dataclass(frozen=True)
class FullAttention(Mixer):
    """Grouped-query softmax attention over a growing KV cache.

    `rotary_dim` is the leading part of each head that RoPE turns (0: none). `gated`: the query
    projection also yields a sigmoid gate for the output, per head [q | gate]. `qk_norm`: queries and keys
    are normed before RoPE, each head by itself, or with `qk_norm_whole` all heads together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False

    letter = "F"

    @property
    def turned_dim(self) -> int:
        return self.rotary_dim

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """(2, page_size, num_kv_heads, head_dim); 2 is key, value."""
        return (2, page_size, self.num_kv_heads, self.head_dim)

    def kv_elements(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    def projection_parameters(self, hidden: int) -> int:
        q = self.num_heads * self.head_dim
        return hidden * (q * (2 if self.gated else 1) + 2 * self.num_kv_heads * self.head_dim + q)

    def parameters(self, hidden: int) -> int:
        normed_heads = self.num_heads + self.num_kv_heads if self.qk_norm_whole else 2
        norms = normed_heads * self.head_dim if self.qk_norm else 0
        return self.projection_parameters(hidden) + norms

    def mixing_flops(self, context: int) -> int:
        """Scores and weighted sum."""
        return 4 * context * self.num_heads * self.head_dim

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        """Token i attends over i + 1 tokens."""
        return self.mixing_flops(tokens * (tokens + 1) // 2)


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): KV is one latent per token.

    A token stores its normed latent (`latent_dim`) and one key part that all heads share (`rope_dim`), turned
    where the model has RoPE. Heads have keys of `nope_dim` + `rope_dim` and values of `value_dim`.
    `query_rank` 0: queries are projected from the hidden state directly. `gated`: a sigmoid gate on the
    output, one number a head.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0
    gated: bool = False

    letter = "F"

    @property
    def turned_dim(self) -> int:
        return self.rope_dim

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """(page_size, latent_dim + rope_dim)."""
        return (page_size, self.latent_dim + self.rope_dim)

    def kv_elements(self) -> int:
        return self.latent_dim + self.rope_dim

    def projection_parameters(self, hidden: int) -> int:
        queries = self.num_heads * (self.nope_dim + self.rope_dim)
        q = (hidden + queries) * self.query_rank if self.query_rank else hidden * queries
        down = hidden * (self.latent_dim + self.rope_dim)
        up = self.latent_dim * self.num_heads * (self.nope_dim + self.value_dim)
        gate = hidden * self.num_heads if self.gated else 0
        return q + down + up + gate + self.num_heads * self.value_dim * hidden

    def parameters(self, hidden: int) -> int:
        return self.projection_parameters(hidden) + self.latent_dim + self.query_rank

    def mixing_flops(self, context: int) -> int:
        """Scores and weighted sum over latents, queries and outputs taken through the up-projection."""
        return 2 * context * self.num_heads * (2 * self.latent_dim + self.rope_dim)

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        return self.mixing_flops(tokens * (tokens + 1) // 2)
