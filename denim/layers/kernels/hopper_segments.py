"""Attention of segments over pages on Hopper: one warp loads, two groups of warps compute.

Owns the kernel. FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), written in Gluon: TMA brings pages
into a ring of blocks; each group of four warps has 64 query rows, and adds the values of one block while the
scores of the next are made, so that softmax and products overlap. The query heads that share a KV head are
rows of one tile.

A program takes one unit, 128 rows of one span and KV head and a split of the keys that they see, and finds
out which from the spans' lengths on the device: `denim.layers.kernels.split_keys`. Keys behind a span's
length are never used, whatever lies there: scores are masked, values are set to zero.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda as tl_cuda

from denim.layers.kernels.hopper_pages import (
    COLUMNS,
    add,
    added_up,
    bring_block,
    clear_behind,
    page_rows,
    split_of,
    write,
)
from denim.layers.kernels.split_keys import Cut, Workspace, most_units
from denim.recurrence.kernels.exponentials import LOG2_E
from denim.recurrence.kernels.program_barrier import barrier

GROUP_ROWS = gl.constexpr(64)  # rows of one group of warps: the height of wgmma
ROWS = gl.constexpr(2 * GROUP_ROWS.value)
SPANS = 256  # spans that a program looks at together
# Keys of a block and blocks in the ring, by head size: what shared memory (227 KiB) and 240 registers hold.
BLOCKS = {64: (128, 3), 128: (128, 2), 256: (64, 2)}
# Rows and splits whose partial sums are added up at one time.
MERGE_ROWS, MERGE_SPLITS = gl.constexpr(32), gl.constexpr(2)
WORKER_REGISTERS, LOADER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def _load_blocks(
    pages,
    barriers,
    blocks,
    page_size: gl.constexpr,
    block_n: gl.constexpr,
    dim: gl.constexpr,
    stages: gl.constexpr,
):
    """Bring all blocks, keys before values, as the ring becomes free."""
    matrix, k_smem, v_smem, table_ptr, last_page = pages
    k_full, v_full, k_free, v_free = barriers
    per_block: gl.constexpr = block_n // page_size
    for i in range(blocks):
        s = i % stages
        turn = (i // stages) & 1
        at = (table_ptr, i * per_block, last_page)
        mbarrier.wait(k_free.index(s), turn ^ 1)
        bring_block(matrix, at, k_full, k_smem, s, 0, page_size, block_n, dim)
        mbarrier.wait(v_free.index(s), turn ^ 1)
        bring_block(matrix, at, v_full, v_smem, s, page_size, page_size, block_n, dim)


@gluon.jit
def _softmax(
    scores, top, total, start, limit, scale, masked: gl.constexpr, block_n: gl.constexpr, layout: gl.constexpr
):
    """Weights of a block's keys, and the running maximum, sum and what the values so far fade by."""
    if masked:
        keys = start + gl.arange(0, block_n, layout=gl.SliceLayout(0, layout))
        scores = gl.where(keys[None, :] < limit[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    shift = new_top
    if masked:
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    weights = gl.exp2(scores * scale - shift[:, None])
    fade = gl.exp2(top - shift)
    return weights, new_top, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def _next_block(
    i,
    q,
    rings,
    barriers,
    state,
    limit,
    scale,
    masked: gl.constexpr,
    block_n: gl.constexpr,
    stages: gl.constexpr,
    s_layout: gl.constexpr,
    o_layout: gl.constexpr,
    w_layout: gl.constexpr,
):
    """Weights of block i, while the values of block i - 1 are added."""
    k_blocks, v_blocks = rings
    k_full, v_full, k_free, v_free = barriers
    acc, weights, top, total = state
    s = i % stages
    b = (i - 1) % stages
    mbarrier.wait(k_full.index(s), (i // stages) & 1)
    zero = gl.zeros([GROUP_ROWS, block_n], gl.float32, layout=s_layout)
    scores = warpgroup_mma(q, k_blocks.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(b), ((i - 1) // stages) & 1)
    acc = warpgroup_mma(weights, v_blocks.index(b), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(s), count=1)
    p, top, total, fade = _softmax(scores, top, total, i * block_n, limit, scale, masked, block_n, s_layout)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(b), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, o_layout))[:, None]
    return acc, gl.convert_layout(p.to(q.dtype), w_layout), top, total


@gluon.jit
def _attend(
    part: gl.constexpr,
    tensors,
    barriers,
    workspace,
    where,
    strides,
    scale,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    block_n: gl.constexpr,
    stages: gl.constexpr,
    gated: gl.constexpr,
):
    """One group of warps, with rows part · 64 .. of the tile."""
    q_ptr, gate_ptr, out_ptr, q_smem, k_smem, v_smem = tensors
    k_full, v_full, k_free, _ = barriers
    partial_ptr, stats_ptr, counters_ptr = workspace
    begin, tokens, tile, limit_of_0, kv_head, blocks, whole, keys, first_place, which, splits = where
    q_token_stride, q_head_stride, _, _, _, _ = strides
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    pieces: gl.constexpr = dim // COLUMNS
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    k_blocks = k_smem._reinterpret(dtype, [stages, block_n, dim], shared)
    v_blocks = v_smem._reinterpret(dtype, [stages, block_n, dim], shared)
    q = q_smem._reinterpret(dtype, [2, GROUP_ROWS, dim], shared).index(part)

    first = tile * ROWS + part * GROUP_ROWS
    rows = first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, plain))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, plain))
    token = (begin + gl.minimum(rows // group, tokens - 1)).to(gl.int64)
    q_at = token * q_token_stride + (kv_head * group + rows % group) * q_head_stride
    for c in gl.static_range(pieces):
        q_smem.index(part * pieces + c).store(gl.load(q_ptr + q_at[:, None] + c * COLUMNS + column[None, :]))
    fence_async_shared()

    m = first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    limit = limit_of_0 + gl.minimum(m // group, tokens - 1)
    top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, s_layout))
    acc = gl.zeros([GROUP_ROWS, dim], gl.float32, layout=o_layout)

    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([GROUP_ROWS, block_n], gl.float32, layout=s_layout)
    scores = warpgroup_mma(q, k_blocks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0), count=1)
    p, top, total, _ = _softmax(scores, top, total, 0, limit, scale, True, block_n, s_layout)
    weights = gl.convert_layout(p.to(dtype), w_layout)
    state = (acc, weights, top, total)
    rings = (k_blocks, v_blocks)
    for i in range(1, whole):
        state = _next_block(
            i, q, rings, barriers, state, limit, scale, False, block_n, stages, s_layout, o_layout, w_layout
        )
    for i in range(gl.maximum(whole, 1), blocks):
        state = _next_block(
            i, q, rings, barriers, state, limit, scale, True, block_n, stages, s_layout, o_layout, w_layout
        )
    acc, weights, top, total = state

    b = (blocks - 1) % stages
    mbarrier.wait(v_full.index(b), ((blocks - 1) // stages) & 1)
    left = keys - (blocks - 1) * block_n
    if left < block_n:
        clear_behind(v_smem, b, left, block_n, dim, dtype)
        fence_async_shared()
    acc = warpgroup_mma(weights, v_blocks.index(b), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    strips = (gate_ptr, out_ptr)
    local = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, dim, layout=gl.SliceLayout(0, o_layout))
    left = tokens * group - first  # rows of this group of warps that exist
    if splits == 1:
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        row = first + local
        here = (begin + row // group)[:, None], (kv_head * group + row % group)[:, None]
        write(strips, strides, acc, here, d[None, :], (local < left)[:, None] & (d < dim)[None, :], gated)
    elif left > 0:
        # Places in the workspace: one a unit and KV head; a counter for each group of warps at the tile's
        # first.
        place = (first_place + which * kv_heads).to(gl.int64) * ROWS + part * GROUP_ROWS
        kept = (local < left)[:, None] & (d < dim)[None, :]
        gl.store(partial_ptr + (place + local)[:, None] * dim + d[None, :], acc, mask=kept)
        n = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
        gl.store(stats_ptr + (place + n) * 2, top, mask=n < left)
        gl.store(stats_ptr + (place + n) * 2 + 1, total, mask=n < left)
        barrier()  # all warps' partial sums before one of them says that they are there
        counter_ptr = counters_ptr + first_place * 2 + part
        arrived = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            barrier()
            gl.store(counter_ptr, 0)
            merging: gl.constexpr = gl.BlockedLayout([1, dim // 32], [1, 32], [4, 1], [1, 0])
            base = first_place.to(gl.int64) * ROWS + part * GROUP_ROWS
            e = gl.arange(0, dim, layout=gl.SliceLayout(0, merging))
            for r0 in range(0, gl.minimum(left, GROUP_ROWS), MERGE_ROWS):
                r = r0 + gl.arange(0, MERGE_ROWS, layout=gl.SliceLayout(1, merging))
                result = added_up(
                    (partial_ptr, stats_ptr),
                    base,
                    kv_heads * ROWS,
                    splits,
                    r,
                    r < left,
                    MERGE_ROWS,
                    dim,
                    MERGE_SPLITS,
                    merging,
                )
                row = first + r
                here = (begin + row // group)[:, None], (kv_head * group + row % group)[:, None]
                mask = (r < left)[:, None] & (e < dim)[None, :]
                write(strips, strides, result, here, e[None, :], mask, gated)


# A variant of the kernel for every length of a list or place in it would be compiled otherwise.
@gluon.jit(
    do_not_specialize=["num_spans", "wave"],
    do_not_specialize_on_alignment=["q_indptr_ptr", "kv_lens_ptr", "page_ids_ptr", "page_indptr_ptr"],
)
def _segments(
    kv_desc,
    q_ptr,
    gate_ptr,
    out_ptr,
    q_indptr_ptr,
    kv_lens_ptr,
    page_ids_ptr,
    page_indptr_ptr,
    partial_ptr,
    stats_ptr,
    counters_ptr,
    num_spans,
    wave,
    scale,
    page_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    gate_token_stride,
    gate_head_stride,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    block_n: gl.constexpr,
    stages: gl.constexpr,
    least: gl.constexpr,
    most: gl.constexpr,
    max_spans: gl.constexpr,
    gated: gl.constexpr,
):
    tl_cuda.gdc_launch_dependents()
    tl_cuda.gdc_wait()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    pieces: gl.constexpr = dim // COLUMNS
    per_block: gl.constexpr = block_n // page_size
    spread: gl.constexpr = gl.BlockedLayout([max_spans // 128], [32], [4], [0])
    n = gl.arange(0, max_spans, layout=spread)
    there = n < num_spans
    q_end = gl.load(q_indptr_ptr + n + 1, mask=there, other=0)
    own = q_end - gl.load(q_indptr_ptr + n, mask=there, other=0)
    lengths = gl.load(kv_lens_ptr + n, mask=there, other=0)
    tiles = gl.where(lengths > 0, (own * group + ROWS - 1) // ROWS, 0)
    wave = gl.maximum(wave // gl.maximum(gl.sum((tiles > 0).to(gl.int32), 0), 1), 1)  # of each span
    split = split_of(lengths, tiles, kv_heads, wave, least, most)
    splits_of_row = (lengths + split - 1) // split
    units = tiles * splits_of_row
    kept = gl.where(splits_of_row > 1, units, 0)  # units with a place in the workspace
    ends = gl.associative_scan(units, 0, add)
    # The last units come first: they have the most keys, and the short ones fill the gaps.
    unit = gl.sum(units, 0) - 1 - gl.program_id(0) // kv_heads
    kv_head = gl.program_id(0) % kv_heads
    if unit < 0:
        return
    row = gl.sum((ends <= unit).to(gl.int32), 0)
    unit_in_row = unit - gl.sum(gl.where(n < row, units, 0), 0)
    kept_before = gl.sum(gl.where(n < row, kept, 0), 0)
    begin = gl.load(q_indptr_ptr + row)
    tokens = gl.load(q_indptr_ptr + row + 1) - begin
    length = gl.load(kv_lens_ptr + row)
    row_split = split_of(length, (tokens * group + ROWS - 1) // ROWS, kv_heads, wave, least, most)
    row_splits = (length + row_split - 1) // row_split
    tile = unit_in_row // row_splits
    which = unit_in_row % row_splits
    # Keys that the tile sees, and in how many splits. From here on keys count from the split's first.
    visible = length - tokens + gl.minimum((tile * ROWS + ROWS - 1) // group, tokens - 1) + 1
    splits = (visible + row_split - 1) // row_split
    if which >= splits:
        return
    origin = which * row_split
    keys = gl.minimum(row_split, visible - origin)
    limit_of_0 = length - tokens + 1 - origin  # keys that the span's first token sees
    # Keys that each of the tile's rows sees, in whole blocks.
    whole = gl.minimum(gl.maximum(limit_of_0 + tile * ROWS // group, 0), keys) // block_n
    blocks = (keys + block_n - 1) // block_n
    table_ptr = page_ids_ptr + gl.load(page_indptr_ptr + row) + origin // page_size
    last_page = (keys + page_size - 1) // page_size - 1
    first_place = (kept_before + unit_in_row - which) * kv_heads + kv_head

    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring: gl.constexpr = [stages * pieces * per_block, page_size, COLUMNS]
    q_smem = gl.allocate_shared_memory(dtype, [2 * pieces, GROUP_ROWS, COLUMNS], shared)
    k_smem = gl.allocate_shared_memory(dtype, ring, shared)
    v_smem = gl.allocate_shared_memory(dtype, ring, shared)
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    tensors = (q_ptr, gate_ptr, out_ptr, q_smem, k_smem, v_smem)
    barriers = (k_full, v_full, k_free, v_free)
    workspace = (partial_ptr, stats_ptr, counters_ptr)
    where = (begin, tokens, tile, limit_of_0, kv_head, blocks, whole, keys, first_place, which, splits)
    strides = (
        q_token_stride,
        q_head_stride,
        out_token_stride,
        out_head_stride,
        gate_token_stride,
        gate_head_stride,
    )
    pages = ((kv_desc, kv_head * dim, page_stride), k_smem, v_smem, table_ptr, last_page)
    # fmt: off
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, tensors, barriers, workspace, where, strides, scale, kv_heads, group, dim, block_n,
                    stages, gated,
                ),
            ),
            (
                _attend,
                (
                    1, tensors, barriers, workspace, where, strides, scale, kv_heads, group, dim, block_n,
                    stages, gated,
                ),
            ),
            (_load_blocks, (pages, barriers, blocks, page_size, block_n, dim, stages)),
        ],
        [4, 1],
        [WORKER_REGISTERS, LOADER_REGISTERS],
    )
    # fmt: on


def hopper_segments(
    q: Tensor,
    kv: Tensor,
    q_indptr: Tensor,
    kv_lens: Tensor,
    page_ids: Tensor,
    page_indptr: Tensor,
    scale: float,
    workspace: Workspace,
    *,
    tokens: int,
    cut: Cut,
    out: Tensor,
    gate: Tensor | None = None,
) -> None:
    """Causal attention of N spans with at most `tokens` tokens together, each over its own pages; their rows
    of `out` are written, no others.

    q, gate: [T, heads, dim], heads dense; kv: a layer's view of all pages, see `hopper_pages.suits`. q_indptr
    [N + 1], page_indptr [N + 1], kv_lens [N], page_ids: int32; the offsets may begin anywhere. out: [T,
    heads, dim]; gate: its sigmoid multiplies the result. The workspace has room for the units that are split.
    Products in q's dtype with fp32 sums, softmax in fp32.
    """
    heads, dim = q.shape[1:]
    _, _, page_size, kv_heads, _ = kv.shape
    group, spans = heads // kv_heads, len(kv_lens)
    assert q.stride(2) == out.stride(2) == 1 and (gate is None or gate.stride(2) == 1)
    block_n, stages = BLOCKS[dim]
    rows, page_stride = page_rows(kv)
    gated = gate is not None
    gate = out if gate is None else gate
    _segments[(most_units(spans, tokens, group, kv_heads, ROWS.value, cut),)](
        rows,
        q,
        gate,
        out,
        q_indptr,
        kv_lens,
        page_ids,
        page_indptr,
        *workspace,
        spans,
        cut.wave,
        scale * LOG2_E.value,
        page_stride,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        gate.stride(0),
        gate.stride(1),
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        page_size=page_size,
        block_n=block_n,
        stages=stages,
        least=cut.least,
        most=cut.most,
        max_spans=max(SPANS, triton.next_power_of_2(spans)),
        gated=gated,
        num_warps=4,
        launch_pdl=True,
    )
