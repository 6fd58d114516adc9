"""The gated delta rule by chunks on Hopper: which calls it takes, how sequences are cut, and the launches.

Owns the choice of segments and the memory between the kernels: `hopper_delta_chunks` for the matrices inside
chunks, `hopper_delta_walk` for the walk, which is cut into segments as `delta_pass` says. Knows the chunk
table; the arithmetic is in the kernels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.decay import MIN_LOG_DECAY
from denim.recurrence.kernels.delta_pass import join, multiprocessors
from denim.recurrence.kernels.hopper_delta_chunks import DIM, chunk_matrices
from denim.recurrence.kernels.hopper_delta_walk import walk_chunks
from denim.recurrence.kernels.hopper_triangular import SIZE, matrix

# Chunks in the walk's ring, 64 KiB each. Measured on an H200: where programs wait for a multiprocessor,
# memory is the limit, and a third costs 2%; elsewhere it hides what a chunk takes to come.
STAGES_OF_FEW, STAGES_OF_MANY = 3, 2
# A cut pays for a second walk only if it leaves few chunks one after another; 32 chunks were faster in 5
# segments of 7 than whole or in 8 segments of 4.
LEAST_SEGMENTS = 3
LEAST_SPAN = 6  # chunks


def suits(rows: Tensor, table: ChunkTable, state: Tensor) -> bool:
    """Whether the kernels take rows [T, channels] and states [slots, Hv, d_v, d_k] on Hopper."""
    return (
        rows.dtype in (torch.bfloat16, torch.float16)
        and state.shape[2:] == (DIM.value, DIM.value)
        and table.size == SIZE.value
        and rows.stride(0) % 8 == 0  # TMA wants rows and the first of them at 16 bytes
        and rows.data_ptr() % 16 == 0
    )


def span_of(walks: float, longest: int, processors: int) -> int:
    """Chunks of a segment, 0: sequences are not cut. walks: of whole sequences and heads that are under way
    at once, on average; longest: chunks of the longest sequence; processors: multiprocessors of the device,
    each of which has one program.

    The walk for B and P has 2 s - 3 programs for each walk cut into s segments. Up to the s where the device
    holds them at once more segments are faster; behind it some programs wait for others to end.
    """
    segments = min(int((processors / walks + 3) // 2), longest // LEAST_SPAN)
    return triton.cdiv(longest, segments) if segments >= LEAST_SEGMENTS else 0


def hopper_delta(
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    state: Tensor,
    key_heads: int,
    *,
    beta_limit: float = 1.0,
    span: int | None = None,
) -> Tensor:
    """As `gated_delta_chunks.gated_delta_chunks`, for calls that `suits`. span: chunks of a segment, 0:
    sequences are not cut, None: `span_of`."""
    heads, chunks, sequences = state.shape[1], len(table.chunks), len(table.slot_out)
    scale = DIM.value**-0.5
    place = {"device": rows.device}
    solve = torch.empty(chunks, heads, SIZE.value, SIZE.value, dtype=rows.dtype, **place)
    since = torch.empty(chunks, heads, SIZE.value, dtype=torch.float32, **place)
    scores, strength = torch.empty_like(solve), torch.empty_like(since)
    out = torch.empty(len(rows), heads, DIM.value, dtype=rows.dtype, **place)
    matrices = [matrix(x) for x in (rows, solve.view(-1, SIZE.value), scores.view(-1, SIZE.value))]
    chunk_matrices[(chunks * heads,)](
        *matrices,
        a,
        b,
        a.stride(0),
        a_log,
        dt_bias,
        table.chunks,
        since,
        strength,
        scale,
        beta_limit,
        MIN_LOG_DECAY[torch.float32],
        heads=heads,
        key_heads=key_heads,
        num_warps=4,
    )
    processors = multiprocessors(rows.device)
    longest = max(table.longest, 1)
    if span is None:
        span = span_of(heads * chunks / longest, longest, processors)
    span = span or longest
    segments = triton.cdiv(longest, span)
    stages = STAGES_OF_MANY if heads * sequences > processors else STAGES_OF_FEW
    between = maps = None
    if segments > 1:
        boundaries = chunks // span + 1
        between, maps = torch.empty(2, boundaries, heads, DIM.value, DIM.value, dtype=torch.float32, **place)

    def walk(outputs: bool) -> None:
        walk_chunks[(heads if outputs else 2 * heads, sequences, segments)](
            *matrices,
            since,
            strength,
            out,
            table.chunks,
            table.first_chunk,
            table.slot_in,
            table.slot_out,
            table.save if outputs else None,
            state,
            state.stride(0),
            between,
            maps,
            span,
            scale,
            heads=heads,
            key_heads=key_heads,
            outputs=outputs,
            stages=stages,
            num_warps=4,
        )

    if segments > 1:
        walk(outputs=False)
        join(table, between, maps, span, "tf32")
    walk(outputs=True)
    return out
