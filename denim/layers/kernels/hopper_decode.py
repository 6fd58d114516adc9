"""Attention of decode rows over pages on Hopper: one warp streams pages, one group of warps computes.

Owns the kernel. Decode is bound by the bytes of KV, so the loading warp never waits for anything but room in
its ring: it runs ahead of the computing warps, through the ends of units too. Products are turned around,
since a row has few queries: S = K qᵀ with keys as the 64 rows of wgmma, and O = Vᵀ p with the head's
dimensions as rows.

Rows are cut into units (row, split of its keys, KV head) by their own lengths only, which programs find on
the device, and splits of one row meet in a workspace: `denim.layers.kernels.split_keys`. Keys behind a row's
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
from denim.layers.kernels.split_keys import Cut, Workspace
from denim.recurrence.kernels.exponentials import LOG2_E
from denim.recurrence.kernels.program_barrier import barrier

KEYS = gl.constexpr(64)  # of a block: the height of wgmma
ROWS = 256  # rows that a program looks at together
RING_BYTES = 192 << 10  # of blocks on their way: the device's memory needs some 50 KiB a multiprocessor
MERGE_SPLITS = 8  # whose partial sums are on their way at one time
LOADER_REGISTERS = gl.constexpr(48)


@gluon.jit
def _splits_of_rows(
    kv_lens_ptr,
    num_rows,
    wave,
    kv_heads: gl.constexpr,
    least: gl.constexpr,
    most: gl.constexpr,
    max_rows: gl.constexpr,
    layout: gl.constexpr,
):
    """Row numbers, splits of each row, and splits of all rows up to it, it included."""
    n = gl.arange(0, max_rows, layout=layout)
    length = gl.load(kv_lens_ptr + n, mask=n < num_rows, other=0)
    split = split_of(length, 1, kv_heads, wave, least, most)
    splits = (length + split - 1) // split
    return n, splits, gl.associative_scan(splits, 0, add)


@gluon.jit
def _load_units(
    pages,
    barriers,
    lists,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    stages: gl.constexpr,
    least: gl.constexpr,
    most: gl.constexpr,
    max_rows: gl.constexpr,
):
    """Bring the pages of all of this program's units, as the ring becomes free. Behind a unit's last page it
    is brought again: every block is whole. The kernels before this one in the step write the row's last token
    and no other, so only its block waits for them."""
    kv_desc, k_smem, v_smem, page_ids_ptr, page_indptr_ptr, page_stride = pages
    k_full, v_full, free = barriers
    kv_lens_ptr, num_rows, wave = lists
    per_block: gl.constexpr = KEYS // page_size
    layout: gl.constexpr = gl.BlockedLayout([max_rows // 32], [32], [1], [0])
    n, splits, ends = _splits_of_rows(kv_lens_ptr, num_rows, wave, kv_heads, least, most, max_rows, layout)
    count = 0
    for work in range(gl.program_id(0), gl.sum(splits, 0) * kv_heads, gl.num_programs(0)):
        unit = work // kv_heads
        matrix = (kv_desc, (work % kv_heads) * dim, page_stride)
        row = gl.sum((ends <= unit).to(gl.int32), 0)
        length = gl.load(kv_lens_ptr + row)
        split = split_of(length, 1, kv_heads, wave, least, most)
        begin = (unit - gl.sum(gl.where(n < row, splits, 0), 0)) * split
        keys = gl.minimum(split, length - begin)
        table_ptr = page_ids_ptr + gl.load(page_indptr_ptr + row) + begin // page_size
        last_page = (keys + page_size - 1) // page_size - 1
        blocks = (keys + KEYS - 1) // KEYS
        for i in range(blocks):
            if i == blocks - 1 and begin + keys == length:
                tl_cuda.gdc_wait()
            s = count % stages
            at = (table_ptr, i * per_block, last_page)
            mbarrier.wait(free.index(s), ((count // stages) & 1) ^ 1)
            bring_block(matrix, at, k_full, k_smem, s, 0, page_size, KEYS, dim)
            bring_block(matrix, at, v_full, v_smem, s, page_size, page_size, KEYS, dim)
            count += 1


@gluon.jit
def _attend_units(
    tensors,
    barriers,
    lists,
    workspace,
    strides,
    scale,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    wide: gl.constexpr,
    dim: gl.constexpr,
    stages: gl.constexpr,
    least: gl.constexpr,
    most: gl.constexpr,
    max_rows: gl.constexpr,
    merge_splits: gl.constexpr,
    gated: gl.constexpr,
):
    q_ptr, gate_ptr, out_ptr, q_smem, p_smem, k_smem, v_smem = tensors
    k_full, v_full, free = barriers
    kv_lens_ptr, num_rows, wave = lists
    partial_ptr, stats_ptr, counters_ptr = workspace
    q_token_stride, q_head_stride, _, _, _, _ = strides
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    pieces: gl.constexpr = dim // COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([max_rows // 128], [32], [4], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    turned: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 16])  # [keys or dims, heads]
    of_heads: gl.constexpr = gl.SliceLayout(0, turned)
    merging: gl.constexpr = gl.BlockedLayout([1, dim // 32], [1, 32], [4, 1], [1, 0])  # a head a warp
    k_blocks = k_smem._reinterpret(dtype, [stages, KEYS, dim], shared)
    v_blocks = v_smem._reinterpret(dtype, [stages, KEYS, dim], shared)
    q = q_smem._reinterpret(dtype, [wide, dim], shared)

    tl_cuda.gdc_wait()
    n, splits_of_row, ends = _splits_of_rows(
        kv_lens_ptr, num_rows, wave, kv_heads, least, most, max_rows, layout
    )
    kept = gl.where(splits_of_row > 1, splits_of_row, 0)  # units with a place in the workspace
    count = 0
    for work in range(gl.program_id(0), gl.sum(splits_of_row, 0) * kv_heads, gl.num_programs(0)):
        unit = work // kv_heads
        kv_head = work % kv_heads
        row = gl.sum((ends <= unit).to(gl.int32), 0)
        which = unit - gl.sum(gl.where(n < row, splits_of_row, 0), 0)
        kept_before = gl.sum(gl.where(n < row, kept, 0), 0)
        length = gl.load(kv_lens_ptr + row)
        split = split_of(length, 1, kv_heads, wave, least, most)
        splits = (length + split - 1) // split
        keys = gl.minimum(split, length - which * split)
        token = row.to(gl.int64)

        h = gl.arange(0, wide, layout=gl.SliceLayout(1, plain))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, plain))
        q_at = token * q_token_stride + (kv_head * group + gl.minimum(h, group - 1)) * q_head_stride
        for c in gl.static_range(pieces):
            q_smem.index(c).store(gl.load(q_ptr + q_at[:, None] + c * COLUMNS + column[None, :]))
        fence_async_shared()

        top = gl.full([wide], float("-inf"), gl.float32, layout=of_heads)
        sums = gl.zeros([KEYS, wide], gl.float32, layout=turned)
        acc = gl.zeros([dim, wide], gl.float32, layout=turned)
        place = gl.arange(0, KEYS, layout=gl.SliceLayout(1, turned))
        for i in range((keys + KEYS - 1) // KEYS):
            s = count % stages
            turn = (count // stages) & 1
            left = keys - i * KEYS
            mbarrier.wait(k_full.index(s), turn)
            zero = gl.zeros([KEYS, wide], gl.float32, layout=turned)
            scores = warpgroup_mma(k_blocks.index(s), q.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where((place < left)[:, None], scores * scale, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            weights = gl.exp2(scores - new_top[None, :])
            fade = gl.exp2(top - new_top)
            top = new_top
            sums = sums * fade[None, :] + weights
            acc = acc * fade[None, :]
            p_smem.store(gl.permute(weights.to(dtype), (1, 0)))
            mbarrier.wait(v_full.index(s), turn)
            if left < KEYS:
                clear_behind(v_smem, s, left, KEYS, dim, dtype)
            fence_async_shared()
            acc = warpgroup_mma(v_blocks.index(s).permute((1, 0)), p_smem.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(s), count=1)
            count += 1
        total = gl.sum(sums, 0)

        d = gl.arange(0, dim, layout=gl.SliceLayout(1, turned))
        g = gl.arange(0, wide, layout=of_heads)
        inside = (d < dim)[:, None] & (g < group)[None, :]
        head = kv_head * group + g
        if splits == 1:
            out = acc / total[None, :]
            write((gate_ptr, out_ptr), strides, out, (token, head[None, :]), d[:, None], inside, gated)
        else:
            # Places in the workspace: one a unit, KV head and query head; the row's counter is at its first.
            first = kept_before * kv_heads + kv_head
            at = (first + which * kv_heads).to(gl.int64) * group + g
            gl.store(partial_ptr + at[None, :] * dim + d[:, None], acc, mask=inside)
            gl.store(stats_ptr + at * 2, top, mask=g < group)
            gl.store(stats_ptr + at * 2 + 1, total, mask=g < group)
            barrier()  # all warps' partial sums before one of them says that they are there
            arrived = gl.atomic_add(counters_ptr + first, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                barrier()
                gl.store(counters_ptr + first, 0)
                r = gl.arange(0, wide, layout=gl.SliceLayout(1, merging))
                e = gl.arange(0, dim, layout=gl.SliceLayout(0, merging))
                base = first.to(gl.int64) * group
                r_out = added_up(
                    (partial_ptr, stats_ptr),
                    base,
                    kv_heads * group,
                    splits,
                    r,
                    r < group,
                    wide,
                    dim,
                    merge_splits,
                    merging,
                )
                r_head = kv_head * group + r
                mask = (r < group)[:, None] & (e < dim)[None, :]
                write((gate_ptr, out_ptr), strides, r_out, (token, r_head[:, None]), e[None, :], mask, gated)


# A variant of the kernel for every length of a list or place in it would be compiled otherwise.
@gluon.jit(
    do_not_specialize=["num_rows", "wave"],
    do_not_specialize_on_alignment=["kv_lens_ptr", "page_ids_ptr", "page_indptr_ptr"],
)
def _decode(
    kv_desc,
    q_ptr,
    gate_ptr,
    out_ptr,
    kv_lens_ptr,
    page_ids_ptr,
    page_indptr_ptr,
    partial_ptr,
    stats_ptr,
    counters_ptr,
    num_rows,
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
    wide: gl.constexpr,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    stages: gl.constexpr,
    least: gl.constexpr,
    most: gl.constexpr,
    max_rows: gl.constexpr,
    merge_splits: gl.constexpr,
    gated: gl.constexpr,
):
    tl_cuda.gdc_launch_dependents()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    pieces: gl.constexpr = dim // COLUMNS
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring: gl.constexpr = [stages * pieces * (KEYS // page_size), page_size, COLUMNS]
    q_smem = gl.allocate_shared_memory(dtype, [pieces, wide, COLUMNS], shared)
    p_smem = gl.allocate_shared_memory(dtype, [wide, KEYS], shared)
    k_smem = gl.allocate_shared_memory(dtype, ring, shared)
    v_smem = gl.allocate_shared_memory(dtype, ring, shared)
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    tensors = (q_ptr, gate_ptr, out_ptr, q_smem, p_smem, k_smem, v_smem)
    barriers = (k_full, v_full, free)
    lists = (kv_lens_ptr, num_rows, wave)
    workspace = (partial_ptr, stats_ptr, counters_ptr)
    strides = (
        q_token_stride,
        q_head_stride,
        out_token_stride,
        out_head_stride,
        gate_token_stride,
        gate_head_stride,
    )
    pages = (kv_desc, k_smem, v_smem, page_ids_ptr, page_indptr_ptr, page_stride)
    gl.warp_specialize(
        [
            (
                _attend_units,
                (
                    tensors,
                    barriers,
                    lists,
                    workspace,
                    strides,
                    scale,
                    kv_heads,
                    group,
                    wide,
                    dim,
                    stages,
                    least,
                    most,
                    max_rows,
                    merge_splits,
                    gated,
                ),
            ),
            (_load_units, (pages, barriers, lists, kv_heads, dim, page_size, stages, least, most, max_rows)),
        ],
        [1],
        [LOADER_REGISTERS],
    )


def hopper_decode(
    q: Tensor,
    kv: Tensor,
    kv_lens: Tensor,
    page_ids: Tensor,
    page_indptr: Tensor,
    scale: float,
    workspace: Workspace,
    *,
    cut: Cut,
    programs: int,
    out: Tensor,
    gate: Tensor | None = None,
) -> None:
    """Attention of R rows of one token, each over its own pages; rows of length 0 are not written.

    q, gate: [R, heads, dim], heads dense; kv: a layer's view of all pages, see `hopper_pages.suits`. kv_lens
    [R], page_indptr [R + 1], page_ids: int32. out: [R, heads, dim]; gate: its sigmoid multiplies the result.
    The workspace has room for the units that are split. Products in q's dtype with fp32 sums, softmax in
    fp32.
    """
    rows, heads, dim = q.shape
    _, _, page_size, kv_heads, _ = kv.shape
    group = heads // kv_heads
    assert q.stride(2) == out.stride(2) == 1 and (gate is None or gate.stride(2) == 1)
    matrix, page_stride = page_rows(kv)
    gated = gate is not None
    gate = out if gate is None else gate
    _decode[(programs,)](
        matrix,
        q,
        gate,
        out,
        kv_lens,
        page_ids,
        page_indptr,
        *workspace,
        rows,
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
        wide=max(8, triton.next_power_of_2(group)),
        dim=dim,
        page_size=page_size,
        stages=RING_BYTES // (2 * KEYS.value * dim * 2),
        least=cut.least,
        most=cut.most,
        max_rows=max(ROWS, triton.next_power_of_2(rows)),
        merge_splits=MERGE_SPLITS,
        gated=gated,
        num_warps=4,
        launch_pdl=True,
    )
