"""The short causal convolution of prefill as one kernel, with what follows it channel by channel.

Owns y_t = sum_j weight[:, j] x_{t - (W - 1) + j} + bias over the chunks of a `ChunkTable`, SiLU, and the
scaling of leading heads to length 1 (the queries and keys of a delta rule). Inputs in front of a sequence
come from the window in its slot; the windows behind sequences and saved chunks go straight to their slots.
Knows nothing of what the channels mean otherwise. The plain form is `denim.recurrence.short_conv`.

A program owns some channels of some tokens of a chunk and walks over the tokens, so that an input is read and
widened once. A sequence that writes the slot it reads must not have its window overwritten before all have
read it: so the program of the first chunk takes along the few chunks that begin inside the window's reach
(there are such chunks only where states are saved that early), and writes the last window itself behind a
barrier. Offsets into slots and tokens are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import L2NORM_EPS
from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import silu as act

# Of a program, which is one warp: 8 channels a thread are loads of 16 bytes.
CHANNELS = 256
TOKENS = 8


@triton.jit
def _input(x_ptr, x_stride, window_ptr, start, slot, row, channels, mask, total, past: tl.constexpr):
    """The inputs at `row`, counted over all tokens; in front of `start` from the window, or 0."""
    inside = row >= start
    values = tl.load(x_ptr + row.to(tl.int64) * x_stride + channels, mask=mask & inside, other=0.0)
    window = window_ptr + (row - start + past) * total + channels
    before = tl.load(window, mask=mask & (row < start) & (slot >= 0), other=0.0)
    return tl.where(inside, values, before)


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _convolve(
    x_ptr,
    x_stride,
    weight_ptr,
    weight_stride,
    tap_stride,
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
    all_tokens,
    eps,
    first_part: tl.constexpr,
    second_part: tl.constexpr,
    unit_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    silu: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
):
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    owner = tl.program_id(2)
    past: tl.constexpr = width - 1
    sequence = tl.load(chunks_ptr + chunk * 3)
    first = tl.load(chunks_ptr + chunk * 3 + 1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if (sequence < 0) | (part * tokens >= count):
        return
    start = tl.load(cu_seqlens_ptr + sequence)
    place = first - start
    if (place > 0) & (place < past) & (part == 0):
        return  # the program of the sequence's first chunk takes it along
    slot = tl.load(slot_in_ptr + sequence)
    window = window_ptr + slot * window_stride

    lane = tl.arange(0, block)[None, :]
    head = tl.arange(0, heads)[:, None]
    unit_owners: tl.constexpr = (unit_heads + heads - 1) // heads
    unit = owner < unit_owners
    first_channel = tl.where(
        unit, owner * (heads * head_dim), unit_heads * head_dim + (owner - unit_owners) * (heads * block)
    )
    channels = first_channel + head * tl.where(unit, head_dim, block) + lane
    live = tl.where(unit, (owner * heads + head < unit_heads) & (lane < head_dim), channels < total)

    out_stride = total
    out = out_ptr + channels
    if second_part > 0:  # three tensors one behind the other; a program's rows of channels lie in one of them
        lowest = first_channel + head * tl.where(unit, head_dim, block)
        third: tl.constexpr = first_part + second_part
        part_begin = tl.where(lowest < first_part, 0, tl.where(lowest < third, first_part, third))
        out_stride = tl.where(
            lowest < first_part, first_part, tl.where(lowest < third, second_part, total - third)
        )
        out += part_begin.to(tl.int64) * (all_tokens - 1)

    along = 1
    if (place == 0) & (part == 0):
        last = tl.load(first_chunk_ptr + sequence + 1)
        for i in tl.static_range(1, past):
            real = chunk + i < last
            begin = tl.load(chunks_ptr + (chunk + i) * 3 + 1, mask=real, other=0)
            along += (real & (begin - start < past)).to(tl.int32)

    taps = ()
    for j in tl.static_range(width):
        tap = tl.load(weight_ptr + channels * weight_stride + j * tap_stride, mask=live, other=0.0)
        taps = taps + (tap.to(tl.float32),)  # noqa: RUF005
    offset = tl.zeros([heads, block], tl.float32)
    if bias_ptr is not None:
        offset += tl.load(bias_ptr + channels, mask=live, other=0.0).to(tl.float32)
    for i in range(along):
        if i > 0:
            first = tl.load(chunks_ptr + (chunk + i) * 3 + 1)
            count = tl.load(chunks_ptr + (chunk + i) * 3 + 2)
        end = first + count
        row = first + part * tokens
        inputs = ()  # all loads before the first use, so that they overlap
        for j in tl.static_range(past):
            values = _input(x_ptr, x_stride, window, start, slot, row - past + j, channels, live, total, past)
            inputs = inputs + (values,)  # noqa: RUF005
        for t in tl.static_range(tokens):
            at = (row + t).to(tl.int64) * x_stride
            values = tl.load(x_ptr + at + channels, mask=live & (row + t < end), other=0.0)
            inputs = inputs + (values,)  # noqa: RUF005
        for t in tl.static_range(tokens):
            acc = offset
            for j in tl.static_range(width):
                acc += inputs[t + j].to(tl.float32) * taps[j]
            if silu:
                acc = act(acc)
            if unit_heads > 0:
                length = tl.sum(tl.where(live, acc * acc, 0.0), 1)[:, None]
                acc *= tl.where(unit, tl.rsqrt(length + eps), 1.0)
            target = out + (row + t).to(tl.int64) * out_stride
            tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live & (row + t < end))

        if save_ptr is not None:
            save = tl.load(save_ptr + chunk + i)
            kept = live & (save >= 0) & (row + tokens >= end)
            target = window_ptr + save * window_stride + channels
            for j in tl.static_range(past):
                values = _input(
                    x_ptr, x_stride, window, start, slot, end - past + j, channels, kept, total, past
                )
                tl.store(target + j * total, values, mask=kept)

    if (place == 0) & (part == 0):
        target_slot = tl.load(slot_out_ptr + sequence)
        end = tl.load(cu_seqlens_ptr + sequence + 1)
        target = window_ptr + target_slot * window_stride + channels
        kept = live & (target_slot >= 0)
        lasts = ()
        for j in tl.static_range(past):
            values = _input(x_ptr, x_stride, window, start, slot, end - past + j, channels, kept, total, past)
            lasts = lasts + (values,)  # noqa: RUF005
        tl.debug_barrier()
        for j in tl.static_range(past):
            tl.store(target + j * total, lasts[j], mask=kept)


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
    apart: tuple[int, int] | None = None,
) -> Tensor:
    """The convolution over the sequences of `table`; windows are read from and written to their slots.

    x: [T, C], rows any distance apart, channels dense; weight: [C, W] with W >= 2, any strides; bias: [C];
    windows: [slots, W - 1, C] in x's dtype, oldest input first, slots any distance apart. The first
    unit_heads * head_dim channels are heads that are scaled to length 1 behind the activation (`l2norm` of
    `denim.recurrence.gated_delta`).
    Returns [T, C] dense in x's dtype; sums are fp32. Rows of no chunk are not written. `apart`: the widths of
    two groups of unit heads; then the result [T * C] holds the first group of all tokens, then the second,
    then the rest: three dense tensors.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1 and windows.stride(1) == channels and width > 1
    assert windows.dtype == x.dtype and windows.shape[1] == width - 1
    assert apart is None or sum(apart) == unit_heads * head_dim  # no row of channels lies in two parts
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(head_dim) if unit_heads else CHANNELS
    heads = max(1, CHANNELS // block)
    steps = min(TOKENS, triton.next_power_of_2(table.size))
    owners = triton.cdiv(unit_heads, heads) + triton.cdiv(channels - unit_heads * head_dim, heads * block)
    _convolve[(len(table.chunks), triton.cdiv(table.size, steps), owners)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight.stride(1),
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
        tokens,
        L2NORM_EPS,
        first_part=apart[0] if apart else 0,
        second_part=apart[1] if apart else 0,
        unit_heads=unit_heads,
        head_dim=head_dim,
        width=width,
        silu=silu,
        tokens=steps,
        heads=heads,
        block=block,
        num_warps=1,
    )
    return out.view(-1) if apart else out
