"""One step of the delta rule on a tile of a state, and the tile's shape. For kernels.

A tile is some rows of a head's state [d_v, d_k], taken as [rows, parts, inner] with parts x inner = d_k: a
thread then holds the same few channels of each part, so that most of a sum over d_k stays inside a thread
(three shuffles for four rows at a time, where a warp over a whole row needs five for each), and still
loads and stores 16 bytes at a time in pieces of 128 bytes. Vectors over d_k are [parts x inner] or, beside a
tile, [1, parts, inner].

Knows no layer, no gates and no slots.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Tiling(NamedTuple):
    """How states are spread: `rows` rows of a state, with `inner` channels side by side, for a program of
    `warps` warps. Powers of two."""

    rows: int
    warps: int
    inner: int = 32

    def within(self, value_dim: int) -> Tiling:
        """The same with no more rows than d_v has."""
        return self._replace(rows=min(self.rows, triton.next_power_of_2(value_dim)))

    def parts(self, key_dim: int) -> tuple[int, int]:
        """(parts, inner) of a vector over d_k, padded to a power of two."""
        padded = triton.next_power_of_2(key_dim)
        inner = min(padded, self.inner)
        return padded // inner, inner

    def splits(self, value_dim: int) -> int:
        """Programs that share a state."""
        return triton.cdiv(value_dim, self.rows)


@triton.jit
def key_channels(parts: tl.constexpr, inner: tl.constexpr):
    """0 .. parts x inner - 1 as [1, parts, inner]."""
    return tl.arange(0, parts)[None, :, None] * inner + tl.arange(0, inner)[None, None, :]


@triton.jit
def tile_offsets(v_at, k_at, key_dim: tl.constexpr):
    """Offsets [rows, parts, inner] of the rows v_at [rows] in a state [d_v, d_k].

    Triton gives a warp's threads first to the dimension with the longest runs, inner; then to the next. Rows
    and parts tie, and versions differ in which comes first, so rows are said to have runs of two. Nothing
    else follows from that: what a thread loads at once lies along inner.
    """
    return tl.max_contiguous(v_at[:, None, None] * key_dim + k_at, [2, 1, k_at.shape[2]])


@triton.jit
def load(ptr, mask):
    """What lies at `ptr`, zeros outside of `mask`; None: all of it, which saves preparing the zeros."""
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def in_parts(x, parts: tl.constexpr, inner: tl.constexpr):
    """[parts x inner] -> [1, parts, inner]."""
    return tl.reshape(x, [1, parts, inner])


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def products(q, k):
    """(q . q, k . k, q . k) of two vectors, in one pass over the threads."""
    return tl.reduce((q * q, k * k, q * k), 0, _add3)


@triton.jit
def read(s, x):
    """s x: sums over d_k of s [rows, parts, inner] times x [1, parts, inner]: [rows]."""
    return tl.sum(tl.sum(s * x, 1), 1)


@triton.jit
def outer(u, k):
    """u k^T: [rows], [1, parts, inner] -> [rows, parts, inner]."""
    return u[:, None, None] * k
