"""What mixes tokens: every kind of mixer, what it stores and what it costs.

Owns the geometry of mixers, the shape of their state and KV, and their counts of parameters and FLOPs.
Knows nothing of configs, tensors or devices. Nothing else in Denim computes the size of a cache.

FLOPs count a multiply and an add as two. Recurrent forms cost per element of the state: decay 1, rank-one
update 2, each read 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}


@dataclass(frozen=True)
class StateTensor:
    """One fixed-size tensor that a mixer keeps for a request.

    `role` is "recurrent" (the state, stored [heads, d_v, d_k], or [channels, N] for a selective scan) or
    "conv" (the last width - 1 inputs of the short convolution, stored [width - 1, channels]).
    """

    role: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Mixer:
    """What a mixer stores and costs; the base has no state, no KV and no cost beyond its matrices.

    A mixer may keep KV (`page_shape`), fixed-size state (`state_tensors`), both, or nothing. `letter` is its
    sign in a layer pattern: F attention, L a linear rule, C a convolution alone, P attention and a linear
    rule side by side, - nothing.
    """

    letter = "?"

    @property
    def turned_dim(self) -> int:
        """Dims of a head that RoPE turns; 0: none."""
        return 0

    def page_shape(self, page_size: int) -> tuple[int, ...] | None:
        """Shape of the KV of `page_size` tokens; None: the mixer keeps none."""
        return None

    def kv_elements(self) -> int:
        """Numbers of KV per token."""
        return 0

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        """Fixed-size state; `state_dtype` is that of a recurrent state, `dtype` that of a window."""
        return ()

    def projection_parameters(self, hidden: int) -> int:
        """Parameters of the matrices that every token is multiplied with."""
        return 0

    def parameters(self, hidden: int) -> int:
        """All parameters of the mixer."""
        return self.projection_parameters(hidden)

    def mixing_flops(self, context: int) -> int:
        """FLOPs of one token beyond its projections, with `context` tokens behind it."""
        return 0

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        """FLOPs of a whole prompt beyond its projections, in chunks of at most `chunk` tokens."""
        return tokens * self.mixing_flops(tokens)


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
class GatedDeltaNet(Mixer):
    """The gated delta rule behind a short causal convolution over [q | k | v].

    Value head i uses key head i // (num_value_heads // num_key_heads). The writing strength β lies between 0
    and `beta_limit`; 2 lets the state's eigenvalues be negative (arXiv 2411.12537).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    beta_limit: float = 1.0

    letter = "L"

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        """`state_dtype` is that of S, `dtype` that of the convolution window (the model's dtype)."""
        return (
            StateTensor("recurrent", (self.num_value_heads, self.value_dim, self.key_dim), state_dtype),
            StateTensor("conv", (self.conv_width - 1, self.conv_channels), dtype),
        )

    def projection_parameters(self, hidden: int) -> int:
        values = self.num_value_heads * self.value_dim
        return hidden * (self.conv_channels + values + 2 * self.num_value_heads) + values * hidden

    def parameters(self, hidden: int) -> int:
        small = self.conv_channels * self.conv_width + 2 * self.num_value_heads + self.value_dim
        return self.projection_parameters(hidden) + small

    def mixing_flops(self, context: int) -> int:
        """FLOPs of one token in the recurrent form, convolution included; independent of `context`.

        Decay, S k, the rank-one update and S q: 1 + 2 + 2 + 2 operations per element of S.
        """
        state = self.num_value_heads * self.key_dim * self.value_dim
        return 7 * state + 2 * self.conv_channels * self.conv_width

    def chunked_flops(self, chunk: int) -> int:
        """FLOPs of one token in the chunked form with chunks of `chunk` tokens.

        Per token and value head: three products with the state (6 d_k d_v) and the products inside
        the chunk, 2 C (3 d_k + 2 d_v).
        """
        per_head = 6 * self.key_dim * self.value_dim + 2 * chunk * (3 * self.key_dim + 2 * self.value_dim)
        return self.num_value_heads * per_head + 2 * self.conv_channels * self.conv_width

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        """FLOPs of a whole prompt beyond its projections, in chunks of at most `chunk` tokens."""
        return tokens * self.chunked_flops(min(chunk, tokens))


