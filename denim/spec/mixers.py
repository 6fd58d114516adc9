"""What a mixer is: what every kind of it says of its storage and cost.

The kinds are in `denim.spec.attention` and `denim.spec.linear`. Knows nothing of configs, tensors or
devices. Nothing else in Denim computes the size of a cache. FLOPs count a multiply and an add as two.
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

# The parts of a ring of recorded updates (`Mixer.record_tensors`): keys, updates and log-decays.
RECORD_ROLES = ("record_keys", "record_updates", "record_decays")


@dataclass(frozen=True)
class StateTensor:
    """One fixed-size tensor that a mixer keeps for a request.

    `role` is "recurrent" (the state, stored [heads, d_v, d_k], or [channels, N] for a selective scan),
    "conv" (the last width - 1 inputs of the short convolution, stored [width - 1, channels]), or one of
    `RECORD_ROLES` (recorded updates, length first).
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

    def record_tensors(self, length: int) -> tuple[StateTensor, ...]:
        """A ring of `length` updates that are recorded and not yet written to the state; always fp32, so
        that nothing is lost by writing late. Empty for a rule without deferred writes."""
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
class NoMixer(Mixer):
    """A layer that is a feed-forward network alone."""

    letter = "-"
