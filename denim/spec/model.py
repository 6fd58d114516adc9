"""The frozen description of a model from which everything else is derived.

Owns the vocabulary of layers: mixers (what mixes tokens) and feed-forward networks (what does not),
what each one stores and what it costs. Knows nothing of files, tensors or devices: a reader
(`denim.spec.reader`) makes a `ModelSpec` from a config, and ledger, arena, scheduler and models read it.
Nothing else in Denim computes the size of a cache.

Dtypes are the names that torch and safetensors use ("float32", "bfloat16", "float16", "float8_e4m3fn").
FLOPs count a multiply and an add as two.
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

    `role` is "recurrent" (the state S, stored [heads, d_v, d_k]) or "conv" (the last width-1 inputs of
    the short convolution, stored [width-1, channels]).
    """

    role: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class FullAttention:
    """Grouped-query softmax attention over a growing KV cache.

    `rotary_dim` is the leading part of each head that RoPE turns (0: none). `gated`: the query
    projection also yields a sigmoid gate for the output, per head [q | gate].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool = False
    qk_norm: bool = False

    letter = "F"

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of one token's KV: (2, num_kv_heads, head_dim); 2 is key, value."""
        return (2, self.num_kv_heads, self.head_dim)

    def kv_elements(self) -> int:
        """Stored numbers per token."""
        return prod(self.kv_shape)

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        return ()

    def projection_parameters(self, hidden: int) -> int:
        """Parameters of the matrices that every token is multiplied with."""
        q = self.num_heads * self.head_dim
        return hidden * (q * (2 if self.gated else 1) + 2 * self.num_kv_heads * self.head_dim + q)

    def parameters(self, hidden: int) -> int:
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.projection_parameters(hidden) + norms

    def mixing_flops(self, context: int) -> int:
        """FLOPs of one token beyond its projections, attending over `context` tokens (scores and sum)."""
        return 4 * context * self.num_heads * self.head_dim

    def prefill_mixing_flops(self, tokens: int, chunk: int) -> int:
        """FLOPs of a whole prompt beyond its projections: token i attends over i + 1 tokens."""
        return self.mixing_flops(tokens * (tokens + 1) // 2)


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule behind a short causal convolution over [q | k | v].

    Value head i uses key head i // (num_value_heads // num_key_heads).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    letter = "L"

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def kv_elements(self) -> int:
        return 0

    def state_tensors(self, state_dtype: str, dtype: str) -> tuple[StateTensor, ...]:
        """`state_dtype` is that of S, `dtype` that of the convolution window (the model's dtype)."""
        return (
            StateTensor("recurrent", (self.num_value_heads, self.value_dim, self.key_dim), state_dtype),
            StateTensor("conv", (self.conv_width - 1, self.conv_channels), dtype),
        )

    def projection_parameters(self, hidden: int) -> int:
        """Parameters of the matrices that every token is multiplied with."""
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


Mixer = FullAttention | GatedDeltaNet


@dataclass(frozen=True)
class DenseFFN:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    intermediate: int

    def parameters(self, hidden: int) -> int:
        return 3 * hidden * self.intermediate

    def active_parameters(self, hidden: int) -> int:
        """Parameters that one token is multiplied with."""
        return self.parameters(hidden)


@dataclass(frozen=True)
class MoEFFN:
    """Softmax-routed experts (top-k weights renormalised) plus one shared expert behind a sigmoid gate."""

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int

    def parameters(self, hidden: int) -> int:
        expert = 3 * hidden * self.intermediate
        return self.num_experts * (expert + hidden) + self._shared(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self.top_k * 3 * hidden * self.intermediate + self.num_experts * hidden + self._shared(hidden)

    def _shared(self, hidden: int) -> int:
        return 3 * hidden * self.shared_intermediate + hidden if self.shared_intermediate else 0


FFN = DenseFFN | MoEFFN


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    ffn: FFN


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind` is "default" or "yarn"; the rest below `theta` is YaRN's.

    YaRN: Peng et al. 2023 (arXiv 2309.00071). `attention_factor` None means 0.1 ln(factor) + 1.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A language model as an ordered tuple of layers, with all that surrounds them.

    `mtp_layers` are the layers of the multi-token-prediction head (empty: none promised by the config).
    `dtype` is that of weights, activations and KV; `state_dtype` that of recurrent states.
    """

    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    rope: Rope
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    mtp_layers: tuple[Layer, ...] = ()

    @property
    def pattern(self) -> str:
        """One letter a layer, such as "LLLF"."""
        return "".join(layer.mixer.letter for layer in self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep KV."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer.kv_elements())

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a fixed-size state."""
        return tuple(i for i, layer in enumerate(self.layers) if not layer.mixer.kv_elements())
