"""Products of a chunk's tokens through a decay per key channel, in small blocks.

Owns w_s sum_c a_tc e^{G_tc - G_sc} b_sc for a = queries and a = keys, b = keys, s <= t. Knows packed chunks,
the sums G of their log-decays (base 2) and the tokens' weights w; must not know what a rule does with the
products. Faded operands have 11 bits (fp16) unless all is fp32: keys and queries are of length 1 at most.

Pairs are parted by halving, as `denim.recurrence.decay` says: those of two blocks of 16 tokens by `_corner`,
those inside a block by `_diagonal`. There a token is at each cut either in a first half, as a key, or in a
second half, as a row; so at a cut where the sum is R one factor per token serves both, e^{-|G - R|}, and
products of all tokens with all give the pairs that the cut parts, the rest being masked out. Every exponent
is <= 0. A program is one block and one warp: it needs no barriers, and a processor holds many.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.delta_walk import TABLE

BLOCK = 16  # the least that tensor cores multiply
CHANNELS = 32  # that a program takes at once
REGISTERS = 168  # of a thread: 12 warps on a multiprocessor instead of 8, which gains 6 to 10% on an H200


@triton.jit
def _products(
    q_ptr, k_ptr, g_ptr, row_stride, row, key, cut, count, channel, real, key_dim, precision: tl.constexpr
):
    """Of the queries and of the keys at `row` with the keys at `key`, through the decay between them, which
    is parted at `cut`. The tokens at `row` stand behind the cut, those at `key` before it."""
    narrow: tl.constexpr = tl.float32 if precision == "ieee" else tl.float16
    at_cut = tl.load(g_ptr + cut * key_dim + channel, mask=real, other=0.0)
    sums = tl.load(g_ptr + key[:, None] * key_dim + channel, mask=real, other=0.0)
    faded = tl.exp2(tl.minimum(at_cut - sums, 0.0))
    k = tl.load(k_ptr + key[:, None] * row_stride + channel, mask=real & (key < count)[:, None], other=0.0)
    keys = tl.trans((k * faded).to(narrow))
    sums = tl.load(g_ptr + row[:, None] * key_dim + channel, mask=real, other=0.0)
    faded = tl.exp2(tl.minimum(sums - at_cut, 0.0))
    live = real & (row < count)[:, None]
    k = tl.load(k_ptr + row[:, None] * row_stride + channel, mask=live, other=0.0)
    q = tl.load(q_ptr + row[:, None] * row_stride + channel, mask=live, other=0.0)
    kk = tl.dot((k * faded).to(narrow), keys, input_precision=precision)
    qk = tl.dot((q * faded).to(narrow), keys, input_precision=precision)
    return qk, kk


@triton.jit
def _corner(
    q_ptr,
    k_ptr,
    g_ptr,
    weights_ptr,
    products_ptr,
    scores_ptr,
    row_stride,
    row_start,
    key_start,
    cut,
    count,
    scale,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    n: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
):
    """n tokens behind a cut with n tokens before it."""
    key = key_start + tl.arange(0, n)
    row = row_start + tl.arange(0, n)
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
    square = row[:, None] * size + key[None, :]
    weight = tl.load(weights_ptr + key)[None, :]
    tl.store(products_ptr + square, kk * weight)
    tl.store(scores_ptr + square, (qk * (weight * scale)).to(scores_ptr.dtype.element_ty))


@triton.jit
def _diagonal(
    q_ptr,
    k_ptr,
    g_ptr,
    weights_ptr,
    products_ptr,
    scores_ptr,
    row_stride,
    start,
    count,
    scale,
    key_dim: tl.constexpr,
    size: tl.constexpr,
    n: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
):
    """n tokens with each other, by halving; and zeros right of that block."""
    dtype = scores_ptr.dtype.element_ty
    narrow: tl.constexpr = tl.float32 if precision == "ieee" else tl.float16
    inner = tl.arange(0, n)
    token = start + inner
    row = inner[:, None]
    column = inner[None, :]
    source = token[:, None] * row_stride
    g_ptr += start * key_dim
    qk = tl.zeros([n, n], tl.float32)
    kk = tl.zeros([n, n], tl.float32)
    for part in tl.range(0, key_dim, width, num_stages=1):
        channel = part + tl.arange(0, width)[None, :]
        real = channel < key_dim
        live = real & (token < count)[:, None]
        q = tl.load(q_ptr + source + channel, mask=live, other=0.0)
        k = tl.load(k_ptr + source + channel, mask=live, other=0.0)
        sums = tl.load(g_ptr + row * key_dim + channel, mask=real, other=0.0)
        qk += tl.where(row == column, tl.dot(q, tl.trans(k), input_precision=precision), 0.0)
        for level in tl.static_range(0, 4):
            cut = ((row >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
            at_cut = tl.load(g_ptr + cut * key_dim + channel, mask=real, other=0.0)
            factor = tl.exp2(-tl.abs(sums - at_cut))
            key = (k * factor).to(narrow)
            parted = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
            kk += tl.where(parted, tl.dot(key, tl.trans(key), input_precision=precision), 0.0)
            query = (q * factor).to(narrow)
            qk += tl.where(parted, tl.dot(query, tl.trans(key), input_precision=precision), 0.0)
    square = token[:, None] * size
    weight = tl.load(weights_ptr + start + column)
    tl.store(products_ptr + square + start + column, kk * weight)
    tl.store(scores_ptr + square + start + column, (qk * (weight * scale)).to(dtype))
    right = tl.arange(0, size)[None, :]
    tl.store(scores_ptr + square + right, tl.zeros([n, size], dtype), mask=right >= start + n)


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _pairs(
    rows_ptr,
    row_stride,
    chunks_ptr,
    sums_ptr,
    weights_ptr,
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
    """One n x n block of pairs of a chunk and head: on the diagonal or left of it."""
    blocks: tl.constexpr = size // n
    left: tl.constexpr = blocks * (blocks - 1) // 2
    place = (tl.program_id(0) // (left + blocks)).to(tl.int64)
    block = tl.program_id(0) % (left + blocks)
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
    weights_ptr += place * size
    products_ptr += place * (size * size)
    scores_ptr += place * (size * size)
    if block < blocks:
        _diagonal(
            q_ptr, k_ptr, g_ptr, weights_ptr, products_ptr, scores_ptr, row_stride, block * n, count, scale,
            key_dim, size, n, width, precision,
        )  # fmt: skip
    else:
        if blocks > 1:
            block -= blocks
            row = 1 + (block >= 1).to(tl.int32) + (block >= 3).to(tl.int32)  # of four at most
            column = block - row * (row - 1) // 2
            behind = tl.where((row ^ column) >= 2, 2, row)  # the block behind the cut that parts the two
            _corner(
                q_ptr, k_ptr, g_ptr, weights_ptr, products_ptr, scores_ptr, row_stride, row * n, column * n,
                behind * n - 1, count, scale, key_dim, size, n, width, precision,
            )  # fmt: skip


def faded_products(
    rows: Tensor,
    chunks: Tensor,
    sums: Tensor,
    weights: Tensor,
    products: Tensor,
    scores: Tensor,
    scale: float,
    precision: str,
) -> None:
    """Fills `products` and `scores` of M chunks of `size` tokens.

    rows: [T, 2 * H * d_k + ...] = [q | k | ...], rows any distance apart; chunks: [M, 3] of a `ChunkTable`;
    sums: [M, H, size, d_k] fp32, log2 of the decay from the chunk's start through each token; weights:
    [M, H, size] fp32, of the keys; products: [M, H, size, size] fp32, of keys with keys, written for s < t
    alone; scores: the same of queries with keys, times scale, written for s <= t, and 0 above. precision: of
    `tl.dot`.
    """
    _, heads, size, key_dim = sums.shape
    assert size in (BLOCK, 2 * BLOCK, 4 * BLOCK)
    width = min(CHANNELS, max(16, triton.next_power_of_2(key_dim)))
    blocks = size // BLOCK
    _pairs[(len(chunks) * heads * (blocks * (blocks + 1) // 2),)](
        rows,
        rows.stride(0),
        chunks,
        sums,
        weights,
        products,
        scores,
        scale,
        heads=heads,
        key_dim=key_dim,
        size=size,
        n=BLOCK,
        width=width,
        precision=precision,
        num_warps=1,
        maxnreg=REGISTERS,
    )
