"""One decode step of the delta rule alone, on states in slots: q, k, v, decay and strength are given.

The same arithmetic as `fused_delta_step` without what surrounds it in a layer; what other libraries' decode
kernels do, so that they can be compared. On Hopper `hopper_rule_step` takes what suits it. Offsets into slots
are 64-bit; a row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.delta_tile import (
    Tiling,
    in_parts,
    key_channels,
    load,
    outer,
    read,
    tile_offsets,
)
from denim.recurrence.kernels.hopper import on_hopper
from denim.recurrence.operands import check_heads, check_operands


def tiling_of(states: int) -> Tiling:
    """For so many states [d_v, d_k] of all rows together, as measured on an H200."""
    if states < 64:
        return Tiling(8, 1)
    return Tiling(16, 2, inner=64) if states < 1024 else Tiling(8, 1, inner=64)


@triton.jit
def _rule_step(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    slots_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    scale,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    vector_decay: tl.constexpr,
    parts: tl.constexpr,
    inner: tl.constexpr,
    tile_rows: tl.constexpr,
    splits: tl.constexpr,
):
    value_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    value_heads: tl.constexpr = key_heads * group
    k_at = tl.arange(0, parts * inner)
    v_at = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    exact: tl.constexpr = parts * inner == key_dim and splits * tile_rows == value_dim
    k_mask = None if exact else k_at < key_dim
    v_mask = None if exact else v_at < value_dim
    key_row = (row * key_heads + value_head // group) * key_dim + k_at
    value_row = row * value_heads + value_head
    q = load(q_ptr + key_row, k_mask).to(tl.float32)
    k = load(k_ptr + key_row, k_mask).to(tl.float32)
    v = load(v_ptr + value_row * value_dim + v_at, v_mask).to(tl.float32)
    beta = tl.load(beta_ptr + value_row).to(tl.float32)
    if vector_decay:
        log_decay = load(log_decay_ptr + value_row * key_dim + k_at, k_mask)
    else:
        log_decay = tl.load(log_decay_ptr + value_row)
    if slot < 0:
        return
    key_tile = key_channels(parts, inner)
    tile = tile_offsets(v_at, key_tile, key_dim)
    tile_mask = None if exact else (v_at < value_dim)[:, None, None] & (key_tile < key_dim)
    state = state_ptr + slot * state_stride + value_head * (value_dim * key_dim) + tile
    s = load(state, tile_mask).to(tl.float32)
    qk = tl.sum(q * k, 0)
    decay = tl.exp(log_decay.to(tl.float32))
    if vector_decay:
        decay = in_parts(decay, parts, inner)
    q = in_parts(q, parts, inner)
    k = in_parts(k, parts, inner)
    # Both reads from the state as it was, so that neither waits for the other: S q = S' q + u (k . q).
    if vector_decay:
        u = beta * (v - read(s, k * decay))
        o = (read(s, q * decay) + u * qk) * scale
    else:
        u = beta * (v - read(s, k) * decay)
        o = (read(s, q) * decay + u * qk) * scale
    s = s * decay + outer(u, k)
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=tile_mask, cache_modifier=".cs")
    tl.store(out_ptr + value_row * value_dim + v_at, o.to(out_ptr.dtype.element_ty), mask=v_mask)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    slots: Tensor,
    state: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """One token for each of B rows; `state` is updated in place. `gated_delta.gated_delta_step` on slots.

    q, k: [B, Hk, d_k], normalised by the caller; v: [B, Hv, d_v]; log_decay: [B, Hv] or, for a decay per key
    channel, [B, Hv, d_k]; beta: [B, Hv]; all dense. slots: [B] int64, negative for padding; state:
    [slots, Hv, d_v, d_k], a view of the arena. q is scaled by d_k ** -0.5. Returns [B, Hv, d_v] in v's dtype;
    rows of padding are not written. fp32 inside. ValueError for operands that do not fit each other; slots
    are not looked at, since that would wait for the device.
    """
    sizes = check_operands(
        q=(q, "T Hk d_k"),
        k=(k, "T Hk d_k"),
        v=(v, "T Hv d_v"),
        log_decay=(log_decay, "T Hv d_k" if log_decay.dim() == 3 else "T Hv"),
        beta=(beta, "T Hv"),
        state=(state, "N Hv d_v d_k"),
    )
    check_heads(sizes)
    rows, key_heads, key_dim = k.shape
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{rows}]; got {slots.dtype} {list(slots.shape)}")
    _, value_heads, value_dim, _ = state.shape
    assert all(t.is_contiguous() for t in (q, k, v, log_decay, beta, state[0]))
    if tiling is None and on_hopper(state.device):
        from denim.recurrence.kernels.hopper_rule_step import hopper_rule_step, suits

        if suits(state, rows):
            return hopper_rule_step(q, k, v, log_decay, beta, slots, state)
    tiling = (tiling or tiling_of(rows * value_heads)).within(value_dim)
    parts, inner = tiling.parts(key_dim)
    out = torch.empty_like(v)
    _rule_step[(tiling.splits(value_dim), value_heads, rows)](
        q,
        k,
        v,
        log_decay,
        beta,
        slots,
        state,
        state.stride(0),
        out,
        key_dim**-0.5,
        key_heads=key_heads,
        group=value_heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        vector_decay=log_decay.dim() == 3,
        parts=parts,
        inner=inner,
        tile_rows=tiling.rows,
        splits=tiling.splits(value_dim),
        num_warps=tiling.warps,
    )
    return out
