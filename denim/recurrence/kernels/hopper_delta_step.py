"""One decode step of a delta-rule layer between its projections, on Hopper: heads one behind the other.

Owns the kernel; it does what `gated_delta_step` and `kimi_delta_step` do elsewhere, by the same formulas and
with scalar or vector decay, for fp32 states of 128 x 128 that are written in every step. A program takes all
value heads of a key head (`state_ring`), so a window has one owner and an output is normalised by the program
that has all of it: programs wait for nobody. What the next head needs beside its state is asked for while one
is computed.

Rows of padding are skipped. Offsets into slots are 64-bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.gated_delta import L2NORM_EPS
from denim.recurrence.kernels.overlap import launch_options
from denim.recurrence.kernels.state_ring import (
    DIM,
    HALVES,
    PARTS,
    PIECE,
    ROWS,
    WARPS,
    barrier,
    behind,
    bring,
    give,
    live,
    new_ring,
    pieces_of,
    processors,
    slot_of,
    slot_pieces,
    stages_for,
    take,
)
from denim.recurrence.kernels.state_ring import suits as ring_suits

LINEAR = gl.constexpr(20.0)  # above it softplus(x) = x in fp32

# Key heads of all rows, for each value head of one, below which heads spread over programs are faster.
LEAST_HEADS = 32


def suits(state: Tensor, rows: int, key_heads: int) -> bool:
    """Whether the kernel takes a step of so many rows with states [slots, Hv, d_v, d_k], and is faster: as
    measured on an H200. With few rows most multiprocessors would have no head."""
    group = state.shape[1] // key_heads
    return ring_suits(state) and rows * key_heads >= LEAST_HEADS * group


@gluon.jit
def _columns(
    windows,
    head,
    units,
    lanes,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    width: gl.constexpr,
):
    """The window's columns for q, k and v of a value head, side by side, and the taps."""
    window_ptr, window_stride, taps_ptr = windows
    unit, i, slot = head
    section, _ = lanes
    channels: gl.constexpr = (2 + group) * key_heads * DIM
    at = _channels(unit, i, lanes, key_heads, group)
    mask = (section < 3) & (unit < units)
    window = window_ptr + slot * window_stride + at
    columns = ()
    taps = ()
    for j in gl.static_range(width):
        if j < width - 1:
            columns = columns + (gl.load(window + j * channels, mask=mask, other=0.0),)  # noqa: RUF005
        taps = taps + (gl.load(taps_ptr + at + j * channels, mask=mask, other=0.0),)  # noqa: RUF005
    return columns, taps


@gluon.jit
def _channels(unit, i, lanes, key_heads: gl.constexpr, group: gl.constexpr):
    """Of q, k and v (sections 0 to 2) of value head i of a key head, in [q | k | v]."""
    section, lane = lanes
    head = unit % key_heads
    return gl.where(section < 2, section * key_heads + head, 2 * key_heads + head * group + i) * DIM + lane


