"""Random numbers that depend on nothing but what is asked for.

A draw is a hash of (seed, number of the draw), so that a request draws the same numbers whatever its
batch mates are, and after preemption, recomputation or resumption. There is no generator to keep.

The hash is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), applied twice.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio, made odd
_FLOAT_BITS = 53  # the mantissa of a float64


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive_seed(seed: int, number: int) -> int:
    """A 64-bit seed for the `number`-th child of `seed`; children are unrelated to each other."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (number + 1)) & _MASK)


def uniform(seed: int, draw: int) -> float:
    """The draw-th number of the stream named by `seed` (any integer, taken modulo 2^64), in [0, 1)."""
    return (derive_seed(seed, draw) >> (64 - _FLOAT_BITS)) * 2.0**-_FLOAT_BITS
