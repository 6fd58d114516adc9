"""The pass over the chunks of a delta rule: states from chunk to chunk, outputs, and the states in slots.

Owns steps 3 to 5 of `denim.recurrence.gated_delta` once the matrices of each chunk are there (`ChunkTerms`),
for scalar and for vector decay. Knows slots and the chunk table; must not know gates or projections.

A program keeps some rows of one head's state S [d_v, d_k] in registers and walks over chunks. All products
have those rows on the left, and tokens as columns:

    R = S (e^G K)^T        U = V^T T^T - R T^T        with T = (I + A)^-1 diag(beta)
    O = S (e^G Q)^T + U M^T
    S = S diag(e^{G_C}) + U (e^{G_C - G} K)

So what one product leaves in registers is the next one's left operand, and every right operand is a tile as
it lies in memory: nothing goes through shared memory on the way from one state to the next. W and X of the
WY form are never made, which saves writing and reading them.

Few sequences and heads do not fill a GPU. Then sequences are cut into segments of `span` chunks, which run in
parallel. A segment maps the state before it to S P + B, row by row, since the update acts on rows of S alone:
the rows of B come from the walk that starts with zeros, the rows of P from one that starts with the identity
and has no values. So three launches: `_walk` without outputs for B and P of all segments but the last of each
sequence, `_join` for the states between segments, `_walk` with outputs, each segment from its own state.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable

# The table's tensors are views at any offset; compiling once for each alignment of theirs would gain nothing.
TABLE = ["chunks_ptr", "first_chunk_ptr", "cu_seqlens_ptr", "slot_in_ptr", "slot_out_ptr", "save_ptr"]

SEARCH = tl.constexpr(128)  # chunks that are searched at once for the next state to save


class ChunkTerms(NamedTuple):
    """What the pass needs of the M chunks of C tokens (padded) of Hv heads.

    solve, scores: [M, Hv, C, C], T and M of the module docstring, M times the scale of q.
    Scalar decay: keys = later and queries are views [T, Hk * d_k] of the convolved rows, of one row stride;
    since, until: [M, Hv, C] fp32, e^{G_t} and e^{G_C - G_t}; left is None.
    Vector decay: keys, queries, later: [M, Hv, C, d_k], e^G K, e^G Q (without scale), e^{G_C - G} K; since
    and until are None; left: [M, Hv, d_k] fp32, e^{G_C}.
    """

    solve: Tensor
    scores: Tensor
    keys: Tensor
    queries: Tensor
    later: Tensor
    since: Tensor | None
    until: Tensor | None
    left: Tensor | None


class PassPlan(NamedTuple):
    """rows: of the state in a program; warps, stages: of that program; span: chunks of a segment, 0: all."""

    rows: int
    warps: int
    stages: int
    span: int


@triton.jit
def _values_of(chunk, chunks_ptr, column_ptr, stride, token, mask):
    """[tokens, rows] of the values of a chunk."""
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    live = token < tl.load(chunks_ptr + chunk * 3 + 2)
    tile = column_ptr[None, :] + (first * stride + token[:, None] * stride)
    return tl.load(tile, mask=live[:, None] & mask[None, :], other=0.0)


@triton.jit(do_not_specialize=["span"], do_not_specialize_on_alignment=TABLE)
def _walk(
    keys_ptr,
    queries_ptr,
    later_ptr,
    key_stride,
    values_ptr,
    value_stride,
    solve_ptr,
    scores_ptr,
    since_ptr,
    until_ptr,
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
        ahead = _values_of(piece, chunks_ptr, value_column, value_stride, token, takes_values)
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
            # Fetched a chunk ahead by hand: two tiles of them in shared memory would leave room for one
            # program less on a multiprocessor.
            values = ahead
            following = tl.minimum(chunk + 1, stop - 1)
            ahead = _values_of(following, chunks_ptr, value_column, value_stride, token, takes_values)
            solve = tl.load(solve_ptr + place * (size * size) + square)

            operand = state.to(dtype)
            read = tl.dot(operand, tl.trans(keys), input_precision=precision)
            if since_ptr is not None:
                since = tl.load(since_ptr + place * size + token)
                read *= since[None, :]
            written = tl.dot(tl.trans(values), tl.trans(solve), input_precision=precision)
            written = tl.dot((-read).to(dtype), tl.trans(solve), acc=written, input_precision=precision)
            if outputs:
                queries = tl.load(queries_ptr + at + key_tile, mask=key_mask, other=0.0)
                scores = tl.load(scores_ptr + place * (size * size) + square)
                out = tl.dot(operand, tl.trans(queries), input_precision=precision)
                if since_ptr is not None:
                    out *= (since * scale)[None, :]
                else:
                    out *= scale
                out = tl.dot(written.to(dtype), tl.trans(scores), acc=out, input_precision=precision)
                out_at = out_ptr + first * (heads * value_dim) + head * value_dim
                tl.store(
                    out_at + token[:, None] * (heads * value_dim) + row[None, :],
                    tl.trans(out).to(out_ptr.dtype.element_ty),
                    mask=live[:, None] & row_mask[None, :],
                )
            if since_ptr is None:
                left = tl.load(left_ptr + place * key_dim + channel, mask=channel_mask, other=0.0)
                state *= left[None, :]
                later = tl.load(later_ptr + at + key_tile, mask=key_mask, other=0.0)
                state = tl.dot(written.to(dtype), later, acc=state, input_precision=precision)
            else:
                until = tl.load(until_ptr + place * size + token)
                state *= tl.load(since_ptr + place * size + size - 1)
                written *= until[None, :]
                state = tl.dot(written.to(dtype), keys, acc=state, input_precision=precision)
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
def _join(
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


def largest_chunk(dtype: torch.dtype) -> int:
    """The most tokens of a chunk of these kernels, so that its squares stay in registers."""
    return 32 if dtype == torch.float32 else 64


def plan_of(
    table: ChunkTable, heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> PassPlan:
    """How to cut the pass, from numbers that the host knows."""
    if dtype == torch.float32:
        rows, warps, stages = 32, 8, 1
    else:
        rows, warps, stages = 64, 4, 2
    chunks = len(table.chunks)
    walks = heads * triton.cdiv(value_dim, rows) * chunks / max(table.longest, 1)
    segments = int(walks_at_once(device) / walks)
    # Two walks instead of one pay from about four segments on.
    span = triton.cdiv(table.longest, segments) if segments >= 4 and table.longest >= 128 else 0
    return PassPlan(rows, warps, stages, span)


@cache
def walks_at_once(device: torch.device) -> int:
    """Programs that fill a device: two on each multiprocessor."""
    if device.type != "cuda":
        return 1
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def delta_pass(
    terms: ChunkTerms,
    values: Tensor,
    table: ChunkTable,
    state: Tensor,
    scale: float,
    plan: PassPlan,
) -> Tensor:
    """Outputs [T, Hv, d_v] in the values' dtype; states are read from and written to the table's slots.

    values: [T, Hv * d_v], rows any distance apart; state: [slots, Hv, d_v, d_k], slots any distance apart.
    Rows of no chunk are not written.
    """
    _, heads, value_dim, key_dim = state.shape
    out = torch.empty(len(values), heads, value_dim, dtype=values.dtype, device=values.device)
    assert values.stride(1) == 1 and state.stride()[1:] == (value_dim * key_dim, key_dim, 1)
    vector = terms.since is None
    rows, precision = plan.rows, "ieee" if values.dtype == torch.float32 else "tf32"
    row_blocks = triton.cdiv(value_dim, rows)
    sequences = len(table.slot_out)
    block_k = max(16, triton.next_power_of_2(key_dim))
    span = plan.span or max(table.longest, 1)
    segments = triton.cdiv(table.longest, span)
    between = maps = None
    if segments > 1:
        boundaries = len(table.chunks) // span + 1
        place = {"dtype": torch.float32, "device": values.device}
        between = torch.empty(boundaries, heads, value_dim, key_dim, **place)
        maps = torch.empty(boundaries, heads, key_dim, key_dim, **place)

    def walk(outputs: bool) -> None:
        blocks = row_blocks if outputs else row_blocks + triton.cdiv(key_dim, rows)
        _walk[(heads * blocks, sequences, segments)](
            terms.keys,
            terms.queries,
            terms.later,
            key_dim if vector else terms.keys.stride(0),
            values,
            values.stride(0),
            terms.solve,
            terms.scores,
            terms.since,
            terms.until,
            terms.left,
            out,
            table.chunks,
            table.first_chunk,
            table.slot_in,
            table.slot_out,
            table.save,
            state,
            state.stride(0),
            between,
            maps,
            span,
            scale,
            heads=heads,
            group=1 if vector else heads * key_dim // terms.keys.shape[1],
            key_dim=key_dim,
            value_dim=value_dim,
            size=terms.solve.shape[-1],
            block_k=block_k,
            rows=rows,
            row_blocks=row_blocks,
            outputs=outputs,
            precision=precision,
            stages=plan.stages,
            num_warps=plan.warps,
        )

    if segments > 1:
        walk(outputs=False)
        join_rows = 16  # the least that tensor cores multiply: as many programs as there can be
        join_blocks = triton.cdiv(value_dim, join_rows)
        _join[(heads * join_blocks, sequences)](
            table.first_chunk,
            between,
            maps,
            span,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            block_k=block_k,
            rows=join_rows,
            row_blocks=join_blocks,
            precision=precision,
            num_warps=8,
        )
    walk(outputs=True)
    return out
