"""One decode step of a Mamba2 layer between its two projections, as two kernels.

The first convolves, forms Δ and the decay, and takes one token through the gated accumulation on the state
in its arena slot, which is read once and written once; a program owns some value channels of one head of one
row. B and C of a group are read by all of its heads, so no program of this kernel may move the window on. The
second kernel, which the norm over many heads needs anyway, moves it, and gates and norms.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.gated_norm import (
    GATED_NORM,
    NO_NORM,
    NORM_OF_GATED,
    gated_row,
    part_of,
    warps_of,
)
from denim.recurrence.kernels.short_conv_step import convolve

# Bytes of state that a program takes at most, and at least when rows are few; 128 threads hold either.
MOST_BYTES, LEAST_BYTES = 32768, 16384
WARPS = 4
# With at least so many programs each takes the larger part: 132 multiprocessors with two each.
MANY_PROGRAMS = 264
# Channels of the window that one program moves on.
MOVED = 1024


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _mixed(x_ptr, window_ptr, weight_ptr, bias_ptr, channels, total, width: tl.constexpr, mask):
    """silu of the convolution of `channels`, fp32; the window stays as it is."""
    x = tl.load(x_ptr + channels, mask=mask, other=0.0)
    y = convolve(x, window_ptr, weight_ptr, bias_ptr, channels, total, width, mask)
    return y * tl.sigmoid(y)


@triton.jit
def _step(
    projected_ptr,
    projected_stride,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    delta_least,
    delta_most,
    slots_ptr,
    window_ptr,
    window_stride,
    state_ptr,
    state_stride,
    y_ptr,
    heads: tl.constexpr,
    group: tl.constexpr,
    value_dim: tl.constexpr,
    key_dim: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
):
    head = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    inner: tl.constexpr = heads * value_dim
    keys: tl.constexpr = heads // group * key_dim
    channels: tl.constexpr = inner + 2 * keys
    v_at = part * block_v + tl.arange(0, block_v)
    k_at = tl.arange(0, block_k)
    v_mask = v_at < value_dim
    k_mask = k_at < key_dim
    tile = head * (value_dim * key_dim) + v_at[:, None] * key_dim + k_at[None, :]
    tile_mask = v_mask[:, None] & k_mask[None, :]
    state = state_ptr + slot * state_stride + tile
    s = tl.load(state, mask=tile_mask, other=0.0).to(tl.float32)

    x_ptr = projected_ptr + row * projected_stride + inner
    window = window_ptr + slot * window_stride
    b_at = inner + head // group * key_dim + k_at
    x = _mixed(x_ptr, window, weight_ptr, bias_ptr, head * value_dim + v_at, channels, width, v_mask)
    b = _mixed(x_ptr, window, weight_ptr, bias_ptr, b_at, channels, width, k_mask)
    c = _mixed(x_ptr, window, weight_ptr, bias_ptr, b_at + keys, channels, width, k_mask)
    dt = tl.load(x_ptr + channels + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    delta = tl.minimum(tl.maximum(softplus(dt), delta_least), delta_most)
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * delta)

    s = s * decay + (x * delta)[:, None] * b[None, :]
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=tile_mask)
    y = tl.sum(s * c[None, :], 1) + tl.load(d_ptr + head) * x
    tl.store(y_ptr + row * inner + head * value_dim + v_at, y, mask=v_mask)


@triton.jit
def _finish(
    projected_ptr,
    projected_stride,
    scale_ptr,
    slots_ptr,
    window_ptr,
    window_stride,
    y_ptr,
    out_ptr,
    eps,
    inner: tl.constexpr,
    channels: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    norm: tl.constexpr,
    block: tl.constexpr,
    moved: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    z_ptr = projected_ptr + row * projected_stride
    if part < parts:
        first = part * size
        if scale_ptr is not None:
            scale_ptr += first
        y = y_ptr + row * inner + first
        out = out_ptr + row * inner + first
        gated_row(y, z_ptr + first, scale_ptr, out, tl.minimum(size, inner - first), eps, norm, False, block)
    else:
        at = (part - parts) * moved + tl.arange(0, moved)
        mask = at < channels
        window = window_ptr + slot * window_stride + at
        for j in tl.static_range(1, width - 1):
            tl.store(window + (j - 1) * channels, tl.load(window + j * channels, mask=mask), mask=mask)
        tl.store(window + (width - 2) * channels, tl.load(z_ptr + inner + at, mask=mask), mask=mask)


def rows_of_tile(value_dim: int, key_dim: int, itemsize: int, heads_and_rows: int) -> int:
    """Value channels of one head that a program takes; a power of two."""
    padded = triton.next_power_of_2(value_dim)
    row = triton.next_power_of_2(key_dim) * itemsize
    most = max(1, min(padded, MOST_BYTES // row))
    least = max(1, min(padded, LEAST_BYTES // row))
    return most if heads_and_rows * triton.cdiv(padded, most) >= MANY_PROGRAMS else least


def ssd_step_fused(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    norm_scale: Tensor | None,
    norm_eps: float,
    norm_groups: int,
    norm_before_gate: bool,
    slots: Tensor,
    window: Tensor,
    state: Tensor,
    groups: int,
    delta_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """One token for each of R rows: from the input projection to the input of the output projection.

    projected: [R, inner + channels + H] = [z | x | B | C | Δ], inner = H·P and channels = inner + 2·groups·N,
    rows any distance apart; conv_weight: [channels, W], W >= 2; conv_bias: [channels] or None; a_log, d,
    dt_bias: [H] fp32; norm_scale: [inner] fp32 or None for no norm (`denim.recurrence.kernels.gated_norm`);
    slots: [R] int64, negative for padding; window: [slots, W - 1, channels] and state: [slots, H, P, N],
    views of the arena, updated in place. delta_limit: least and largest Δ. Returns [R, inner] in projected's
    dtype; rows of padding are not written. Rule: `denim.recurrence.gated_accumulation` (SSD); fp32 inside.
    """
    rows = len(projected)
    _, heads, value_dim, key_dim = state.shape
    inner, channels = heads * value_dim, window.shape[2]
    width = conv_weight.shape[1]
    assert (
        projected.stride(1) == 1 and window.stride(1) == channels and width > 1 and state[0].is_contiguous()
    )
    assert channels == inner + 2 * groups * key_dim and projected.shape[1] == inner + channels + heads
    y = torch.empty(rows, inner, dtype=torch.float32, device=projected.device)
    out = torch.empty(rows, inner, dtype=projected.dtype, device=projected.device)
    block_v = rows_of_tile(value_dim, key_dim, state.element_size(), heads * rows)
    splits = triton.cdiv(value_dim, block_v)
    _step[(heads * splits, rows)](
        projected,
        projected.stride(0),
        conv_weight,
        conv_bias,
        a_log,
        d,
        dt_bias,
        *delta_limit,
        slots,
        window,
        window.stride(0),
        state,
        state.stride(0),
        y,
        heads=heads,
        group=heads // groups,
        value_dim=value_dim,
        key_dim=key_dim,
        width=width,
        splits=splits,
        block_v=block_v,
        block_k=triton.next_power_of_2(key_dim),
        num_warps=WARPS,
    )
    norm = NO_NORM if norm_scale is None else GATED_NORM if norm_before_gate else NORM_OF_GATED
    size = part_of(inner, norm_groups, norm)
    parts = triton.cdiv(inner, size)
    _finish[(parts + triton.cdiv(channels, MOVED), rows)](
        projected,
        projected.stride(0),
        norm_scale,
        slots,
        window,
        window.stride(0),
        y,
        out,
        norm_eps,
        inner=inner,
        channels=channels,
        width=width,
        parts=parts,
        size=size,
        norm=norm,
        block=triton.next_power_of_2(size),
        moved=MOVED,
        num_warps=warps_of(size),
    )
    return out
