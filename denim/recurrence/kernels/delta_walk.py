"""The walk over the chunks of a delta rule, one program for some rows of one head's state.

Owns the kernels of steps 3 to 5 of `denim.recurrence.gated_delta`, for scalar and for vector decay: states
from chunk to chunk, outputs, states to slots, and the join of segments that ran in parallel. How they are
launched is `delta_pass`. Knows slots and the chunk table; must not know gates or projections.

A program keeps some rows of one head's state S [d_v, d_k] in registers and walks over chunks. All products
have those rows on the left, and tokens as columns:

    R = S (e^G K)^T        E = (V^T - R) T^T        with T = (I + N diag(beta))^-1
    O = S (e^G Q)^T + E (M diag(beta))^T
    S = S diag(e^{G_C}) + E diag(beta) (e^{G_C - G} K)

where A = diag(beta) N and U^T = E diag(beta). With beta behind the inverse and not in front, T has ones on
its diagonal, and a token's own value meets one rounding to 16 bits on its way into the state, E diag(beta),
and one on its way to the output, M diag(beta); with strong decay nothing else counts.

So what one product leaves in registers is the next one's left operand, and every right operand is a tile as
it lies in memory: nothing goes through shared memory on the way from one state to the next. W and X of the
WY form are never made, which saves writing and reading them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The table's tensors are views at any offset; compiling once for each alignment of theirs would gain nothing.
TABLE = ["chunks_ptr", "first_chunk_ptr", "cu_seqlens_ptr", "slot_in_ptr", "slot_out_ptr", "save_ptr"]
SEARCH = tl.constexpr(128)  # chunks that are searched at once for the next state to save


@triton.jit(do_not_specialize=["span"], do_not_specialize_on_alignment=TABLE)
def walk_chunks(
    keys_ptr,
    queries_ptr,
    later_ptr,
    key_stride,
    values_ptr,
    value_stride,
    solve_ptr,
    scores_ptr,
    since_ptr,
    strength_ptr,
    left_ptr,
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
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    size: tl.constexpr,
    block_k: tl.constexpr,
    rows: tl.constexpr,
    row_blocks: tl.constexpr,
    outputs: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """Rows of one head's state over one segment. Without `outputs` also the rows of P, behind those of B."""
    all_blocks: tl.constexpr = row_blocks if outputs else row_blocks + (key_dim + rows - 1) // rows
    head = tl.program_id(0) // all_blocks
    block = tl.program_id(0) % all_blocks
    sequence = tl.program_id(1)
    segment = tl.program_id(2)
    first_chunk = tl.load(first_chunk_ptr + sequence)
    last_chunk = tl.load(first_chunk_ptr + sequence + 1)
    begin = first_chunk + segment * span
    end = tl.minimum(begin + span, last_chunk)
    if begin >= last_chunk:
        return
    of_map = block >= row_blocks
    if not outputs and (end == last_chunk) | (of_map & (segment == 0)):
        return
    between = (first_chunk // span + segment).to(tl.int64) * heads + head

    row = tl.where(of_map, block - row_blocks, block) * rows + tl.arange(0, rows)
    row_mask = row < tl.where(of_map, key_dim, value_dim)
    channel = tl.arange(0, block_k)
    channel_mask = channel < key_dim
    tile = row[:, None] * key_dim + channel[None, :]
    mask = row_mask[:, None] & channel_mask[None, :]
    head_state = state_ptr + head * (value_dim * key_dim)

    if segment == 0:
        slot = tl.load(slot_in_ptr + sequence)
        state = tl.load(head_state + slot * state_stride + tile, mask=mask & (slot >= 0), other=0.0).to(
            tl.float32
        )
    elif outputs:
        if between_ptr is not None:
            before = between_ptr + (between - heads) * (value_dim * key_dim)
            state = tl.load(before + tile, mask=mask, other=0.0)
        else:
            state = tl.zeros([rows, block_k], tl.float32)
    else:
        state = tl.where(of_map & (row[:, None] == channel[None, :]), 1.0, 0.0)

    dtype = solve_ptr.dtype.element_ty
    token = tl.arange(0, size)
    square = token[:, None] * size + token[None, :]
    key_tile = token[:, None] * key_stride + channel[None, :]
    value_column = values_ptr + head * value_dim + row
    takes_values = row_mask & (not of_map)
    place = begin.to(tl.int64) * heads + head
    piece = begin
    while piece < end:
        stop = end
        if save_ptr is not None and outputs:
            reach = piece + tl.arange(0, SEARCH)
            marks = tl.load(save_ptr + reach, mask=reach < end, other=-1)
            stop = tl.minimum(tl.min(tl.where(marks >= 0, reach + 1, piece + SEARCH), 0), end)
        for chunk in tl.range(piece, stop, num_stages=stages):
            first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
            live = token < tl.load(chunks_ptr + chunk * 3 + 2)
            if since_ptr is None:
                at = place * (size * key_dim)
                key_mask = channel_mask[None, :]
            else:
                at = first * key_stride + (head // group) * key_dim
                key_mask = live[:, None] & channel_mask[None, :]
            keys = tl.load(keys_ptr + at + key_tile, mask=key_mask, other=0.0)
            value_tile = value_column[None, :] + (first * value_stride + token[:, None] * value_stride)
            values = tl.load(value_tile, mask=live[:, None] & takes_values[None, :], other=0.0)
            solve = tl.load(solve_ptr + place * (size * size) + square)

            operand = state.to(dtype)
            read = tl.dot(operand, tl.trans(keys), input_precision=precision)
            if since_ptr is not None:
                since = tl.load(since_ptr + place * size + token[None, :])
                read *= since
            missing = tl.trans(values).to(tl.float32) - read
            wrong = tl.dot(missing.to(dtype), tl.trans(solve), input_precision=precision)
            if outputs:
                queries = tl.load(queries_ptr + at + key_tile, mask=key_mask, other=0.0)
                scores = tl.load(scores_ptr + place * (size * size) + square)
                out = tl.dot(operand, tl.trans(queries), input_precision=precision)
                if since_ptr is not None:
                    out *= since * scale
                else:
                    out *= scale
                out = tl.dot(wrong.to(dtype), tl.trans(scores), acc=out, input_precision=precision)
                out_at = out_ptr + first * (heads * value_dim) + head * value_dim
                tl.store(
                    out_at + token[:, None] * (heads * value_dim) + row[None, :],
                    tl.trans(out).to(out_ptr.dtype.element_ty),
                    mask=live[:, None] & row_mask[None, :],
                )
            written = wrong * tl.load(strength_ptr + place * size + token[None, :])
            if since_ptr is None:
                left = tl.load(left_ptr + place * key_dim + channel, mask=channel_mask, other=0.0)
                state *= left[None, :]
                later = tl.load(later_ptr + at + key_tile, mask=key_mask, other=0.0)
            else:
                state *= tl.load(since_ptr + place * size + size - 1)
                later = keys
            state = tl.dot(written.to(dtype), later, acc=state, input_precision=precision)
            place += heads
        if save_ptr is not None and outputs:
            save = tl.load(save_ptr + stop - 1)
            saved = head_state + save * state_stride + tile
            tl.store(saved, state.to(state_ptr.dtype.element_ty), mask=mask & (save >= 0))
        piece = stop

    if outputs:
        slot = tl.load(slot_out_ptr + sequence)
        writes = (slot >= 0) & (end == last_chunk)
        tl.store(
            head_state + slot * state_stride + tile, state.to(state_ptr.dtype.element_ty), mask=mask & writes
        )
    elif of_map:
        tl.store(maps_ptr + between * (key_dim * key_dim) + tile, state, mask=mask)
    else:
        tl.store(between_ptr + between * (value_dim * key_dim) + tile, state, mask=mask)


@triton.jit(do_not_specialize=["span"], do_not_specialize_on_alignment=TABLE)
def join_segments(
    first_chunk_ptr,
    between_ptr,
    maps_ptr,
    span,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_k: tl.constexpr,
    rows: tl.constexpr,
    row_blocks: tl.constexpr,
    precision: tl.constexpr,
):
    """B of each segment to the state behind it, S P + B, segment after segment of one sequence."""
    head = tl.program_id(0) // row_blocks
    block = tl.program_id(0) % row_blocks
    sequence = tl.program_id(1)
    first_chunk = tl.load(first_chunk_ptr + sequence)
    chunks = tl.load(first_chunk_ptr + sequence + 1) - first_chunk
    boundaries = (chunks + span - 1) // span - 1
    row = block * rows + tl.arange(0, rows)
    channel = tl.arange(0, block_k)
    channel_mask = channel < key_dim
    tile = row[:, None] * key_dim + channel[None, :]
    mask = (row < value_dim)[:, None] & channel_mask[None, :]
    square = channel[:, None] * key_dim + channel[None, :]
    square_mask = channel_mask[:, None] & channel_mask[None, :]

    between = (first_chunk // span).to(tl.int64) * heads + head
    if boundaries > 1:
        state = tl.load(between_ptr + between * (value_dim * key_dim) + tile, mask=mask, other=0.0)
        for _ in range(1, boundaries):
            between += heads
            target = between_ptr + between * (value_dim * key_dim) + tile
            own = tl.load(target, mask=mask, other=0.0)
            change = tl.load(maps_ptr + between * (key_dim * key_dim) + square, mask=square_mask, other=0.0)
            state = tl.dot(state, change, acc=own, input_precision=precision)
            tl.store(target, state, mask=mask)
