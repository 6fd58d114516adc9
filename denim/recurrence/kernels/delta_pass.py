"""The pass over the chunks of a delta rule: its operands, how it is cut into programs, and its launches.

Owns `ChunkTerms`, what the kernels inside chunks hand over, and the choice of segments. Knows the chunk table
and the shape of the states; the arithmetic is `delta_walk`.

Few sequences and heads do not fill a GPU. Then sequences are cut into segments of `span` chunks, which run in
parallel. A segment maps the state before it to S P + B, row by row, since the update acts on rows of S alone:
the rows of B come from the walk that starts with zeros, the rows of P from one that starts with the identity
and has no values. So three launches: the walk without outputs for B and P of all segments but the last of
each sequence, the join for the states between segments, the walk with outputs, each segment from its own
state. A sequence resumed from a state inside it may be cut elsewhere, and then agrees to rounding only; with
one segment a sequence it agrees bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_walk import join_segments, walk_chunks

# Measured on an H200: fewer segments gain less than a second walk costs, shorter ones less than their join.
LEAST_SEGMENTS = 3
LEAST_SPAN = 8  # chunks
LARGEST_JOINED = 128  # d_k of which a whole P [d_k, d_k], and the next, fit into shared memory


class ChunkTerms(NamedTuple):
    """What the pass needs of the M chunks of C tokens (padded) of Hv heads.

    solve, scores: [M, Hv, C, C], T and M diag(beta) of `delta_walk`, M times the scale of q.
    Scalar decay: keys = later and queries are views [T, Hk * d_k] of the convolved rows, of one row stride;
    since, strength: [M, Hv, C] fp32, e^{G_t} and beta_t e^{G_C - G_t}; left is None.
    Vector decay: keys, queries, later: [M, Hv, C, d_k], e^G K, e^G Q (without scale), e^{G_C - G} K; since
    is None; strength: [M, Hv, C] fp32, beta; left: [M, Hv, d_k] fp32, e^{G_C}.
    """

    solve: Tensor
    scores: Tensor
    keys: Tensor
    queries: Tensor
    later: Tensor
    since: Tensor | None
    strength: Tensor
    left: Tensor | None


class PassPlan(NamedTuple):
    """rows: of the state in a program; warps, stages: of that program; span: chunks of a segment, 0: all."""

    rows: int
    warps: int
    stages: int
    span: int


def largest_chunk(dtype: torch.dtype) -> int:
    """The most tokens of a chunk of these kernels, so that its squares stay in registers."""
    return 32 if dtype == torch.float32 else 64


def plan_of(table: ChunkTable, state: Tensor, dtype: torch.dtype, *, vector: bool = False) -> PassPlan:
    """How to cut the pass over states [slots, Hv, d_v, d_k], from numbers that the host knows. vector: the
    decay is one for each key channel."""
    heads, value_dim, key_dim = state.shape[1:]
    if dtype == torch.float32:  # one segment a sequence, for the sake of exactness
        return PassPlan(rows=32, warps=8, stages=1, span=0)
    if key_dim > LARGEST_JOINED:
        return PassPlan(rows=64, warps=8, stages=1, span=0)
    narrow = PassPlan(rows=64, warps=4, stages=2, span=0)  # the least rows that Hopper's wgmma takes
    wide = PassPlan(rows=128, warps=8, stages=2, span=0)
    processors = multiprocessors(state.device)
    under_way = heads * len(table.chunks) / max(table.longest, 1)  # whole sequences' heads, on average
    programs = under_way * triton.cdiv(value_dim, narrow.rows)
    if vector and value_dim > narrow.rows:
        # Tiles of faded keys and queries leave room for one program on a multiprocessor. One of 128 rows
        # reads them once for two of 64; but where those have a place each, they are faster. The walk for B
        # and P has 2 s - 3 wide programs for each walk of s segments.
        segments = (processors / (under_way * triton.cdiv(value_dim, wide.rows)) + 3) / 2
        cut, whole = wide, narrow if programs <= processors else wide
    else:
        segments = 2 * processors / programs  # two share a multiprocessor
        cut, whole = narrow, narrow
    segments = min(int(segments), table.longest // LEAST_SPAN)
    if segments < LEAST_SEGMENTS:
        return whole
    return cut._replace(span=triton.cdiv(table.longest, segments))


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; elsewhere one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
        walk_chunks[(heads * blocks, sequences, segments)](
            terms.keys,
            terms.queries,
            terms.later,
            key_dim if vector else terms.keys.stride(0),
            values,
            values.stride(0),
            terms.solve,
            terms.scores,
            terms.since,
            terms.strength,
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
        join(table, between, maps, span, precision)
    walk(outputs=True)
    return out


def join(table: ChunkTable, between: Tensor, maps: Tensor, span: int, precision: str) -> None:
    """Of segments of `span` chunks: turns B [boundaries, Hv, d_v, d_k] into the states behind the segments,
    in place, with P [boundaries, Hv, d_k, d_k]; both fp32, in the places that the walk gives them."""
    _, heads, value_dim, key_dim = between.shape
    rows = 16  # the least that tensor cores multiply: as many programs as there can be
    row_blocks = triton.cdiv(value_dim, rows)
    join_segments[(heads * row_blocks, len(table.slot_out))](
        table.first_chunk,
        between,
        maps,
        span,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_k=max(16, triton.next_power_of_2(key_dim)),
        rows=rows,
        row_blocks=row_blocks,
        precision=precision,
        num_warps=8,
    )
