"""The walk over the chunks of a gated delta rule on Hopper: two groups of warps walk, two warps fetch.

Owns the kernel; it does what `delta_walk` does elsewhere, by the same formulas, for heads of 128, chunks of
64 tokens and 16-bit rows. A program has one head of one segment of a sequence. One warp brings q, k, v, T and
the scores by TMA into a ring of chunks, one brings decays and strengths, and two groups of four warps have 64
rows of the state each. The products of a chunk stand in one line, from the state before it to the state
behind it; what the outputs need beside that runs while the line waits.

What lies behind the tokens of a chunk that is not full may be anything; k and v are cleared there.
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
from denim.recurrence.kernels.hopper_delta_chunks import DIM
from denim.recurrence.kernels.hopper_triangular import SIZE
from denim.recurrence.kernels.program_barrier import barrier

ROWS = gl.constexpr(64)  # of the state for a group of warps
VECTORS = gl.constexpr(3)  # of a chunk: e^{G_t}, beta_t e^{G_C - G_t}, e^{G_C}
WALK_REGISTERS, FETCH_REGISTERS = gl.constexpr(232), gl.constexpr(40)


@gluon.jit
def _next(s, turn, stages: gl.constexpr):
    """The place behind s in the ring, and how often it came round, modulo 2."""
    s += 1
    turn = gl.where(s == stages, turn ^ 1, turn)
    return gl.where(s == stages, 0, s), turn


@gluon.jit
def _bring(
    descriptors,
    rings,
    full,
    free,
    where,
    columns,
    head,
    of_map,
    heads: gl.constexpr,
    stages: gl.constexpr,
    outputs: gl.constexpr,
):
    """Bring each chunk's tiles as the ring becomes free; P takes no values."""
    rows_desc, solve_desc, scores_desc = descriptors
    chunks_ptr, begin, end = where
    q_column, k_column, v_column = columns
    q_smem, k_smem, v_smem, t_smem, m_smem = rings
    tile: gl.constexpr = SIZE * 64 * 2
    first = gl.load(chunks_ptr + begin * 3 + 1)
    s = 0
    turn = 0
    for chunk in range(begin, end):
        count = gl.load(chunks_ptr + chunk * 3 + 2)
        mbarrier.wait(free.index(s), turn ^ 1)
        if outputs:
            mbarrier.expect(full.index(s), 8 * tile)
        else:
            mbarrier.expect(full.index(s), 5 * tile, pred=of_map == 0)
            mbarrier.expect(full.index(s), 3 * tile, pred=of_map)
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(
                rows_desc, [first, k_column + c * 64], full.index(s), k_smem.index(s * 2 + c)
            )
        if outputs:
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    rows_desc, [first, q_column + c * 64], full.index(s), q_smem.index(s * 2 + c)
                )
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(
                rows_desc,
                [first, v_column + c * 64],
                full.index(s),
                v_smem.index(s * 2 + c),
                pred=of_map == 0,
            )
        square = (chunk * heads + head) * SIZE
        tma.async_copy_global_to_shared(solve_desc, [square, 0], full.index(s), t_smem.index(s))
        if outputs:
            tma.async_copy_global_to_shared(scores_desc, [square, 0], full.index(s), m_smem.index(s))
        first += count
        s, turn = _next(s, turn, stages)


@gluon.jit
def _decays(vectors, full, free, where, pointers, head, heads: gl.constexpr, stages: gl.constexpr):
    """Bring each chunk's decays and strengths, asked for a chunk ahead."""
    _, begin, end = where
    since_ptr, strength_ptr = pointers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    token = gl.arange(0, SIZE, layout=layout)
    at = (begin.to(gl.int64) * heads + head) * SIZE + token
    since = gl.load(since_ptr + at)
    strength = gl.load(strength_ptr + at)
    whole = gl.load(since_ptr + at - token + (SIZE - 1))
    s = 0
    turn = 0
    for chunk in range(begin, end):
        at = (gl.minimum(chunk + 1, end - 1).to(gl.int64) * heads + head) * SIZE + token
        next_since = gl.load(since_ptr + at)
        next_strength = gl.load(strength_ptr + at)
        next_whole = gl.load(since_ptr + at - token + (SIZE - 1))
        mbarrier.wait(free.index(s), turn ^ 1)
        vectors.index(s * VECTORS).store(since)
        vectors.index(s * VECTORS + 1).store(strength)
        vectors.index(s * VECTORS + 2).store(whole)
        barrier()
        mbarrier.arrive(full.index(s), count=1)
        since = next_since
        strength = next_strength
        whole = next_whole
        s, turn = _next(s, turn, stages)


