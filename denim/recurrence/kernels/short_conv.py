"""The short causal convolution of prefill as one kernel, with what follows it channel by channel.

Owns y_t = sum_j weight[:, j] x_{t - (W - 1) + j} + bias over the chunks of a `ChunkTable`, SiLU, and the
scaling of leading heads to length 1 (the queries and keys of a delta rule). Inputs in front of a sequence
come from the window in its slot; the windows behind sequences and saved chunks go straight to their slots.
Knows nothing of what the channels mean otherwise. The plain form is `denim.recurrence.short_conv`.

A program owns some channels of one chunk. A sequence that writes the slot it reads must not have its window
overwritten before all have read it: so the program of the first chunk takes along the few chunks that begin
inside the window's reach (there are such chunks only where states are saved that early), and writes the last
window itself behind a barrier. Offsets into slots and tokens are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import L2NORM_EPS

# Of a program: 64 x 128 values are 16 loads of 16 bytes in flight for each of 128 threads.
TOKENS = 64
CHANNELS = 128


@triton.jit
def _inputs(x_ptr, x_stride, window_ptr, start, slot, row, step, channels, mask, total, past: tl.constexpr):
    """Inputs at row + step, counted over all tokens; those in front of `start` from the window, or 0."""
    rows = row + step
    values = tl.load(
        x_ptr + rows[:, None].to(tl.int64) * x_stride + channels[None, :],
        mask=mask & (rows >= start)[:, None],
        other=0.0,
    )
    if (row < start) & (slot >= 0):
        values += tl.load(
            window_ptr + (rows - start + past)[:, None] * total + channels[None, :],
            mask=mask & (rows < start)[:, None],
            other=0.0,
        )
    return values


# The table's tensors are views at any offset; compiling once for each alignment of theirs would gain nothing.
@triton.jit(
    do_not_specialize_on_alignment=[
        "chunks_ptr",
        "first_chunk_ptr",
        "cu_seqlens_ptr",
        "slot_in_ptr",
        "slot_out_ptr",
        "save_ptr",
    ]
)
def _convolve(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    out_ptr,
    chunks_ptr,
    first_chunk_ptr,
    cu_seqlens_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    window_ptr,
    window_stride,
    total,
    eps,
    unit_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    silu: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
    past_block: tl.constexpr,
):
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    owner = tl.program_id(2)
    past: tl.constexpr = width - 1
    sequence = tl.load(chunks_ptr + chunk * 3)
    if sequence < 0:
        return
    start = tl.load(cu_seqlens_ptr + sequence)
    place = tl.load(chunks_ptr + chunk * 3 + 1) - start
    if (place > 0) & (place < past) & (part == 0):
        return  # the program of the sequence's first chunk takes it along
    if part * tokens >= tl.load(chunks_ptr + chunk * 3 + 2):
        return
    slot = tl.load(slot_in_ptr + sequence)
    window = window_ptr + slot * window_stride

    lane = tl.arange(0, block)
    if owner < unit_heads:
        channels = owner * head_dim + lane
        live = lane < head_dim
    else:
        channels = unit_heads * head_dim + (owner - unit_heads) * block + lane
        live = channels < total

    along = 1
    if (place == 0) & (part == 0):
        last = tl.load(first_chunk_ptr + sequence + 1)
        for i in tl.static_range(1, past):
            real = chunk + i < last
            first = tl.load(chunks_ptr + (chunk + i) * 3 + 1, mask=real, other=0)
            along += (real & (first - start < past)).to(tl.int32)

    step = tl.arange(0, tokens)
    behind = tl.arange(0, past_block)
    for i in range(along):
        first = tl.load(chunks_ptr + (chunk + i) * 3 + 1)
        end = first + tl.load(chunks_ptr + (chunk + i) * 3 + 2)
        row = first + part * tokens
        rows = row + step
        mask = (rows < end)[:, None] & live[None, :]
        acc = tl.zeros([tokens, block], tl.float32)
        for j in tl.static_range(width):
            tap = tl.load(weight_ptr + channels * width + j, mask=live, other=0.0).to(tl.float32)
            values = _inputs(
                x_ptr, x_stride, window, start, slot, row - past + j, step, channels, mask, total, past
            )
            acc += values.to(tl.float32) * tap[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + channels, mask=live, other=0.0).to(tl.float32)[None, :]
        if silu:
            acc = acc * tl.sigmoid(acc)
        if owner < unit_heads:
            acc = tl.where(live[None, :], acc, 0.0)
            acc = acc * tl.rsqrt(tl.sum(acc * acc, 1) + eps)[:, None]
        out = out_ptr + rows[:, None].to(tl.int64) * total + channels[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)

        if save_ptr is not None:
            save = tl.load(save_ptr + chunk + i)
            if (save >= 0) & (row + tokens >= end):
                inside = (behind < past)[:, None] & live[None, :]
                kept = _inputs(
                    x_ptr, x_stride, window, start, slot, end - past, behind, channels, inside, total, past
                )
                target = window_ptr + save * window_stride + behind[:, None] * total + channels[None, :]
                tl.store(target, kept, mask=inside)

    if (place == 0) & (part == 0):
        target_slot = tl.load(slot_out_ptr + sequence)
        end = tl.load(cu_seqlens_ptr + sequence + 1)
        inside = (behind < past)[:, None] & live[None, :]
        kept = _inputs(
            x_ptr, x_stride, window, start, slot, end - past, behind, channels, inside, total, past
        )
        tl.debug_barrier()
        target = window_ptr + target_slot * window_stride + behind[:, None] * total + channels[None, :]
        tl.store(target, kept, mask=inside & (target_slot >= 0))


def short_conv_chunks(
    x: Tensor,
    weight: Tensor,
    table: ChunkTable,
    windows: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    unit_heads: int = 0,
    head_dim: int = 0,
) -> Tensor:
    """The convolution over the sequences of `table`; windows are read from and written to their slots.

    x: [T, C], rows any distance apart, channels dense; weight: [C, W] with W >= 2; bias: [C]; windows:
    [slots, W - 1, C] in x's dtype, oldest input first, slots any distance apart. The first unit_heads *
    head_dim channels are heads that are scaled to length 1 behind the activation (`l2norm` of
    `denim.recurrence.gated_delta`).
    Returns [T, C] dense in x's dtype; sums are fp32. Rows of no chunk are not written.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and windows.stride(1) == channels and width > 1
    assert windows.dtype == x.dtype and windows.shape[1] == width - 1
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(head_dim) if unit_heads else CHANNELS
    owners = unit_heads + triton.cdiv(channels - unit_heads * head_dim, block)
    block_tokens = min(TOKENS, triton.next_power_of_2(table.size))
    _convolve[(len(table.chunks), triton.cdiv(table.size, block_tokens), owners)](
        x,
        x.stride(0),
        weight,
        bias,
        out,
        table.chunks,
        table.first_chunk,
        table.cu_seqlens,
        table.slot_in,
        table.slot_out,
        table.save,
        windows,
        windows.stride(0),
        channels,
        L2NORM_EPS,
        unit_heads=unit_heads,
        head_dim=head_dim,
        width=width,
        silu=silu,
        tokens=block_tokens,
        block=block,
        past_block=triton.next_power_of_2(width - 1),
        num_warps=4,
    )
    return out
