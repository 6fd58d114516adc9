"""Inside the chunks of KDA on Hopper, in one kernel: gates, faded keys and queries, T, scores.

Owns the kernel; it makes what `_fade`, `faded_products` and `_solve` make elsewhere (`kimi_delta_chunks`),
for heads of 128, chunks of 64 tokens and 16-bit rows, and what passes between those stays in one place.

Pairs of tokens are parted by halving, as `denim.recurrence.decay` says: at level l by the middle of a block
of 2^{l+1} tokens, and each lies on its side of it, one as a row, one as a key. With P the sum of log-decays
from the start of the token's own half through it, and T that of the whole half, its factor is e^P behind the
middle and e^{T - P} before it: no exponent is above 0, but for a rounding of T - P. One product of all tokens
with all gives the pairs of a level, the rest is left out. P and T of the next level come from a sum over the
two halves: inside a warp up to blocks of 16 tokens, by way of shared memory for the last two levels.

Up to blocks of 16 tokens a warp multiplies its own block from registers. Of the last two levels all rows meet
the keys of half of the tokens, those that lie before a middle; what is no pair is left out at the end.

A part of the channels goes at a time, so that sums and products stay in registers. On their way to the tensor
cores, which add over channels in any order, channels are renamed: so a thread may load and store 8 of them
side by side, and nothing passes between threads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.decay import MIN_LOG_DECAY
from denim.recurrence.kernels import hopper_delta
from denim.recurrence.kernels.delta_pass import ChunkTerms
from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import LOG2_E, SOFTPLUS_LINEAR
from denim.recurrence.kernels.hopper_delta_chunks import DIM
from denim.recurrence.kernels.hopper_triangular import (
    BLOCK,
    BLOCKS,
    NEAR,
    NEAR_LEFT,
    SIZE,
    SQUARE,
    inverse_of_unit_lower,
    matrix,
    near_places,
    on_diagonal,
    turned,
    where_equal,
)
from denim.recurrence.kernels.program_barrier import barrier

PART, PARTS = gl.constexpr(32), gl.constexpr(4)  # channels at a time, and how often
# Of [64, 32], as wgmma leaves it.
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# Below it log(1 + e) is nearer by its series than by the logarithm of a sum that has lost so much of e.
SERIES = gl.constexpr(0.015625)


@gluon.jit
def _log2(x):
    """As the device has it; `gl.log2` spends 24 more instructions on the last bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _log_decay(f, rate, floor, least):
    """-rate softplus(f), or floor sigmoid(rate f); at least `least`, base 2."""
    if floor is not None:
        decay = floor * LOG2_E / (1.0 + gl.exp2(f * (-rate * LOG2_E)))
    else:
        e = gl.exp2(gl.minimum(f, SOFTPLUS_LINEAR) * LOG2_E)
        series = e * (1.0 - e * (0.5 - e * (0.3333333333 - 0.25 * e))) * LOG2_E
        decay = gl.where(e < SERIES, series, _log2(1.0 + e))
        decay = -rate * gl.where(f > SOFTPLUS_LINEAR, f * LOG2_E, decay)
    return gl.maximum(decay, least * LOG2_E)


@gluon.jit
def _renamed(x):
    """[64, 32] with the channels that a thread has side by side where a left operand has them."""
    x = gl.permute(gl.reshape(x, [SIZE, 4, 2, 2, 2]), (0, 2, 3, 1, 4))
    return gl.reshape(x, [SIZE, PART])


@gluon.jit
def _over_pairs(x, level: gl.constexpr, wide: gl.constexpr):
    """[64, 32]: sums of each token and the one as far in the other half of its block of 2^{level+1}."""
    halves = gl.reshape(x, [SIZE >> (level + 1), 2, 1 << level, PART])
    total = gl.expand_dims(gl.sum(halves, 1), 1)
    total, _ = gl.broadcast(total, halves)
    return gl.convert_layout(gl.reshape(total, [SIZE, PART]), wide)


@gluon.jit
def _faded(k, q, exponent):
    """Keys and queries times 2^exponent, their channels renamed; of length 1 at most, which fp16 holds."""
    factor = gl.exp2(exponent)
    keys = _renamed((k.to(gl.float32) * factor).to(gl.float16))
    return keys, _renamed((q.to(gl.float32) * factor).to(gl.float16))


