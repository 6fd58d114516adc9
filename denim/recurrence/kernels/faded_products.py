"""Products of a chunk's tokens through a decay per key channel, in small blocks.

Owns sum_c a_tc e^{G_tc - G_sc} b_sc for a = queries and a = keys, b = keys, s <= t. Knows packed chunks and
the sums G of their log-decays (base 2); must not know what a rule does with the products.

Pairs are parted by halving, as `denim.recurrence.decay` says: those of the two halves of 32 and of 64 tokens
by `_corner`, those inside 16 tokens by `_diagonal`. There a token is at each cut either in a first half, as a
key, or in a second half, as a row; so at a cut where the sum is R one factor per token serves both,
e^{-|G - R|}, and products of all tokens with all give the pairs that the cut parts, the rest being masked
out. Every exponent is <= 0. A program is one warp: it needs no barriers, and a processor holds many.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.delta_walk import TABLE

BLOCK = 16  # the least that tensor cores multiply
CHANNELS = 32  # that a program takes at once


@triton.jit
def _products(
    q_ptr, k_ptr, g_ptr, row_stride, row, key, cut, count, channel, real, key_dim, precision: tl.constexpr
):
    """Of the queries and of the keys at `row` with the keys at `key`, through the decay between them, which
    is parted at `cut`. The tokens at `row` stand behind the cut, those at `key` before it."""
    dtype = q_ptr.dtype.element_ty
    at_cut = tl.load(g_ptr + cut * key_dim + channel, mask=real, other=0.0)
    sums = tl.load(g_ptr + key[:, None] * key_dim + channel, mask=real, other=0.0)
    faded = tl.exp2(tl.minimum(at_cut - sums, 0.0))
    k = tl.load(k_ptr + key[:, None] * row_stride + channel, mask=real & (key < count)[:, None], other=0.0)
    keys = tl.trans((k * faded).to(dtype))
    sums = tl.load(g_ptr + row[:, None] * key_dim + channel, mask=real, other=0.0)
    faded = tl.exp2(tl.minimum(sums - at_cut, 0.0))
    live = real & (row < count)[:, None]
    k = tl.load(k_ptr + row[:, None] * row_stride + channel, mask=live, other=0.0)
    q = tl.load(q_ptr + row[:, None] * row_stride + channel, mask=live, other=0.0)
    kk = tl.dot((k * faded).to(dtype), keys, input_precision=precision)
    qk = tl.dot((q * faded).to(dtype), keys, input_precision=precision)
    return qk, kk


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _corner(
    rows_ptr,
    row_stride,
    chunks_ptr,
    sums_ptr,
    products_ptr,
    scores_ptr,
    scale,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    n: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
):
    """The tokens of each second n of 2 n with those of the first n."""
    pairs: tl.constexpr = size // (2 * n)
    place = (tl.program_id(0) // pairs).to(tl.int64)
    start = (tl.program_id(0) % pairs) * (2 * n)
    chunk = place // heads
    head = place % heads
    sequence = tl.load(chunks_ptr + chunk * 3)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if sequence < 0:
        return
    q_ptr = rows_ptr + first * row_stride + head * key_dim
    k_ptr = q_ptr + heads * key_dim
    g_ptr = sums_ptr + place * (size * key_dim)
    key = start + tl.arange(0, n)
    row = key + n
    cut = start + n - 1
    qk = tl.zeros([n, n], tl.float32)
    kk = tl.zeros([n, n], tl.float32)
    for part in tl.range(0, key_dim, width, num_stages=1):
        channel = part + tl.arange(0, width)[None, :]
        real = channel < key_dim
        more_qk, more_kk = _products(
            q_ptr, k_ptr, g_ptr, row_stride, row, key, cut, count, channel, real, key_dim, precision
        )
        qk += more_qk
        kk += more_kk
    square = place * (size * size) + row[:, None] * size + key[None, :]
    tl.store(products_ptr + square, kk)
    tl.store(scores_ptr + square, (qk * scale).to(scores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _diagonal(
    rows_ptr,
    row_stride,
    chunks_ptr,
    sums_ptr,
    products_ptr,
    scores_ptr,
    scale,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    n: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
):
    """The tokens of each n with each other, by halving; and zeros right of that block."""
    blocks: tl.constexpr = size // n
    place = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * n
    chunk = place // heads
    head = place % heads
    sequence = tl.load(chunks_ptr + chunk * 3)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if sequence < 0:
        return
    dtype = rows_ptr.dtype.element_ty
    inner = tl.arange(0, n)
    token = start + inner
    row = inner[:, None]
    column = inner[None, :]
    source = rows_ptr + (first + token[:, None]) * row_stride + head * key_dim
    g_ptr = sums_ptr + (place * size + start) * key_dim
    qk = tl.zeros([n, n], tl.float32)
    kk = tl.zeros([n, n], tl.float32)
    for part in tl.range(0, key_dim, width, num_stages=1):
        channel = part + tl.arange(0, width)[None, :]
        real = channel < key_dim
        live = real & (token < count)[:, None]
        q = tl.load(source + channel, mask=live, other=0.0)
        k = tl.load(source + heads * key_dim + channel, mask=live, other=0.0)
        sums = tl.load(g_ptr + row * key_dim + channel, mask=real, other=0.0)
        qk += tl.where(row == column, tl.dot(q, tl.trans(k), input_precision=precision), 0.0)
        for level in tl.static_range(0, 4):
            cut = ((row >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
            at_cut = tl.load(g_ptr + cut * key_dim + channel, mask=real, other=0.0)
            factor = tl.exp2(-tl.abs(sums - at_cut))
            key = (k * factor).to(dtype)
            parted = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
            kk += tl.where(parted, tl.dot(key, tl.trans(key), input_precision=precision), 0.0)
            query = (q * factor).to(dtype)
            qk += tl.where(parted, tl.dot(query, tl.trans(key), input_precision=precision), 0.0)
    square = place * (size * size) + token[:, None] * size
    tl.store(products_ptr + square + start + column, kk)
    tl.store(scores_ptr + square + start + column, (qk * scale).to(dtype))
    right = tl.arange(0, size)[None, :]
    tl.store(scores_ptr + square + right, tl.zeros([n, size], dtype), mask=right >= start + n)


def faded_products(
    rows: Tensor, chunks: Tensor, sums: Tensor, products: Tensor, scores: Tensor, scale: float, precision: str
) -> None:
    """Fills `products` and `scores` of M chunks of `size` tokens.

    rows: [T, 2 * H * d_k + ...] = [q | k | ...], rows any distance apart; chunks: [M, 3] of a `ChunkTable`;
    sums: [M, H, size, d_k] fp32, log2 of the decay from the chunk's start through each token; products: [M,
    H, size, size] fp32, of keys with keys, written for s < t alone; scores: the same of queries with keys,
    times scale, written for s <= t, and 0 above. precision: of `tl.dot`.
    """
    _, heads, size, key_dim = sums.shape
    programs = len(chunks) * heads
    parts = (rows, rows.stride(0), chunks, sums, products, scores, scale)
    width = min(CHANNELS, max(16, triton.next_power_of_2(key_dim)))
    shape = {"heads": heads, "key_dim": key_dim, "size": size, "width": width, "precision": precision}
    _diagonal[(programs * (size // BLOCK),)](*parts, n=BLOCK, **shape, num_warps=1)
    n = BLOCK
    while n < size:
        _corner[(programs * (size // (2 * n)),)](*parts, n=n, **shape, num_warps=1)
        n *= 2
