"""What the attention kernels for Hopper share: pages as TMA sees them, sums of partial sums, and the output.

Owns the layout in shared memory. A page's keys (or values) of one KV head are [page_size, dim], and TMA
brings them in pieces of [page_size, 64], 128 bytes a row, the width of the swizzle that wgmma reads. The
pieces of a block lie column by column, so that together they are one [keys, dim] tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from denim.layers.kernels import split_keys
from denim.recurrence.kernels.exponentials import LOG2_E
from denim.recurrence.kernels.hopper import on_hopper

COLUMNS = gl.constexpr(64)  # of a piece: 128 bytes of 16-bit numbers

split_of = gluon.jit(split_keys.split_of.fn)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def bring_block(
    matrix,
    pages,
    full,
    smem,
    s,
    offset: gl.constexpr,
    page_size: gl.constexpr,
    keys: gl.constexpr,
    dim: gl.constexpr,
):
    """Have TMA bring a block of `keys` keys, or values, into place s of a ring; `full` tells when it is
    there.

    matrix: descriptor and column of `page_rows`, and rows from page to page; offset: rows from a page to what
    is brought of it. pages: a list in memory, the block's first place in it, and the last place: behind it
    that page is brought again, since blocks are whole."""
    descriptor, column, page_stride = matrix
    table_ptr, first_page, last_page = pages
    per_block: gl.constexpr = keys // page_size
    pieces: gl.constexpr = dim // COLUMNS
    mbarrier.expect(full.index(s), keys * dim * 2)
    for j in gl.static_range(per_block):
        row = gl.load(table_ptr + gl.minimum(first_page + j, last_page)) * page_stride + offset
        for c in gl.static_range(pieces):
            target = smem.index((s * pieces + c) * per_block + j)
            tma.async_copy_global_to_shared(descriptor, [row, column + c * COLUMNS], full.index(s), target)


@gluon.jit
def clear_behind(smem, s, left, keys: gl.constexpr, dim: gl.constexpr, dtype: gl.constexpr):
    """Zeros for the values of a block behind the first `left`: what does not exist may be NaN, which a weight
    of zero does not undo. For a group of four warps."""
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces: gl.constexpr = dim // COLUMNS
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    blocks = smem._reinterpret(dtype, [smem.shape[0] * smem.shape[1] // keys, keys, COLUMNS], shared)
    n = gl.arange(0, keys, layout=gl.SliceLayout(1, plain))
    for c in gl.static_range(pieces):
        piece = blocks.index(s * pieces + c)
        piece.store(gl.where((n < left)[:, None], piece.load(plain), 0.0))


@gluon.jit
def write(strips, strides, result, here, d, mask, gated: gl.constexpr):
    """Rows of the result, times the sigmoid of the gate. strips: pointers to gate and output; here: token and
    head of each row; d: their numbers. All of these spread over the result's shape."""
    gate_ptr, out_ptr = strips
    _, _, out_token_stride, out_head_stride, gate_token_stride, gate_head_stride = strides
    token, head = here
    token = token.to(gl.int64)
    if gated:
        gate_at = token * gate_token_stride + head * gate_head_stride + d
        gate = gl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(gl.float32)
        result = result * (1.0 / (1.0 + gl.exp2(-LOG2_E * gate)))
    out_at = token * out_token_stride + head * out_head_stride + d
    gl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def added_up(
    workspace,
    base,
    step,
    splits,
    r,
    there,
    rows: gl.constexpr,
    dim: gl.constexpr,
    at_once: gl.constexpr,
    layout: gl.constexpr,
):
    """Rows r [rows] of a tile over all its splits, [rows, dim]: split j left row r at place base + j · step +
    r of the workspace. `there`: rows that exist. Partial sums of `at_once` splits are on their way at one
    time."""
    partial_ptr, stats_ptr = workspace
    d = gl.arange(0, dim, layout=gl.SliceLayout(0, layout))
    top = gl.full([rows], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.zeros([rows], gl.float32, layout=gl.SliceLayout(1, layout))
    acc = gl.zeros([rows, dim], gl.float32, layout=layout)
    for j0 in range(0, splits, at_once):
        for j in gl.static_range(at_once):
            kept = there & (j0 + j < splits)
            at = base + (j0 + j) * step + r
            j_top = gl.load(stats_ptr + at * 2, mask=kept, other=float("-inf"), cache_modifier=".cg")
            j_total = gl.load(stats_ptr + at * 2 + 1, mask=kept, other=0.0, cache_modifier=".cg")
            j_acc = gl.load(
                partial_ptr + at[:, None] * dim + d[None, :],
                mask=kept[:, None] & (d < dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = gl.maximum(top, j_top)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
            fade = gl.exp2(top - shift)
            j_fade = gl.exp2(j_top - shift)
            total = total * fade + j_total * j_fade
            acc = acc * fade[:, None] + j_acc * j_fade[:, None]
            top = new_top
    return acc / total[:, None]


def suits(q: Tensor, kv: Tensor) -> bool:
    """Whether the kernels take queries [T, heads, dim] over a layer's pages [pages, 2, page_size, kv_heads,
    dim]: 16-bit numbers of one dtype, heads of 64, 128 or 256, and pages that are whole rows of all heads."""
    _, _, page_size, kv_heads, dim = kv.shape
    return (
        on_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv.dtype == q.dtype
        and dim in (64, 128, 256)
        and page_size in (8, 16, 32, 64)
        and kv.stride(0) % (kv_heads * dim) == 0
        and kv.stride()[1:] == (page_size * kv_heads * dim, kv_heads * dim, dim, 1)
    )


def page_rows(kv: Tensor) -> tuple[TensorDescriptor, int]:
    """A layer's pages as a matrix with a row a token, [rows, kv_heads · dim], and the rows from page to page;
    a page's values lie page_size rows behind its keys."""
    pages, _, page_size, kv_heads, dim = kv.shape
    width = kv_heads * dim
    stride = kv.stride(0) // width
    rows = (pages - 1) * stride + 2 * page_size
    piece = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(kv, [rows, width], [width, 1], [page_size, COLUMNS.value], piece), stride
