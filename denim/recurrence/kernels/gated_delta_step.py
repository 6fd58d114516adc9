"""One decode step of a Gated DeltaNet layer between its two projections, as one kernel.

Fuses the short convolution with SiLU, the normalisation of q and k, the gates, the gated delta rule on the
state in its arena slot, and the gated norm. The state is read once and written once; everything else that
moves is a few KiB a row.

A program owns one key head of one row: it alone reads that head's columns of the convolution window and so
may shift them in place, and it takes the value heads of the group one after the other. Offsets into slots
are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.gated_delta import L2NORM_EPS

# Threads of a program: a 128 x 128 state in fp32 takes 64 registers of each of 256 threads.
WARPS = 8


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(x_ptr, window_ptr, weight_ptr, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """silu of the convolution of `channels`, whose window moves on by one column. fp32.

    A short vector lies in several warps at once, and only one of them stores. So every column is read by all
    before it is overwritten: a barrier stands between its last load and its store.
    """
    weight_ptr += channels * width
    window_ptr += channels
    x = tl.load(x_ptr + channels, mask=mask, other=0.0)
    acc = x.to(tl.float32) * _load(weight_ptr + width - 1, mask)
    for j in tl.static_range(width - 1):
        acc += _load(window_ptr + j * total, mask) * _load(weight_ptr + j, mask)
    for j in tl.static_range(1, width - 1):
        column = tl.load(window_ptr + j * total, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(window_ptr + (j - 1) * total, column, mask=mask)
    if width > 1:
        tl.debug_barrier()
        tl.store(window_ptr + (width - 2) * total, x, mask=mask)
    acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)  # the plain form returns the model's dtype here
    return acc * tl.sigmoid(acc)


@triton.jit
def _step(
    projected_ptr,
    projected_stride,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slots_ptr,
    window_ptr,
    window_stride,
    state_ptr,
    state_stride,
    out_ptr,
    scale,
    l2_eps,
    norm_eps,
    beta_limit,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    value_heads: tl.constexpr = key_heads * group
    keys: tl.constexpr = key_heads * key_dim
    values: tl.constexpr = value_heads * value_dim
    channels: tl.constexpr = 2 * keys + values
    x_ptr = projected_ptr + row * projected_stride
    window = window_ptr + slot * window_stride
    k_at = tl.arange(0, block_k)
    v_at = tl.arange(0, block_v)
    k_mask = k_at < key_dim
    v_mask = v_at < value_dim

    q = _convolve(x_ptr, window, weight_ptr, head * key_dim + k_at, channels, width, k_mask)
    k = _convolve(x_ptr, window, weight_ptr, keys + head * key_dim + k_at, channels, width, k_mask)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)

    norm = tl.load(norm_ptr + v_at, mask=v_mask, other=0.0)
    tile = v_at[:, None] * key_dim + k_at[None, :]
    tile_mask = v_mask[:, None] & k_mask[None, :]
    for i in tl.static_range(group):
        value_head = head * group + i
        state = state_ptr + slot * state_stride + value_head * (value_dim * key_dim) + tile
        s = tl.load(state, mask=tile_mask, other=0.0).to(tl.float32)
        v = _convolve(
            x_ptr, window, weight_ptr, 2 * keys + value_head * value_dim + v_at, channels, width, v_mask
        )
        z = _load(x_ptr + channels + value_head * value_dim + v_at, v_mask)
        gates = x_ptr + channels + values + value_head
        beta = beta_limit * tl.sigmoid(tl.load(gates).to(tl.float32))
        a = tl.load(gates + value_heads).to(tl.float32) + tl.load(dt_bias_ptr + value_head).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        decay = tl.exp(-tl.exp(tl.load(a_log_ptr + value_head)) * softplus)

        s = s * decay
        u = beta * (v - tl.sum(s * k[None, :], 1))
        s = s + u[:, None] * k[None, :]
        tl.debug_barrier()  # a small tile lies in several warps at once, as above
        tl.store(state, s.to(state_ptr.dtype.element_ty), mask=tile_mask)
        o = tl.sum(s * q[None, :], 1)

        o = o * tl.rsqrt(tl.sum(o * o, 0) / value_dim + norm_eps) * norm * z * tl.sigmoid(z)
        tl.store(
            out_ptr + row * values + value_head * value_dim + v_at,
            o.to(out_ptr.dtype.element_ty),
            mask=v_mask,
        )


def gated_delta_step_fused(
    projected: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_scale: Tensor,
    norm_eps: float,
    slots: Tensor,
    window: Tensor,
    state: Tensor,
    key_heads: int,
    beta_limit: float = 1.0,
) -> Tensor:
    """One token for each of B rows: from the input projection to the input of the output projection.

    projected: [B, channels + Hv·d_v + 2·Hv] = [q | k | v | z | b | a], rows dense; conv_weight:
    [channels, W]; a_log (fp32), dt_bias: [Hv]; norm_scale: [d_v] fp32; slots: [B] int64, negative for
    padding; window: [slots, W - 1, channels] and state: [slots, Hv, d_v, d_k], views of the arena, updated
    in place. β = beta_limit · sigmoid(b). Returns [B, Hv·d_v] in projected's dtype; rows of padding are not
    written.
    Rule and gates: `denim.recurrence.gated_delta`; fp32 inside.
    """
    rows = projected.shape[0]
    _, value_heads, value_dim, key_dim = state.shape
    width = conv_weight.shape[1]
    assert projected.stride(1) == 1 and window.stride(1) == window.shape[2] and state[0].is_contiguous()
    out = torch.empty(rows, value_heads * value_dim, dtype=projected.dtype, device=projected.device)
    _step[(rows, key_heads)](
        projected,
        projected.stride(0),
        conv_weight,
        a_log,
        dt_bias,
        norm_scale,
        slots,
        window,
        window.stride(0),
        state,
        state.stride(0),
        out,
        key_dim**-0.5,
        L2NORM_EPS,
        norm_eps,
        beta_limit,
        key_heads=key_heads,
        group=value_heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=width,
        block_k=triton.next_power_of_2(key_dim),
        block_v=triton.next_power_of_2(value_dim),
        num_warps=WARPS,
    )
    return out