@gluon.jit
def _token(
    tensors,
    unit,
    i,
    units,
    lanes,
    places,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
):
    """What the projections made of the token for a value head: q, k and v; the gate; b and a."""
    x_ptr, x_stride, z_ptr, z_stride, b_ptr, b_stride, a_ptr, a_stride = tensors
    section, _ = lanes
    whole, spread = places
    row = (unit // key_heads).to(gl.int64)
    value_head = (unit % key_heads) * group + i
    there = unit < units
    at = _channels(unit, i, lanes, key_heads, group)
    x = gl.load(x_ptr + row * x_stride + at, mask=(section < 3) & there, other=0.0)
    z = gl.load(z_ptr + row * z_stride + value_head * DIM + whole, mask=(whole >= 0) & there, other=0.0)
    b = gl.load(b_ptr + row * b_stride + value_head, mask=there, other=0.0)
    if vector_decay:
        at = a_ptr + row * a_stride + value_head * DIM + spread
        a = gl.load(at, mask=(spread >= 0) & there, other=0.0)
    else:
        a = gl.load(a_ptr + row * a_stride + value_head, mask=there, other=0.0)
    return x, z, b, a


@gluon.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "b_ptr", "a_ptr"])
def _step(
    desc,
    x_ptr,
    x_stride,
    z_ptr,
    z_stride,
    b_ptr,
    b_stride,
    a_ptr,
    a_stride,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slots_ptr,
    window_ptr,
    window_stride,
    out_ptr,
    between,
    rows,
    scale,
    l2_eps,
    norm_eps,
    beta_limit,
    floor,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
    floored: gl.constexpr,
    sigmoid_gate: gl.constexpr,
    width: gl.constexpr,
    stages: gl.constexpr,
):
    warps: gl.constexpr = gl.num_warps()
    # A tile of a state: 4 channels of each of the 4 parts of a row for a thread, and every 4 · warps-th row.
    pieces: gl.constexpr = gl.BlockedLayout([PARTS, 4], [4, 8], [warps, 1], [1, 0])
    tile: gl.constexpr = gl.BlockedLayout([1, PARTS, 4], [4, 1, 8], [warps, 1, 1], [2, 1, 0])
    key: gl.constexpr = gl.SliceLayout(0, tile)
    value: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, tile))
    side_by_side: gl.constexpr = gl.BlockedLayout([1, 16 // warps], [1, 32], [4, warps // 4], [1, 0])
    in_warp: gl.constexpr = gl.BlockedLayout([4], [32], [warps], [0])
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring, full = new_ring(stages)
    mixed = gl.allocate_shared_memory(gl.float32, [1, 4, DIM], lines)
    by_parts = mixed._reinterpret(gl.float32, [4, PARTS, PIECE], lines)
    by_head = mixed._reinterpret(gl.float32, [4, DIM], line)
    read_out = gl.allocate_shared_memory(gl.float32, [1, DIM], line)
    if vector_decay:
        decays = gl.allocate_shared_memory(gl.float32, [1, PARTS, PIECE], lines)
        decay_line = decays._reinterpret(gl.float32, [1, DIM], line)

    channels: gl.constexpr = (2 + group) * key_heads * DIM
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    units = rows * key_heads
    section = gl.arange(0, 4, layout=gl.SliceLayout(1, side_by_side))[:, None]
    lane = gl.arange(0, DIM, layout=gl.SliceLayout(0, side_by_side))[None, :]
    whole = gl.arange(0, DIM, layout=in_warp)
    spread = gl.arange(0, DIM, layout=one_each)
    tensors = (x_ptr, x_stride, z_ptr, z_stride, b_ptr, b_stride, a_ptr, a_stride)
    windows = (window_ptr, window_stride, taps_ptr)
    lanes = (section, lane)
    places = (whole, spread)

    # The kernel before this one writes x, z, b and a: all else is asked for before that one has ended.
    unit = gl.program_id(0)
    unit, slot = live(unit, slot_of(unit, slots_ptr, units, key_heads), slots_ptr, units, key_heads)
    i = 0
    bring(desc, ring, full, 0, (unit, i, slot), units, between, key_heads, group, stages)
    columns, taps = _columns(windows, (unit, i, slot), units, lanes, key_heads, group, width)
    norm = gl.load(norm_ptr + whole)
    next_unit, next_i = behind(unit, i, group)
    next_slot = slot_of(next_unit, slots_ptr, units, key_heads)
    next_unit, next_slot = live(next_unit, next_slot, slots_ptr, units, key_heads)
    if stages > 2:
        second = (next_unit, next_i, next_slot)
        bring(desc, ring, full, 1, second, units, between, key_heads, group, stages)
    third_unit, third_i = behind(next_unit, next_i, group)
    third_slot = slot_of(third_unit, slots_ptr, units, key_heads)
    third_unit, third_slot = live(third_unit, third_slot, slots_ptr, units, key_heads)
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()
    x, z, b, a = _token(tensors, unit, i, units, lanes, places, key_heads, group, vector_decay)

    count = 0
    while unit < units:
        head = unit % key_heads
        row = (unit // key_heads).to(gl.int64)
        value_head = head * group + i
        far_unit, far_i = behind(third_unit, third_i, group)
        far_slot = slot_of(far_unit, slots_ptr, units, key_heads)
        next_head = (next_unit, next_i, next_slot)
        next_columns, next_taps = _columns(windows, next_head, units, lanes, key_heads, group, width)
        next_x, next_z, next_b, next_a = _token(
            tensors, next_unit, next_i, units, lanes, places, key_heads, group, vector_decay
        )

        acc = x.to(gl.float32) * taps[width - 1].to(gl.float32)
        for j in gl.static_range(width - 1):
            acc += columns[j].to(gl.float32) * taps[j].to(gl.float32)
        acc = acc.to(dtype).to(gl.float32)  # the plain form returns the model's dtype here
        mixed.index(0).store(acc / (1.0 + gl.exp(-acc)))
        beta = beta_limit / (1.0 + gl.exp(-b.to(gl.float32)))
        rate = gl.exp(gl.load(a_log_ptr + value_head))
        if vector_decay:
            biased = a.to(gl.float32) + gl.load(dt_bias_ptr + value_head * DIM + spread)
        else:
            biased = a.to(gl.float32) + gl.load(dt_bias_ptr + value_head).to(gl.float32)
        if floored:
            log_decay = floor / (1.0 + gl.exp(-rate * biased))
        else:
            softplus = gl.log(1.0 + gl.exp(gl.minimum(biased, LINEAR)))
            log_decay = -rate * gl.where(biased > LINEAR, biased, softplus)
        decay = gl.exp(log_decay)
        if vector_decay:
            decay_line.index(0).store(decay)
        # A thread has read what it overwrites. q and k are moved on for the last value head.
        moved = window_ptr + slot * window_stride + _channels(unit, i, lanes, key_heads, group)
        mask = (section == 2) | ((section < 2) & (i == group - 1))
        for j in gl.static_range(width - 1):
            if j < width - 2:
                gl.store(moved + j * channels, columns[j + 1], mask=mask)
            else:
                gl.store(moved + j * channels, x, mask=mask)
        barrier()
        tma.store_wait(0)  # the state before this one has left the ring
        if stages > 2:
            third = (third_unit, third_i, third_slot)
            bring(desc, ring, full, count + 2, third, units, between, key_heads, group, stages)
        else:
            bring(desc, ring, full, count + 1, next_head, units, between, key_heads, group, stages)

        q = by_parts.index(0).load(key)
        k = by_parts.index(1).load(key)
        qq = gl.sum(gl.sum(q * q, 0), 0)
        kk = gl.sum(gl.sum(k * k, 0), 0)
        qk = gl.sum(gl.sum(q * k, 0), 0)
        q_norm = gl.rsqrt(qq + l2_eps) * scale
        k_norm = gl.rsqrt(kk + l2_eps)
        if vector_decay:
            decay = decays.index(0).load(key)
            k_read = k * decay
            q_read = q * decay
            decay = decay[None, :, :]
        for half in gl.static_range(HALVES):
            v = by_head.index(2).slice(half * ROWS, ROWS).load(value)
            state = take(ring, full, count, half, pieces, tile, stages)
            # Both reads from the state as it was, so that neither waits for the other:
            # S q = S' q + u (k . q).
            if vector_decay:
                read_k = gl.sum(gl.sum(state * k_read[None, :, :], 1), 1)
                read_q = gl.sum(gl.sum(state * q_read[None, :, :], 1), 1)
            else:
                read_k = gl.sum(gl.sum(state * k[None, :, :], 1), 1) * decay
                read_q = gl.sum(gl.sum(state * q[None, :, :], 1), 1) * decay
            u = beta * (v - read_k * k_norm)
            o = read_q * q_norm + u * (qk * q_norm * k_norm)
            read_out.index(0).slice(half * ROWS, ROWS).store(o)
            state = state * decay + gl.expand_dims(gl.expand_dims(u * k_norm, 1), 1) * k[None, :, :]
            give(desc, ring, state, count, half, (unit, i, slot), between, pieces, key_heads, group, stages)
        o = read_out.index(0).load(in_warp)
        y = o * gl.rsqrt(gl.sum(o * o, 0) / DIM + norm_eps) * norm
        gate = z.to(gl.float32)
        y = y / (1.0 + gl.exp(-gate))
        if not sigmoid_gate:
            y = y * gate
        gl.store(out_ptr + (row * (key_heads * group) + value_head) * DIM + whole, y.to(dtype))

        unit = next_unit
        i = next_i
        slot = next_slot
        columns = next_columns
        taps = next_taps
        x = next_x
        z = next_z
        b = next_b
        a = next_a
        next_unit = third_unit
        next_i = third_i
        next_slot = third_slot
        third_unit, third_slot = live(far_unit, far_slot, slots_ptr, units, key_heads)
        third_i = far_i
        count += 1
    tma.store_wait(0)


def hopper_delta_step(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_scale: Tensor,
    norm_eps: float,
    slots: Tensor,
    window: Tensor,
    state: Tensor,
    key_heads: int,
    *,
    vector_decay: bool,
    beta_limit: float = 1.0,
    decay_floor: float | None = None,
    stages: int | None = None,
) -> Tensor:
    """One token for each of B rows, [B, Hv · 128], for states that `state_ring` takes.

    qkv: [B, at least channels]; z: [B, Hv · 128], b: [B, Hv], a: [B, Hv] or, with vector decay, [B, H · 128]:
    rows dense, any distance apart; all else as in `gated_delta_step.gated_delta_step_fused` and, with vector
    decay and a sigmoid for a gate, `kimi_delta_step.kimi_delta_step_fused`. The kernel launched last before
    this must write some of qkv, z, b and a and nothing else that is read here.
    """
    rows, value_heads = len(qkv), state.shape[1]
    out = torch.empty(rows, value_heads * DIM.value, dtype=qkv.dtype, device=qkv.device)
    if stages is None:
        stages = stages_for(rows * value_heads, qkv.device)
    if rows:
        _step[(min(processors(qkv.device), rows * key_heads),)](
            pieces_of(state),
            qkv,
            qkv.stride(0),
            z,
            z.stride(0),
            b,
            b.stride(0),
            a,
            a.stride(0),
            conv_taps,
            a_log,
            dt_bias,
            norm_scale,
            slots,
            window,
            window.stride(0),
            out,
            slot_pieces(state),
            rows,
            DIM.value**-0.5,
            L2NORM_EPS,
            norm_eps,
            beta_limit,
            decay_floor or 0.0,
            key_heads=key_heads,
            group=value_heads // key_heads,
            vector_decay=vector_decay,
            floored=decay_floor is not None,
            sigmoid_gate=vector_decay,
            width=len(conv_taps),
            stages=stages,
            num_warps=WARPS,
            **launch_options(overlap=True),
        )
    return out