@gluon.jit
def _side_by_side(a, b, count: gl.constexpr):
    """[a | b], `count` columns."""
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [SIZE, count])


@gluon.jit
def _assembled(beside, across):
    """The pairs of the last two levels [64, 64], zeros elsewhere. beside: [64, 32], of all tokens with those
    of blocks 0 and 2, for level 4; across: of all with those of blocks 0 and 1, for level 5."""
    first, third = gl.split(gl.permute(gl.reshape(beside, [SIZE, 2, BLOCK]), (0, 2, 1)))
    narrow: gl.constexpr = first.type.layout
    block = (gl.arange(0, SIZE, layout=gl.SliceLayout(1, narrow)) // BLOCK)[:, None]
    none = gl.zeros([SIZE, BLOCK], gl.float32, layout=narrow)
    left = gl.convert_layout(_side_by_side(gl.where(block == 1, first, 0.0), none, SIZE // 2), HALF)
    right = gl.convert_layout(_side_by_side(gl.where(block == 3, third, 0.0), none, SIZE // 2), HALF)
    block = (gl.arange(0, SIZE, layout=gl.SliceLayout(1, HALF)) // BLOCK)[:, None]
    left = gl.where(block > 1, across, left)
    return gl.convert_layout(_side_by_side(left, right, SIZE), SQUARE)


@gluon.jit(do_not_specialize_on_alignment=TABLE)
def _chunk_matrices(
    rows_ptr,
    row_stride,
    f_ptr,
    f_stride,
    b_ptr,
    b_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    keys_ptr,
    queries_ptr,
    later_ptr,
    strength_ptr,
    left_ptr,
    solve_desc,
    scores_desc,
    scale,
    floor,
    least,
    heads: gl.constexpr,
):
    """rows: [T, channels]; f: [T, H · 128]; b: [T, H]; keys, queries, later: [chunks, H, 64, 128];
    strength: beta, [chunks, H, 64]; left: [chunks, H, 128]; solve, scores: [chunks * H * 64, 64] in
    tiles of 64 x 64."""
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    chunk = place // heads
    head = place % heads
    if gl.load(chunks_ptr + chunk * 3) < 0:
        return
    first = gl.load(chunks_ptr + chunk * 3 + 1).to(gl.int64)
    count = gl.load(chunks_ptr + chunk * 3 + 2)

    dtype: gl.constexpr = rows_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    left: gl.constexpr = gl.DotOperandLayout(0, HALF, 2)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp has all tokens
    # 8 channels side by side for a thread, of the tokens that the products want of it.
    wide: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, PART],
    )
    along: gl.constexpr = gl.SliceLayout(0, wide)
    narrow: gl.constexpr = gl.NVMMASharedLayout(PART * 2, 16, 2)
    staged = gl.allocate_shared_memory(
        dtype, [3 * PARTS, SIZE, PART], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    )
    tiles = gl.allocate_shared_memory(gl.float16, [2, SIZE, PART], narrow)
    made = gl.allocate_shared_memory(dtype, [2, SIZE, SIZE], shared)
    work = gl.allocate_shared_memory(gl.float16, [2, SIZE, SIZE], shared)
    totals = gl.allocate_shared_memory(gl.float32, [PARTS, BLOCKS, PART], flat)
    line_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    blocks = totals._reinterpret(gl.float32, [PARTS * BLOCKS, PART], line_of)

    token = gl.arange(0, SIZE, layout=gl.SliceLayout(1, wide))[:, None]
    lane = gl.arange(0, PART, layout=gl.SliceLayout(0, wide))[None, :]
    near_row, near_column = near_places()
    rate = gl.exp(gl.load(a_log_ptr + head))
    # Of the diagonal blocks of 16 tokens: keys with keys, and queries with keys.
    near = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, layout=NEAR)
    near_scores = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, layout=NEAR)
    # Of the others, see `_assembled`.
    beside_keys = gl.zeros([SIZE, SIZE // 2], gl.float32, layout=HALF)
    beside_scores = gl.zeros([SIZE, SIZE // 2], gl.float32, layout=HALF)
    across_keys = gl.zeros([SIZE, SIZE // 2], gl.float32, layout=HALF)
    across_scores = gl.zeros([SIZE, SIZE // 2], gl.float32, layout=HALF)
    own = gl.zeros([SIZE], gl.float32, layout=gl.SliceLayout(1, wide))
    live = (token < count) & (lane >= 0)
    for part in gl.static_range(PARTS):
        channel = head * DIM + part * PART + lane
        source = rows_ptr + first * row_stride + (token * row_stride + channel)
        at = f_ptr + first * f_stride + (token * f_stride + channel)
        async_copy.async_copy_global_to_shared(staged.index(part), at, mask=live)
        async_copy.async_copy_global_to_shared(staged.index(PARTS + part), source + heads * DIM, mask=live)
        async_copy.async_copy_global_to_shared(staged.index(2 * PARTS + part), source, mask=live)
    async_copy.commit_group()
    async_copy.wait_group(0)
    for part in range(PARTS):
        channel = head * DIM + part * PART + lane
        f = staged.index(part).load(wide)
        k = staged.index(PARTS + part).load(wide)
        q = staged.index(2 * PARTS + part).load(wide)
        f = f.to(gl.float32) + gl.load(dt_bias_ptr + channel)
        log_decay = gl.where(live, _log_decay(f, rate, floor, least), 0.0)
        own += gl.sum(q.to(gl.float32) * k.to(gl.float32), 1)
        through = log_decay
        total = log_decay
        for level in gl.static_range(0, 6):
            if level < 4:
                behind = ((token >> level) & 1) == 1
                exponent = gl.where(behind, through, total - through)
                pairs = _over_pairs(total, level, wide)
                through += behind.to(gl.float32) * (pairs - total)
                total = pairs
            elif level == 4:
                behind = ((token >> 4) & 1) == 1
                exponent = gl.where(behind, through, total - through)
                totals.index(part).store(gl.sum(gl.reshape(log_decay, [BLOCKS, BLOCK, PART]), 1))
                barrier()
                t0 = blocks.index(part * BLOCKS).load(along)[None, :]
                t1 = blocks.index(part * BLOCKS + 1).load(along)[None, :]
                t2 = blocks.index(part * BLOCKS + 2).load(along)[None, :]
                t3 = blocks.index(part * BLOCKS + 3).load(along)[None, :]
                through += gl.where(behind, gl.where(token < 32, t0, t2), 0.0)
                total = gl.where(token < 32, t0 + t1, t2 + t3)
            else:
                exponent = gl.where(token >= 32, through, total - through)
                through += gl.where(token >= 32, t0 + t1, 0.0)
            keys, queries = _faded(k, q, exponent)
            if level < 4:
                keys = gl.convert_layout(gl.reshape(keys, [BLOCKS, BLOCK, PART]), NEAR_LEFT)
                queries = gl.convert_layout(gl.reshape(queries, [BLOCKS, BLOCK, PART]), NEAR_LEFT)
                none = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, layout=NEAR)
                kk = mma_v2(keys, turned(keys), none)
                qk = mma_v2(queries, turned(keys), none)
                near += where_equal((near_row >> level) ^ 1, near_column >> level, kk)
                near_scores += where_equal((near_row >> level) ^ 1, near_column >> level, qk)
            else:
                tile = tiles.index(level % 2)
                if level == 4:  # even blocks first
                    evens = gl.permute(gl.reshape(keys, [2, 2, BLOCK, PART]), (1, 0, 2, 3))
                    tile.store(gl.reshape(evens, [SIZE, PART]))
                else:
                    tile.store(keys)
                fence_async_shared()
                barrier()
                others = tile.slice(0, SIZE // 2).permute((1, 0))
                keys = gl.convert_layout(keys, left)
                queries = gl.convert_layout(queries, left)
                if level == 4:
                    beside_keys = warpgroup_mma(keys, others, beside_keys, is_async=True)
                    beside_scores = warpgroup_mma(queries, others, beside_scores, is_async=True)
                    beside_keys, beside_scores = warpgroup_mma_wait(0, deps=(beside_keys, beside_scores))
                else:
                    across_keys = warpgroup_mma(keys, others, across_keys, is_async=True)
                    across_scores = warpgroup_mma(queries, others, across_scores, is_async=True)
                    across_keys, across_scores = warpgroup_mma_wait(0, deps=(across_keys, across_scores))
        end = t0 + t1 + t2 + t3
        since = gl.exp2(through)
        until = gl.exp2(gl.minimum(end - through, 0.0))
        target = place.to(gl.int64) * (SIZE * DIM) + (token * DIM + part * PART + lane)
        k = k.to(gl.float32)
        gl.store(keys_ptr + target, (k * since).to(dtype))
        gl.store(queries_ptr + target, (q.to(gl.float32) * since).to(dtype))
        gl.store(later_ptr + target, (k * until).to(dtype))
        gl.store(left_ptr + place.to(gl.int64) * DIM + part * PART + lane, gl.exp2(end))

    own = gl.convert_layout(gl.reshape(own, [BLOCKS, BLOCK]), gl.SliceLayout(2, NEAR))[:, :, None]
    near_scores = gl.where(near_row == near_column, own, gl.where(near_row > near_column, near_scores, 0.0))
    scores = _assembled(beside_scores, across_scores) + on_diagonal(near_scores)
    n = gl.arange(0, SIZE, layout=line)
    there = n < count
    b = gl.load(b_ptr + (first + n) * b_stride + head, mask=there, other=0.0).to(gl.float32)
    beta = gl.where(there, 1.0 / (1.0 + gl.exp(-b)), 0.0)
    gl.store(strength_ptr + place.to(gl.int64) * SIZE + n, beta)
    beta_column = gl.convert_layout(beta, gl.SliceLayout(0, SQUARE))[None, :]
    made.index(0).store((scores * (beta_column * scale)).to(dtype))
    work.index(0).store((_assembled(beside_keys, across_keys) * -beta_column).to(gl.float16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(scores_desc, [place * SIZE, 0], made.index(0))
    inverse = inverse_of_unit_lower(near, beta, work)
    made.index(1).store(inverse.to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(solve_desc, [place * SIZE, 0], made.index(1))
    tma.store_wait(0)


def suits(rows: Tensor, f: Tensor, table: ChunkTable, state: Tensor) -> bool:
    """Whether the kernel takes rows [T, channels], the decay's projection f [T, H · d_k] and these states."""
    # Rows are copied in pieces of 16 bytes, which the compiler allows for strides that are multiples of 16.
    alike = f.dtype == rows.dtype and f.data_ptr() % 16 == 0 and f.stride(0) % 16 == rows.stride(0) % 16 == 0
    return alike and hopper_delta.suits(rows, table, state)


def kimi_chunk_terms(
    rows: Tensor,
    b: Tensor,
    f: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    heads: int,
    decay_floor: float | None,
    scale: float,
) -> ChunkTerms:
    """What `delta_pass` takes of KDA's chunks; arguments as of `kimi_delta_chunks.chunk_terms`, for calls
    that `suits`."""
    chunks = len(table.chunks)
    like = {"dtype": rows.dtype, "device": rows.device}
    solve, scores = torch.empty(2, chunks, heads, SIZE.value, SIZE.value, **like)
    keys, queries, later = torch.empty(3, chunks, heads, SIZE.value, DIM.value, **like)
    strength = torch.empty(chunks, heads, SIZE.value, dtype=torch.float32, device=rows.device)
    left = torch.empty(chunks, heads, DIM.value, dtype=torch.float32, device=rows.device)
    _chunk_matrices[(chunks * heads,)](
        rows,
        rows.stride(0),
        f,
        f.stride(0),
        b,
        b.stride(0),
        a_log,
        dt_bias,
        table.chunks,
        keys,
        queries,
        later,
        strength,
        left,
        matrix(solve.view(-1, SIZE.value)),
        matrix(scores.view(-1, SIZE.value)),
        scale,
        decay_floor,
        MIN_LOG_DECAY[torch.float32],
        heads=heads,
        num_warps=4,
    )
    return ChunkTerms(solve, scores, keys, queries, later, None, strength, left)
