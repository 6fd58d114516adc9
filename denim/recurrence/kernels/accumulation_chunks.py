"""Gated accumulation with one decay a head over whole sequences: SSD (Mamba2) and lightning attention.

Owns the walk over the chunks of a `ChunkTable`: a program takes some value channels of one head through a run
of chunks and keeps their state in registers, so that a state inside a sequence costs its bytes only where it
is wanted. Per chunk it does steps 2 and 3 of `denim.recurrence.gated_accumulation` in matrix products. States
are read from and written to their slots; offsets are 64-bit.

A long sequence is cut into segments, so that few heads fill the device: a first launch walks all segments but
the last without reading out, and leaves what each adds to the state and how far it lets the past fade; in the
second every segment folds those before it into its own first state. The first launch also copies the state
that a sequence begins from: its slot may be the one which the second writes. A sequence that is resumed in
its middle may be cut elsewhere and then agrees to rounding only; in fp32 none is cut.

Decays: `accumulation_decays`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.accumulation_decays import TimeStep, decays_of
from denim.recurrence.kernels.exponentials import LOG2_E

# Tokens of a chunk: larger ones cost more inside, smaller ones more walks of the state. Products of fp32
# operands do not run on tensor cores and want few registers.
CHUNK_TOKENS = {torch.float32: 16}
DEFAULT_CHUNK_TOKENS = 64
# Value channels of a program, and its warps.
VALUE_BLOCK = 64
WARPS = 4
# Multiprocessors, and programs among which a long sequence is shared out: four for each.
MULTIPROCESSORS, FILLING = 132, 528
# A segment is at least so many chunks: folding in another costs about as much as one chunk.
LEAST_CHUNKS = 16
# Bytes of shared memory that tokens and the state may take of a multiprocessor's 227 KiB.
SHARED_BYTES = 180 << 10


@triton.jit(do_not_specialize=["total", "segments", "segment_chunks"])
def _walk(
    q_ptr,
    k_ptr,
    qk_stride,
    qk_head_stride,
    v_ptr,
    v_stride,
    v_head_stride,
    decays_ptr,
    total,
    decay_ptr,
    skip_ptr,
    chunks_ptr,
    first_chunk_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    added_ptr,
    faded_ptr,
    out_ptr,
    segments,
    segment_chunks,
    heads: tl.constexpr,
    group: tl.constexpr,
    value_dim: tl.constexpr,
    key_dim: tl.constexpr,
    splits: tl.constexpr,
    reads_out: tl.constexpr,
    tokens: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
):
    """One segment of one sequence for `block_v` value channels of one head.

    added, faded: [N, segments, heads, value_dim, key_dim] and [N, segments, heads]; in them place 0 is what
    a sequence begins from, and place i what its segment i - 1 adds, and the log to base 2 of what that leaves
    of the past. A sequence of one segment uses neither.
    """
    head = tl.program_id(0) // splits
    segment = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(first_chunk_ptr + sequence) + segment * segment_chunks
    end = tl.load(first_chunk_ptr + sequence + 1)
    last = tl.minimum(first + segment_chunks, end)
    if first >= end:
        return
    if (last == end) & (not reads_out):
        return
    slot_out = tl.load(slot_out_ptr + sequence)
    if slot_out < 0:
        return
    v_at = tl.program_id(0) % splits * block_v + tl.arange(0, block_v)
    k_at = tl.arange(0, block_k)
    v_mask = v_at < value_dim
    k_mask = k_at < key_dim
    step = tl.arange(0, tokens)
    tile = v_at[:, None] * key_dim + k_at[None, :]
    tile_mask = v_mask[:, None] & k_mask[None, :]
    size: tl.constexpr = value_dim * key_dim
    place = sequence.to(tl.int64) * segments * heads + head
    dtype = v_ptr.dtype.element_ty

    s = tl.zeros([block_v, block_k], tl.float32)
    if (segment == 0) & ((last == end) | (not reads_out)):
        slot = tl.load(slot_in_ptr + sequence)
        if slot >= 0:
            s += tl.load(state_ptr + slot * state_stride + head * size + tile, mask=tile_mask, other=0.0)
        if not reads_out:
            tl.store(added_ptr + place * size + tile, s, mask=tile_mask)
            s = tl.zeros([block_v, block_k], tl.float32)
    elif reads_out:
        s += tl.load(added_ptr + place * size + tile, mask=tile_mask, other=0.0)
        for i in range(1, segment + 1):
            at = place + i * heads
            s = s * tl.exp2(tl.load(faded_ptr + at))
            s += tl.load(added_ptr + at * size + tile, mask=tile_mask, other=0.0)

    q_ptr += head // group * qk_head_stride
    k_ptr += head // group * qk_head_stride
    v_ptr += head * v_head_stride
    out_ptr += head * value_dim
    qk_at = step[:, None] * qk_stride + k_at[None, :]
    in_v = step[:, None] * v_stride + v_at[None, :]
    out_at = step[:, None] * (heads * value_dim) + v_at[None, :]
    if decay_ptr is not None:
        decay = tl.load(decay_ptr + head) * LOG2_E
    else:
        decays_ptr += head.to(tl.int64) * total
        decays_at = step[:, None] + tl.arange(0, 2)[None, :].to(tl.int64) * heads * total
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head)
    faded = 0.0
    # A chunk's place is read one turn ahead: its tokens are asked for while the one before it is computed.
    at = tl.load(chunks_ptr + first * 3 + 1)
    count = tl.load(chunks_ptr + first * 3 + 2)
    for chunk in tl.range(first, last, num_stages=stages):
        next_at = tl.load(chunks_ptr + chunk * 3 + 4, mask=chunk + 1 < last, other=0)
        next_count = tl.load(chunks_ptr + chunk * 3 + 5, mask=chunk + 1 < last, other=0)
        row = at.to(tl.int64)
        live = step < count
        k_live = live[:, None] & k_mask[None, :]
        v_live = live[:, None] & v_mask[None, :]
        k = tl.load(k_ptr + row * qk_stride + qk_at, mask=k_live, other=0.0)
        v = tl.load(v_ptr + row * v_stride + in_v, mask=v_live, other=0.0)
        # A token behind the chunk's end counts 2^-inf times.
        if decay_ptr is not None:
            left = decay * count.to(tl.float32)
            since = decay * (step + 1).to(tl.float32)
            onto = tl.where(live, since, float("inf"))
        else:
            left = tl.load(decays_ptr + row + count - 1)
            both = tl.load(decays_ptr + row + decays_at, mask=live[:, None], other=0.0)
            since, onto = tl.split(both)
            onto = tl.where(live, onto, float("inf"))
        if reads_out:
            q = tl.load(q_ptr + row * qk_stride + qk_at, mask=k_live, other=0.0)
            out = tl.dot(q, tl.trans(s.to(dtype)), input_precision="ieee") * tl.exp2(since)[:, None]
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            token = at + step
            past = token[:, None] >= token[None, :]
            scores *= tl.exp2(tl.where(past, since[:, None] - onto[None, :], -float("inf")))
            if skip_ptr is not None:
                scores += tl.where(token[:, None] == token[None, :], skip, 0.0)
            out = tl.dot(scores.to(dtype), v, out, input_precision="ieee")
            target = out_ptr + row * (heads * value_dim) + out_at
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=v_live)
        weighted = (v.to(tl.float32) * tl.exp2(left - onto)[:, None]).to(dtype)
        s = tl.dot(tl.trans(weighted), k, s * tl.exp2(left), input_precision="ieee")
        faded += left
        if (save_ptr is not None) and reads_out:
            save = tl.load(save_ptr + chunk)
            if save >= 0:
                saved = s.to(state_ptr.dtype.element_ty)
                tl.store(state_ptr + save * state_stride + head * size + tile, saved, mask=tile_mask)
        at = next_at
        count = next_count
    if reads_out:
        if last == end:
            final = s.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + slot_out * state_stride + head * size + tile, final, mask=tile_mask)
    else:
        at = place + (segment + 1) * heads
        tl.store(added_ptr + at * size + tile, s, mask=tile_mask)
        if tl.program_id(0) % splits == 0:
            tl.store(faded_ptr + at, faded)


def chunk_tokens(dtype: torch.dtype) -> int:
    """The `size` of the table that `accumulation_chunks` wants for inputs of this dtype."""
    return CHUNK_TOKENS.get(dtype, DEFAULT_CHUNK_TOKENS)


def stages_of(programs: int, tokens: int, block_k: int, block_v: int, itemsize: int) -> int:
    """Chunks whose tokens are in shared memory at once: three where a multiprocessor has one program only, so
    that a chunk is asked for a whole turn before it is computed; two where there is room for another program,
    which computes meanwhile; one where they do not fit.

    q and k are kept as many times, v once less, beside the state in the operands' dtype.
    """
    for stages in (3, 2) if programs <= MULTIPROCESSORS else (2,):
        kept = 2 * stages * tokens * block_k + (stages - 1) * tokens * block_v + block_k * block_v
        if kept * itemsize <= SHARED_BYTES:
            return stages
    return 1


def long_sequences(table: ChunkTable) -> int:
    """How many sequences as long as the longest there can be. A table in a captured graph has room for more
    sequences than there may be, and any of them may have all of its chunks."""
    return max(1, len(table.chunks) // max(1, table.longest))


def segments_of(table: ChunkTable, programs: int) -> int:
    """Segments of the longest sequence, when each sequence is walked by so many programs."""
    return max(1, min(FILLING // (programs * long_sequences(table)), table.longest // LEAST_CHUNKS))


def accumulation_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    table: ChunkTable,
    states: Tensor,
    *,
    time_step: TimeStep | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """The rule over the sequences of `table`, from and to their slots: [T, H, d_v] dense in v's dtype.

    q, k: [T, Hk, d_k] with the same strides; v: [T, H, d_v]; rows any distance apart, channels dense. Value
    head i uses key head i // (H / Hk). states: [slots, H, d_v, d_k], slots any distance apart. decay: [H]
    fp32. Without time_step it is the log of a constant decay, at least LEAST_LOG_DECAY (lightning). With it
    (SSD: q = C, k = B, v = x) it is the log of -A: log-decay is -exp(decay) Δ, and v counts Δ-fold. skip: [H]
    fp32, added to the output times v. Scale is 1. Rows of no chunk are not written. Products take operands in
    v's dtype; sums, decays and states are fp32.
    """
    tokens, heads, value_dim = v.shape
    key_dim = k.shape[2]
    assert q.stride() == k.stride() and q.stride(2) == v.stride(2) == 1 and states[0].is_contiguous()
    assert states.shape[1:] == (heads, value_dim, key_dim) and q.dtype == k.dtype == v.dtype
    out = torch.empty(tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    sequences = len(table.slot_in)
    block_v = max(16, min(VALUE_BLOCK, triton.next_power_of_2(value_dim)))
    block_k = max(16, triton.next_power_of_2(key_dim))
    size = max(16, triton.next_power_of_2(table.size))
    splits = triton.cdiv(value_dim, block_v)
    segments = 1 if v.dtype == torch.float32 else segments_of(table, heads * splits)
    segment_chunks = triton.cdiv(table.longest, segments)
    programs = heads * splits * segments * long_sequences(table)
    stages = stages_of(programs, size, block_k, block_v, v.element_size())
    shape = (sequences, segments, heads) if segments > 1 else (0,)
    added = torch.empty(*shape, *states.shape[2:], dtype=torch.float32, device=v.device)
    faded = torch.empty(shape, dtype=torch.float32, device=v.device)
    decays = None if time_step is None else decays_of(time_step, decay, table, heads)
    for reads_out in (False, True) if segments > 1 else (True,):
        _walk[(heads * splits, segments if reads_out else segments - 1, sequences)](
            q,
            k,
            k.stride(0),
            k.stride(1),
            v,
            v.stride(0),
            v.stride(1),
            decays,
            tokens,
            decay if time_step is None else None,
            skip,
            table.chunks,
            table.first_chunk,
            table.slot_in,
            table.slot_out,
            table.save,
            states,
            states.stride(0),
            added,
            faded,
            out,
            segments,
            segment_chunks,
            heads=heads,
            group=heads // k.shape[1],
            value_dim=value_dim,
            key_dim=key_dim,
            splits=splits,
            reads_out=reads_out,
            tokens=size,
            block_v=block_v,
            block_k=block_k,
            stages=stages,
            num_warps=WARPS,
        )
    return out