@gluon.jit
def _walk(
    part: gl.constexpr,
    rings,
    o_smem,
    vectors,
    barriers,
    where,
    pointers,
    head,
    segment,
    between,
    slots,
    scale,
    of_map,
    heads: gl.constexpr,
    stages: gl.constexpr,
    outputs: gl.constexpr,
    dtype: gl.constexpr,
):
    """Rows part · 64 .. of the head's state (without `outputs`: of B, or of P) over the segment's chunks."""
    chunks_ptr, begin, end = where
    full, free = barriers
    q_smem, k_smem, v_smem, t_smem, m_smem = rings
    out_ptr, save_ptr, state_ptr, state_stride, between_ptr, maps_ptr = pointers
    slot_in, slot_out = slots
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    left_of_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k_blocks = k_smem._reinterpret(dtype, [stages, SIZE, DIM], shared)
    if outputs:
        q_blocks = q_smem._reinterpret(dtype, [stages, SIZE, DIM], shared)

    row = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    tile = row[:, None] * DIM + channel[None, :]
    head_state = state_ptr + head * (DIM * DIM)
    if segment == 0:
        there = (tile >= 0) & (slot_in >= 0)
        state = gl.load(head_state + slot_in * state_stride + tile, mask=there, other=0.0).to(gl.float32)
    elif outputs:
        if between_ptr is not None:
            state = gl.load(between_ptr + (between - heads) * (DIM * DIM) + tile)
        else:
            state = gl.zeros([ROWS, DIM], gl.float32, layout=wide)
    else:
        state = gl.where(of_map & (row[:, None] == channel[None, :]), 1.0, 0.0)

    out_token = gl.arange(0, SIZE, layout=gl.SliceLayout(1, plain))
    out_channel = head * DIM + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, plain))
    first = gl.load(chunks_ptr + begin * 3 + 1).to(gl.int64)
    count = gl.load(chunks_ptr + begin * 3 + 2)
    s = 0
    turn = 0
    for chunk in range(begin, end):
        zero = gl.zeros([ROWS, SIZE], gl.float32, layout=square)
        k = k_blocks.index(s)
        operand = gl.convert_layout(state.to(dtype), left)
        mbarrier.wait(full.index(s), turn)
        if count < SIZE:  # what lies behind the chunk may be NaN, which products with zero do not undo
            there = (out_token < count)[:, None]
            for c in gl.static_range(2):
                piece = k_smem.index(s * 2 + c)
                piece.store(gl.where(there, piece.load(plain), 0.0))
            piece = v_smem.index(s * 2 + part)
            piece.store(gl.where(there, piece.load(plain), 0.0))
            fence_async_shared()
            barrier()
        read = warpgroup_mma(operand, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if outputs:
            q = q_blocks.index(s)
            out = warpgroup_mma(operand, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        since = vectors.index(s * VECTORS).load(gl.SliceLayout(0, square))
        values = v_smem.index(s * 2 + part).permute((1, 0)).load(square).to(gl.float32)
        next_count = gl.load(chunks_ptr + gl.minimum(chunk + 1, end - 1) * 3 + 2)
        if outputs:
            read = warpgroup_mma_wait(1, deps=(read,))
        else:
            values = gl.where(of_map, 0.0, values)
            read = warpgroup_mma_wait(0, deps=(read,))
        missing = gl.convert_layout((values - read * since[None, :]).to(dtype), left)
        wrong = warpgroup_mma(missing, t_smem.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        strength = vectors.index(s * VECTORS + 1).load(gl.SliceLayout(0, square))
        fade = vectors.index(s * VECTORS + 2).load(gl.SliceLayout(1, wide))
        state = state * fade[:, None]
        if outputs:
            out = warpgroup_mma_wait(1, deps=(out,))
            out = out * (since * scale)[None, :]
        wrong = warpgroup_mma_wait(0, deps=(wrong,))
        if outputs:
            narrow = gl.convert_layout(wrong.to(dtype), left)
            out = warpgroup_mma(narrow, m_smem.index(s).permute((1, 0)), out, is_async=True)
        written = gl.convert_layout((wrong * strength[None, :]).to(dtype), left_of_wide)
        state = warpgroup_mma(written, k, state, is_async=True)
        if outputs:
            out = warpgroup_mma_wait(1, deps=(out,))
            o_smem.index(part).permute((1, 0)).store(out.to(dtype))
            turned = o_smem.index(part).load(plain)
            out_at = (first + out_token)[:, None] * (heads * DIM) + out_channel[None, :]
            kept = (out_token < count)[:, None] & (out_channel >= 0)[None, :]
            gl.store(out_ptr + out_at, turned, mask=kept)
        state = warpgroup_mma_wait(0, deps=(state,))
        barrier()
        mbarrier.arrive(free.index(s), count=1)
        if save_ptr is not None and outputs:
            save = gl.load(save_ptr + chunk)
            if save >= 0:
                gl.store(head_state + save * state_stride + tile, state.to(state_ptr.dtype.element_ty))
        first += count
        count = next_count
        s, turn = _next(s, turn, stages)

    if outputs:
        if slot_out >= 0:
            gl.store(head_state + slot_out * state_stride + tile, state.to(state_ptr.dtype.element_ty))
    elif of_map:
        gl.store(maps_ptr + between * (DIM * DIM) + tile, state)
    else:
        gl.store(between_ptr + between * (DIM * DIM) + tile, state)


@gluon.jit(do_not_specialize=["span"], do_not_specialize_on_alignment=TABLE)
def walk_chunks(
    rows_desc,
    solve_desc,
    scores_desc,
    since_ptr,
    strength_ptr,
    out_ptr,
    chunks_ptr,
    first_chunk_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    between_ptr,
    maps_ptr,
    span,
    scale,
    heads: gl.constexpr,
    key_heads: gl.constexpr,
    outputs: gl.constexpr,
    stages: gl.constexpr,
):
    kinds: gl.constexpr = 1 if outputs else 2  # of rows: of the state; or of B, and of P
    head = gl.program_id(0) // kinds
    of_map = gl.program_id(0) % kinds == 1
    sequence = gl.program_id(1)
    segment = gl.program_id(2)
    first_chunk = gl.load(first_chunk_ptr + sequence)
    last_chunk = gl.load(first_chunk_ptr + sequence + 1)
    begin = first_chunk + segment * span
    end = gl.minimum(begin + span, last_chunk)
    if begin >= last_chunk:
        return
    if not outputs and (end == last_chunk) | (of_map & (segment == 0)):
        return
    between = (first_chunk // span + segment).to(gl.int64) * heads + head
    slot_in = gl.load(slot_in_ptr + sequence)
    slot_out = gl.load(slot_out_ptr + sequence)
    slot_out = gl.where(end == last_chunk, slot_out, -1)

    dtype: gl.constexpr = rows_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem = gl.allocate_shared_memory(dtype, [stages * 2, SIZE, 64], shared)
    v_smem = gl.allocate_shared_memory(dtype, [stages * 2, SIZE, 64], shared)
    t_smem = gl.allocate_shared_memory(dtype, [stages, SIZE, SIZE], shared)
    if outputs:
        q_smem = gl.allocate_shared_memory(dtype, [stages * 2, SIZE, 64], shared)
        m_smem = gl.allocate_shared_memory(dtype, [stages, SIZE, SIZE], shared)
        o_smem = gl.allocate_shared_memory(dtype, [2, SIZE, ROWS], shared)
    else:
        q_smem = k_smem
        m_smem = t_smem
        o_smem = t_smem
    vectors = gl.allocate_shared_memory(gl.float32, [stages * VECTORS, SIZE], line)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    fence_async_shared()
    descriptors = (rows_desc, solve_desc, scores_desc)
    rings = (q_smem, k_smem, v_smem, t_smem, m_smem)
    barriers = (full, free)
    where = (chunks_ptr, begin, end)
    key_head = head // (heads // key_heads)
    columns = (key_head * DIM, (key_heads + key_head) * DIM, (2 * key_heads + head) * DIM)
    pointers = (out_ptr, save_ptr, state_ptr, state_stride, between_ptr, maps_ptr)
    slots = (slot_in, slot_out)
    # fmt: off
    gl.warp_specialize(
        [
            (
                _walk,
                (
                    0, rings, o_smem, vectors, barriers, where, pointers, head, segment, between, slots,
                    scale, of_map, heads, stages, outputs, dtype,
                ),
            ),
            (
                _walk,
                (
                    1, rings, o_smem, vectors, barriers, where, pointers, head, segment, between, slots,
                    scale, of_map, heads, stages, outputs, dtype,
                ),
            ),
            (
                _bring,
                (descriptors, rings, full, free, where, columns, head, of_map, heads, stages, outputs),
            ),
            (_decays, (vectors, full, free, where, (since_ptr, strength_ptr), head, heads, stages)),
        ],
        [4, 1, 1],
        [WALK_REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
    )
    # fmt: on
