"""Random numbers that depend on nothing but what is asked for.

A draw is a hash of (seed, number of the draw), so that a request draws the same numbers whatever its
batch mates are, and after preemption, recomputation or resumption. There is no generator to keep.

The hash is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio, made odd
_FLOAT_BITS = 53  # the mantissa of a float64

_Words = TypeVar("_Words", int, np.ndarray)  # one of 64 bits, or an array of uint64, which wrap by themselves


def _mix(z: _Words) -> _Words:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _stream(seed: int) -> int:
    return _mix((seed + _GOLDEN) & _MASK)


def derive_seed(seed: int, number: int) -> int:
    """A 64-bit seed for the `number`-th child of `seed`; children are unrelated to each other."""
    return _mix((_stream(seed) + _GOLDEN * (number + 1)) & _MASK)


def uniform(seed: int, draw: int) -> float:
    """The draw-th number of the stream named by `seed` (any integer, taken modulo 2^64), in [0, 1)."""
    return (derive_seed(seed, draw) >> (64 - _FLOAT_BITS)) * 2.0**-_FLOAT_BITS


class Streams:
    """`uniform` of many seeds at once."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._streams = np.array([_stream(seed) for seed in seeds], dtype=np.uint64)

    def uniforms(self, draws: Sequence[int]) -> np.ndarray:
        """float64, the draws[i]-th number of the i-th stream."""
        numbers = _mix(self._streams + (np.array(draws, dtype=np.uint64) + 1) * _GOLDEN)
        return (numbers >> (64 - _FLOAT_BITS)) * 2.0**-_FLOAT_BITS
