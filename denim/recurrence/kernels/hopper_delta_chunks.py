"""The matrices inside the chunks of a gated delta rule on Hopper: gates, T, scores (`delta_walk`).

Owns the kernel; it makes what `gated_delta_chunks` makes elsewhere, for heads of 128, chunks of 64 tokens and
16-bit rows. A program takes one chunk of one head: TMA brings q and k while the gates are made, and every
product is one of 64 x 64 by wgmma. Five programs share a multiprocessor, so that one computes while another
waits. The inverse is `hopper_triangular`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import LOG2_E, softplus
from denim.recurrence.kernels.hopper_triangular import (
    BLOCK,
    BLOCKS,
    NEAR,
    SIZE,
    SQUARE,
    inverse_of_unit_lower,
    near_of,
)
from denim.recurrence.kernels.program_barrier import barrier

DIM = gl.constexpr(128)  # d_k and d_v


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize_on_alignment=TABLE)
def chunk_matrices(
    rows_desc,
    solve_desc,
    scores_desc,
    a_ptr,
    b_ptr,
    gate_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    since_ptr,
    strength_ptr,
    scale,
    beta_limit,
    least,
    heads: gl.constexpr,
    key_heads: gl.constexpr,
):
    """rows: [T, channels]; solve, scores: [chunks * heads * 64, 64], all three in tiles of 64 x 64; since,
    strength: e^{G_t} and beta_t e^{G_C - G_t}, [chunks, heads, 64]."""
    # The last chunks first: the walk begins with the first ones, which then are still in the cache.
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    chunk = place // heads
    head = place % heads
    if gl.load(chunks_ptr + chunk * 3) < 0:
        return
    first = gl.load(chunks_ptr + chunk * 3 + 1)
    count = gl.load(chunks_ptr + chunk * 3 + 2)

    dtype: gl.constexpr = rows_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp has all tokens
    k_smem = gl.allocate_shared_memory(dtype, [2, SIZE, 64], shared)
    q_smem = gl.allocate_shared_memory(dtype, [2, SIZE, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    barrier()
    key_head = head // (heads // key_heads)
    mbarrier.expect(full.index(0), 4 * SIZE * 64 * 2)
    for c in gl.static_range(2):
        column = key_head * DIM + c * 64
        tma.async_copy_global_to_shared(rows_desc, [first, column], full.index(0), q_smem.index(c))
        column = (key_heads + key_head) * DIM + c * 64
        tma.async_copy_global_to_shared(rows_desc, [first, column], full.index(0), k_smem.index(c))

    token = gl.arange(0, SIZE, layout=line)
    live = token < count
    at = (first.to(gl.int64) + token) * gate_stride + head
    a = gl.load(a_ptr + at, mask=live, other=0.0).to(gl.float32) + gl.load(dt_bias_ptr + head).to(gl.float32)
    b = gl.load(b_ptr + at, mask=live, other=0.0).to(gl.float32)
    log_decay = gl.maximum(-gl.exp(gl.load(a_log_ptr + head).to(gl.float32)) * softplus(a), least)
    log_decay = gl.where(live, log_decay * LOG2_E, 0.0)
    beta = gl.where(live, beta_limit / (1.0 + gl.exp(-b)), 0.0)
    since = gl.associative_scan(log_decay, 0, _add)
    until = gl.sum(log_decay, 0) - since
    at = place.to(gl.int64) * SIZE + token
    gl.store(since_ptr + at, gl.exp2(since))
    gl.store(strength_ptr + at, beta * gl.exp2(gl.minimum(until, 0.0)))
    since_row = gl.convert_layout(since, gl.SliceLayout(1, SQUARE))
    since_column = gl.convert_layout(since, gl.SliceLayout(0, SQUARE))
    beta_column = gl.convert_layout(beta, gl.SliceLayout(0, SQUARE))
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, SQUARE))[:, None]
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, SQUARE))[None, :]
    fade = gl.exp2(since_row[:, None] - since_column[None, :]) * beta_column[None, :]
    fade = gl.where(row >= column, fade, 0.0)

    mbarrier.wait(full.index(0), 0)
    if count < SIZE:  # what lies behind the chunk may be NaN, which products with zero do not undo
        n = gl.arange(0, SIZE, layout=gl.SliceLayout(1, plain))
        for c in gl.static_range(2):
            piece = k_smem.index(c)
            piece.store(gl.where((n < count)[:, None], piece.load(plain), 0.0))
        fence_async_shared()
        barrier()
    zero = gl.zeros([SIZE, SIZE], gl.float32, layout=SQUARE)
    k = k_smem._reinterpret(dtype, [1, SIZE, DIM], shared).index(0)
    q = q_smem._reinterpret(dtype, [1, SIZE, DIM], shared).index(0)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    barrier()  # all have read q, whose place is taken by what is made of it
    q_smem.index(0).store((scores * (fade * scale)).to(dtype))
    alike = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    alike = warpgroup_mma_wait(0, deps=(alike,))
    barrier()
    # Its diagonal is not 0: of the products only blocks beside the diagonal ones are taken.
    work = k_smem._reinterpret(gl.float16, [2, SIZE, SIZE], shared)
    work.index(0).store((alike * -fade).to(gl.float16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(scores_desc, [place * SIZE, 0], q_smem.index(0))
    of_block = gl.reshape(since, [BLOCKS, BLOCK])
    near_fade = gl.convert_layout(of_block, gl.SliceLayout(2, NEAR))[:, :, None]
    near_fade -= gl.convert_layout(of_block, gl.SliceLayout(1, NEAR))[:, None, :]
    inverse = inverse_of_unit_lower(near_of(alike) * gl.exp2(-gl.abs(near_fade)), beta, work)
    q_smem.index(1).store(inverse.to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(solve_desc, [place * SIZE, 0], q_smem.index(1))
    tma.store_wait(0)