@dataclass(frozen=True)
class NoMixer(Mixer):
    """A layer that is a feed-forward network alone."""

    letter = "-"


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


@dataclass(frozen=True)
class KimiDelta(Mixer):
    """Kimi Delta Attention: the delta rule with a decay per key channel, behind a short convolution of each
    of q, k and v (arXiv 2510.26692).

    `decay_rank`, `gate_rank`: inner width of the low-rank projections of decay and output gate; 0: a full
    matrix. The log of the decay is -exp(A) softplus(f + b), or `decay_floor` sigmoid(exp(A) (f + b)) where
    there is a floor (Ling-3.0's safe gate, -5).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    decay_rank: int
    gate_rank: int
    decay_floor: float | None = None

    letter = "L"

    @property
    def conv_channels(self) -> int:
        return self.num_heads * (2 * self.key_dim + self.value_dim)

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return (
            StateTensor("recurrent", (self.num_heads, self.value_dim, self.key_dim), state_dtype),
            StateTensor("conv", (self.conv_width - 1, self.conv_channels), dtype),
        )

    def projection_parameters(self, hidden: int) -> int:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        gate = (hidden + values) * self.gate_rank if self.gate_rank else hidden * values
        decay = (hidden + keys) * self.decay_rank if self.decay_rank else hidden * keys
        return hidden * (self.conv_channels + self.num_heads) + decay + gate + values * hidden

    def parameters(self, hidden: int) -> int:
        small = self.conv_channels * self.conv_width + self.num_heads * (1 + self.key_dim) + self.value_dim
        return self.projection_parameters(hidden) + small

    def mixing_flops(self, context: int) -> int:
        state = self.num_heads * self.key_dim * self.value_dim
        return 7 * state + 2 * self.conv_channels * self.conv_width

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        c = min(chunk, tokens)
        per_head = 6 * self.key_dim * self.value_dim + 2 * c * (3 * self.key_dim + 2 * self.value_dim)
        return tokens * (self.num_heads * per_head + 2 * self.conv_channels * self.conv_width)


@dataclass(frozen=True)
class Lightning(Mixer):
    """Lightning attention: gated accumulation with a constant decay per head (arXiv 2401.04658), an output
    norm and a sigmoid gate. No convolution."""

    num_heads: int
    head_dim: int

    letter = "L"

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return (StateTensor("recurrent", (self.num_heads, self.head_dim, self.head_dim), state_dtype),)

    def projection_parameters(self, hidden: int) -> int:
        return hidden * self.num_heads * self.head_dim * 5  # q, k, v, gate, out

    def parameters(self, hidden: int) -> int:
        return self.projection_parameters(hidden) + self.num_heads * self.head_dim

    def mixing_flops(self, context: int) -> int:
        """Decay, rank-one update, read: 1 + 2 + 2 operations per element of the state."""
        return 5 * self.num_heads * self.head_dim**2

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        c = min(chunk, tokens)
        return tokens * self.num_heads * (4 * self.head_dim**2 + 4 * c * self.head_dim)


@dataclass(frozen=True)
class Mamba2(Mixer):
    """SSD (arXiv 2405.21060): gated accumulation with a scalar decay per head, k = B, q = C, v = Δx, behind
    a short convolution over [x | B | C]. The state is stored [num_heads, head_dim, state_dim]. `gate_norm`:
    the output gate stands in a norm with weights."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    gate_norm: bool = True

    letter = "L"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_dim

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return (
            StateTensor("recurrent", (self.num_heads, self.head_dim, self.state_dim), state_dtype),
            StateTensor("conv", (self.conv_width - 1, self.conv_channels), dtype),
        )

    def projection_parameters(self, hidden: int) -> int:
        return hidden * (self.inner + self.conv_channels + self.num_heads) + self.inner * hidden

    def parameters(self, hidden: int) -> int:
        """D, A and the bias of Δ are one number a head each."""
        biases = self.inner + self.conv_channels + self.num_heads + hidden if self.proj_bias else 0
        conv = self.conv_channels * (self.conv_width + self.conv_bias)
        norm = self.inner if self.gate_norm else 0
        return self.projection_parameters(hidden) + biases + conv + 3 * self.num_heads + norm

    def mixing_flops(self, context: int) -> int:
        return 5 * self.inner * self.state_dim + 2 * self.conv_channels * self.conv_width

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        c = min(chunk, tokens)
        per_head = 4 * self.head_dim * self.state_dim + 2 * c * (self.state_dim + self.head_dim)
        return tokens * (self.num_heads * per_head + 2 * self.conv_channels * self.conv_width)


