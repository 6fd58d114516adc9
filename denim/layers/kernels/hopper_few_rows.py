"""The product of 2 to 64 rows with a weight on Hopper: y = f(x Wᵀ) + add. What `few_rows` does elsewhere.

Owns the kernel. A chain of such products is a chain of waits: for the kernel before, for x, for the sums. So
whatever does not depend on the kernel before comes ahead of it: TMA fills a ring in shared memory with the
program's part of the weight while that one runs, and only x is left to be brought. Products are turned
around, since the rows are few: columns of y are the 64 rows of wgmma.

Where the columns alone make few programs, a cluster shares a tile. Each program has its part of K, and
they bring each other their sums (`cluster_parts`), with nothing in memory between them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda as tl_cuda

from denim.layers.kernels.cluster_parts import send, sum_of, wait_for_all
from denim.recurrence.kernels.cluster import meet, open_place, over, rank
from denim.recurrence.kernels.hopper import on_hopper
from denim.recurrence.kernels.program_barrier import barrier

TILE = gl.constexpr(64)  # rows of the weight, of a program: the height of wgmma
DEPTH = gl.constexpr(64)  # of K, of a block: 128 bytes, the width of the swizzle that wgmma reads
BLOCKS = gl.constexpr(2)  # of a piece, which TMA brings at once

# Programs that run at once, one on each multiprocessor of an H200. More wait for the first to end, and what
# they could have brought ahead is not brought.
MOST_PROGRAMS = 132
MOST_SHARING = 4  # programs of a tile; eight bring each other more than they save
# Pieces for which a ring has room at least: Triton asks for more than 48 KiB of shared memory only where its
# own part exceeds them, and a place for the sums lies beside that.
LEAST_RING = gl.constexpr(3)


class Cut(NamedTuple):
    """How a product is cut up: `programs` of a cluster share a tile, and each holds `stages` pieces."""

    programs: int
    stages: int


def cut_of(x: Tensor, weight: Tensor, columns: int, gated: bool) -> Cut | None:
    """The cut of a product of rows x [M, K] with [N, K], or [2 N, K] if `gated`; N: `columns`. None where the
    kernel does not take it or is not faster: as measured on an H200 with hidden sizes of 1024 and 4096."""
    rows, k = x.shape
    tiles = triton.cdiv(columns, _columns_of(gated))
    whole = k % DEPTH.value == 0 and x.stride(0) % 8 == 0
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    if not (on_hopper(x.device) and x.dtype in (torch.bfloat16, torch.float16) and whole and aligned):
        return None
    if not 1 < rows <= 64 or tiles > MOST_PROGRAMS:
        return None
    programs = 1
    while programs < MOST_SHARING and tiles * programs * 2 <= MOST_PROGRAMS:
        programs *= 2
    return Cut(programs, 4 if programs == 1 or rows > 32 else 7)


def _columns_of(gated: bool) -> int:
    """Columns of y that a tile makes: gate and up of a column are two rows of it."""
    return TILE.value // 2 if gated else TILE.value


@constexpr_function
def _in_memory(columns, programs):
    """Columns of a row lie beside each other in memory, and so with the threads that write them."""
    size = 2 if columns <= 8 else 4
    lanes = min(columns // size, 16)
    return gl.BlockedLayout([size, 1], [lanes, 32 // lanes], [1, 4], [0, 1], over(programs, 2, 0))


@constexpr_function
def _swizzled(dims, programs, dim=None):
    return gl.NVMMASharedLayout(128, 16, dims, cga_layout=over(programs, dims, dim))


@cache
def _layout(dims: int, programs: int) -> gl.NVMMASharedLayout:
    """As `_swizzled`, of which every call takes 50 µs."""
    return _swizzled(dims, programs)


@constexpr_function
def _products(rows, programs):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16], over(programs, 2, 0))


@constexpr_function
def _barriers(programs):
    return mbarrier.MBarrierLayout(over(programs, 1))


@gluon.jit
def _silu_times(gate, up, gate_scale):
    gate *= gate_scale
    return gate * up / (1.0 + gl.exp(-gate))


@gluon.jit
def _bring(desc, at, ring, full, s, size: gl.constexpr):
    """Have TMA bring a piece into place s of a ring; `full` tells when it is there."""
    mbarrier.expect(full.index(s), BLOCKS * size * DEPTH * 2)
    tma.async_copy_global_to_shared(desc, at, full.index(s), ring.index(s))


@gluon.jit(do_not_specialize=["m"])
def _few_rows(
    x_desc,
    weight_desc,
    add_ptr,
    add_stride,
    out_ptr,
    m,
    n,
    gate_scale,
    k: gl.constexpr,
    rows: gl.constexpr,
    programs: gl.constexpr,
    stages: gl.constexpr,
    gated: gl.constexpr,
    added: gl.constexpr,
):
    """x: [K / 64, m, 64]; weight: [K / 64, 1 or gate and up, n, 64], both as TMA sees them: the blocks of a
    piece come one behind the other, and behind K come zeros."""
    tl_cuda.gdc_launch_dependents()
    dtype: gl.constexpr = weight_desc.dtype
    pieces: gl.constexpr = (k // DEPTH + BLOCKS * programs - 1) // (BLOCKS * programs)  # of a program
    ring: gl.constexpr = min(stages, max(pieces, LEAST_RING))
    ahead: gl.constexpr = min(ring, pieces)
    sides: gl.constexpr = 2 if gated else 1
    columns: gl.constexpr = TILE // sides
    height: gl.constexpr = programs * TILE  # of the sums of a cluster
    products: gl.constexpr = _products(rows, programs)
    final: gl.constexpr = _in_memory(columns // programs, programs)
    w_smem = gl.allocate_shared_memory(dtype, [ring, BLOCKS, sides, columns, DEPTH], _swizzled(4, programs))
    x_smem = gl.allocate_shared_memory(dtype, [ring, BLOCKS, rows, DEPTH], _swizzled(3, programs))
    w_full = gl.allocate_shared_memory(gl.int64, [ring, 1], _barriers(programs))
    x_full = gl.allocate_shared_memory(gl.int64, [ring, 1], _barriers(programs))
    w_blocks = w_smem._reinterpret(dtype, [ring * BLOCKS, height, DEPTH], _swizzled(2, programs, 0))
    x_blocks = x_smem._reinterpret(dtype, [ring * BLOCKS, rows, DEPTH], _swizzled(2, programs))
    first_column = gl.program_id(0) * columns
    first = 0
    if programs > 1:
        place, gate = open_place(TILE * rows * 4)
        first = rank() * (pieces * BLOCKS)
    for s in gl.static_range(ring):
        mbarrier.init(w_full.index(s), count=1)
        mbarrier.init(x_full.index(s), count=1)
    fence_async_shared()
    barrier()
    for s in gl.static_range(ahead):
        _bring(weight_desc, [first + s * BLOCKS, 0, first_column, 0], w_smem, w_full, s, TILE)
    tl_cuda.gdc_wait()

    for s in gl.static_range(ahead):
        _bring(x_desc, [first + s * BLOCKS, 0, 0], x_smem, x_full, s, rows)
    acc = gl.zeros([height, rows], gl.float32, layout=products)
    for i in range(pieces):
        held = i % ring
        mbarrier.wait(w_full.index(held), (i // ring) & 1)
        mbarrier.wait(x_full.index(held), (i // ring) & 1)
        for b in gl.static_range(BLOCKS):
            block = held * BLOCKS + b
            acc = warpgroup_mma(
                w_blocks.index(block), x_blocks.index(block).permute((1, 0)), acc, is_async=True
            )
        acc = warpgroup_mma_wait(BLOCKS, deps=(acc,))
        if pieces > ring:
            coming = i + ring - 1
            if (i > 0) & (coming < pieces):
                barrier()  # the place of the piece before this one is free
                free = coming % ring
                at = first + coming * BLOCKS
                _bring(weight_desc, [at, 0, first_column, 0], w_smem, w_full, free, TILE)
                _bring(x_desc, [at, 0, 0], x_smem, x_full, free, rows)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    if programs > 1:
        # A program's columns, of a side, and where in its place another's sums of them lie.
        own: gl.constexpr = columns // programs
        part: gl.constexpr = TILE // programs * rows * 4
        line = gl.arange(0, height, layout=gl.SliceLayout(1, products)) % TILE
        row = gl.arange(0, rows, layout=gl.SliceLayout(0, products))
        to = line // columns * own + line % own
        address = place + rank() * part + (to[:, None] * rows + row[None, :]) * 4
        program, _ = gl.broadcast((line % columns // own)[:, None], address)
        meet()
        send(acc, address, program, gl.zeros_like(address) + gate)
        wait_for_all(gate)
        line = gl.arange(0, columns, layout=gl.SliceLayout(1, final)) % own
        row = gl.arange(0, rows, layout=gl.SliceLayout(0, final))
        address = place + (line[:, None] * rows + row[None, :]) * 4
        y = sum_of(address, programs, part)
        if gated:
            y = _silu_times(y, sum_of(address + own * rows * 4, programs, part), gate_scale)
    elif gated:
        paired: gl.constexpr = gl.BlockedLayout([2, 1, 2], [4, 8, 1], [1, 4, 1], [2, 0, 1])
        both = gl.permute(gl.reshape(acc, [2, columns, rows]), (1, 2, 0))
        a, b = gl.split(gl.convert_layout(both, paired))
        y = gl.convert_layout(_silu_times(a, b, gate_scale), final)
    else:
        y = gl.convert_layout(acc, final)
    column = first_column + gl.arange(0, columns, layout=gl.SliceLayout(1, final))[:, None]
    row = gl.arange(0, rows, layout=gl.SliceLayout(0, final))[None, :]
    mask = (column < n) & (row < m)
    if added:
        y += gl.load(add_ptr + row * add_stride + column, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + row * n + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_hopper_few_rows(
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    out: Tensor,
    cut: Cut,
    *,
    gated: bool,
    gate_scale: float,
) -> None:
    """x: [M, K]; out: [M, N]; arguments as of `small_product`; cut: as `cut_of` says."""
    m, k = x.shape
    n = out.shape[1]
    rows = max(8, triton.next_power_of_2(m))
    columns = _columns_of(gated)
    depth, sides = DEPTH.value, TILE.value // columns
    x_rows = TensorDescriptor(
        x,
        [k // depth, m, depth],
        [depth, x.stride(0), 1],
        [BLOCKS.value, rows, depth],
        _layout(3, cut.programs),
    )
    weight_rows = TensorDescriptor(
        weight,
        [k // depth, sides, n, depth],
        [depth, n * k, k, 1],
        [BLOCKS.value, sides, columns, depth],
        _layout(4, cut.programs),
    )
    _few_rows[(triton.cdiv(n, columns),)](
        x_rows,
        weight_rows,
        add,
        0 if add is None else add.stride(0),
        out,
        m,
        n,
        gate_scale,
        k=k,
        rows=rows,
        programs=cut.programs,
        stages=cut.stages,
        gated=gated,
        added=add is not None,
        num_warps=4,
        num_ctas=cut.programs,
        launch_pdl=True,
    )
