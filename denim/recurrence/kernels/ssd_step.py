"""One token of SSD for each of many rows, on states in arena slots, which are read once and written once.

Fuses what makes Δ, the decay, the rule, its read-out and the skip; a program owns some value channels of one
head of one row. With the convolution before it and the gated norm behind it, kernels of their own, it is the
decode step of a Mamba2 layer: B and C of a group are read by all of its heads, and the norm sees many heads,
so that one kernel would do the same work many times over or have to wait in its middle. Each of the three
begins while the one before it ends (`overlap`): this one with fetching the states.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.exponentials import exp, softplus
from denim.recurrence.kernels.gated_norm import gated_norm
from denim.recurrence.kernels.overlap import launch_options, overlaps
from denim.recurrence.kernels.short_conv_step import short_conv_step_slots

# State of a program: numbers, which a warp holds in 32 registers of each thread.
TILE, WARPS = 1024, 1


@triton.jit
def _step(
    mixed_ptr,
    dt_ptr,
    dt_stride,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    delta_least,
    delta_most,
    slots_ptr,
    state_ptr,
    state_stride,
    y_ptr,
    heads: tl.constexpr,
    group: tl.constexpr,
    value_dim: tl.constexpr,
    key_dim: tl.constexpr,
    splits: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
):
    head = tl.program_id(0) // splits
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    inner: tl.constexpr = heads * value_dim
    keys: tl.constexpr = heads // group * key_dim
    v_at = tl.program_id(0) % splits * block_v + tl.arange(0, block_v)
    k_at = tl.arange(0, block_k)
    v_mask = v_at < value_dim
    k_mask = k_at < key_dim
    tile = head * (value_dim * key_dim) + v_at[:, None] * key_dim + k_at[None, :]
    tile_mask = v_mask[:, None] & k_mask[None, :] & (slot >= 0)
    state = state_ptr + slot * state_stride + tile
    # The convolution before this kernel writes neither states nor dt.
    s = tl.load(state, mask=tile_mask, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    delta = tl.minimum(tl.maximum(softplus(dt), delta_least), delta_most)
    decay = exp(-exp(tl.load(a_log_ptr + head)) * delta)
    skip = tl.load(d_ptr + head)
    if overlap:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if slot < 0:
        return
    mixed_ptr += row * (inner + 2 * keys)
    b_ptr = mixed_ptr + inner + head // group * key_dim
    x = tl.load(mixed_ptr + head * value_dim + v_at, mask=v_mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + k_at, mask=k_mask, other=0.0).to(tl.float32)
    c = tl.load(b_ptr + keys + k_at, mask=k_mask, other=0.0).to(tl.float32)

    s = s * decay + (x * delta)[:, None] * b[None, :]
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=tile_mask)
    y = tl.sum(s * c[None, :], 1) + skip * x
    tl.store(y_ptr + row * inner + head * value_dim + v_at, y, mask=v_mask)


def value_block(value_dim: int, key_dim: int) -> int:
    """Value channels of a program: a power of two."""
    return max(1, min(triton.next_power_of_2(value_dim), TILE // triton.next_power_of_2(key_dim)))


def ssd_step(
    mixed: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    state: Tensor,
    groups: int,
    delta_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """The rule with its skip: [R, H·P] in fp32; rows of padding are not written.

    mixed: [R, H·P + 2·groups·N] = [x | B | C] dense, behind convolution and SiLU; dt: [R, H], rows any
    distance apart, Δ = softplus(dt + dt_bias) clamped to delta_limit; the rest as in `ssd_step_fused`. If
    kernels overlap, the one launched last before this must write `mixed` and nothing else that is read here.
    """
    rows = len(mixed)
    _, heads, value_dim, key_dim = state.shape
    inner = heads * value_dim
    assert mixed.is_contiguous() and mixed.shape[1] == inner + 2 * groups * key_dim and dt.stride(1) == 1
    assert state[0].is_contiguous()
    y = torch.empty(rows, inner, dtype=torch.float32, device=mixed.device)
    block_v = value_block(value_dim, key_dim)
    splits = triton.cdiv(value_dim, block_v)
    overlap = overlaps(mixed.device)
    _step[(heads * splits, rows)](
        mixed,
        dt,
        dt.stride(0),
        a_log,
        d,
        dt_bias,
        *delta_limit,
        slots,
        state,
        state.stride(0),
        y,
        heads=heads,
        group=heads // groups,
        value_dim=value_dim,
        key_dim=key_dim,
        splits=splits,
        block_v=block_v,
        block_k=triton.next_power_of_2(key_dim),
        overlap=overlap,
        num_warps=WARPS,
        **launch_options(overlap),
    )
    return y


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
    dtype; rows of padding hold anything. Rule: `denim.recurrence.gated_accumulation` (SSD); fp32 inside.
    """
    _, heads, value_dim, key_dim = state.shape
    inner, channels = heads * value_dim, window.shape[2]
    assert channels == inner + 2 * groups * key_dim and projected.shape[1] == inner + channels + heads
    z, xbc, dt = projected.split((inner, channels, heads), dim=-1)
    mixed = short_conv_step_slots(xbc, conv_weight, conv_bias, slots, window, silu=True)
    y = ssd_step(mixed, dt, a_log, d, dt_bias, slots, state, groups, delta_limit)
    return gated_norm(y, z, norm_scale, norm_eps, groups=norm_groups, before_gate=norm_before_gate)
