"""Mixers with a state of fixed size: its shape, and what they cost.

FLOPs of recurrent forms count per element of the state: decay 1, rank-one update 2, each read 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.spec.mixers import RECORD_ROLES, Mixer, StateTensor


def _ring(length: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[StateTensor, ...]:
    """Records of these shapes, in the order of `RECORD_ROLES`."""
    return tuple(
        StateTensor(role, (length, *shape), "float32")
        for role, shape in zip(RECORD_ROLES, shapes, strict=True)
    )


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

    def record_tensors(self, length: int) -> tuple[StateTensor, ...]:
        heads = self.num_value_heads
        shapes = ((self.num_key_heads, self.key_dim), (heads, self.value_dim), (heads,))
        return _ring(length, shapes)

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

    def record_tensors(self, length: int) -> tuple[StateTensor, ...]:
        keys, values = (self.num_heads, self.key_dim), (self.num_heads, self.value_dim)
        return _ring(length, (keys, values, keys))

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