@dataclass(frozen=True)
class Mamba1(Mixer):
    """Selective scan (arXiv 2312.00752) over `inner` channels with `state_dim` states each, behind a short
    convolution. `dt_rank`: inner width of Δ's projection. The state is stored [inner, state_dim].
    `inner_norms`: RMS norms on Δ, B and C with weights (Jamba); Falcon-Mamba's have none."""

    inner: int
    state_dim: int
    dt_rank: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False

    letter = "L"

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return (
            StateTensor("recurrent", (self.inner, self.state_dim), state_dtype),
            StateTensor("conv", (self.conv_width - 1, self.inner), dtype),
        )

    def projection_parameters(self, hidden: int) -> int:
        inputs = 2 * hidden * self.inner + self.inner * (self.dt_rank + 2 * self.state_dim)
        return inputs + self.dt_rank * self.inner + self.inner * hidden

    def parameters(self, hidden: int) -> int:
        biases = 2 * self.inner + hidden if self.proj_bias else 0
        norms = self.dt_rank + 2 * self.state_dim if self.inner_norms else 0
        conv = self.inner * (self.conv_width + self.conv_bias)
        scan = self.inner * self.state_dim + 2 * self.inner  # A; D and the bias of Δ
        return self.projection_parameters(hidden) + biases + norms + conv + scan

    def mixing_flops(self, context: int) -> int:
        """Per channel and state: Δ·A and its exponential, decay, Δx·B added, read: 1 + 1 + 1 + 2 + 2."""
        return 7 * self.inner * self.state_dim + 2 * self.inner * self.conv_width


@dataclass(frozen=True)
class ShortConv(Mixer):
    """A gated short convolution (LFM2): the state is the convolution's window alone."""

    channels: int
    conv_width: int
    bias: bool = False

    letter = "C"

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (self.conv_width - 1, self.channels), dtype),)

    def projection_parameters(self, hidden: int) -> int:
        return 4 * hidden * self.channels  # [B | C | x] and out

    def parameters(self, hidden: int) -> int:
        biases = self.channels * 4 + hidden if self.bias else 0
        return self.projection_parameters(hidden) + self.channels * self.conv_width + biases

    def mixing_flops(self, context: int) -> int:
        return 2 * self.channels * (self.conv_width + 1)


@dataclass(frozen=True)
class Parallel(Mixer):
    """Attention and a linear mixer side by side over one input, their outputs added (Falcon-H1)."""

    attention: FullAttention
    linear: Mixer

    letter = "P"

    @property
    def turned_dim(self) -> int:
        return self.attention.turned_dim

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return self.attention.page_shape(page_size)

    def kv_elements(self) -> int:
        return self.attention.kv_elements()

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return self.linear.state_tensors(state_dtype, dtype)

    def projection_parameters(self, hidden: int) -> int:
        return self.attention.projection_parameters(hidden) + self.linear.projection_parameters(hidden)

    def parameters(self, hidden: int) -> int:
        return self.attention.parameters(hidden) + self.linear.parameters(hidden)

    def mixing_flops(self, context: int) -> int:
        return self.attention.mixing_flops(context) + self.linear.mixing_flops(context)

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        parts = (self.attention, self.linear)
        return sum(part.prefill_mixing_flops(tokens, chunk) for part in parts)
