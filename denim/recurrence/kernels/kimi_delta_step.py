"""One decode step of a KDA layer between its projections, as one kernel.

Fuses the short convolution with SiLU, the normalisation of q and k, the gates, the delta rule with a decay
per key channel on the state in its arena slot, and the norm with its sigmoid gate. The state is read once and
written once, or only read where writes are deferred (`denim.recurrence.deferred`). How several programs share
a head: `fused_delta`. On Hopper `hopper_decode` may name another kernel.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.deferred import Ring
from denim.recurrence.gated_delta import L2NORM_EPS
from denim.recurrence.kernels.delta_tile import (
    Tiling,
    in_parts,
    key_channels,
    load,
    outer,
    products,
    read,
    tile_offsets,
)
from denim.recurrence.kernels.fused_delta import (
    arrive,
    convolve,
    fetch,
    gated_norm,
    lines,
    norm_stored,
    store_window,
    tiling_of,
)
from denim.recurrence.kernels.hopper import on_hopper
from denim.recurrence.kernels.overlap import launch_options, overlaps
from denim.recurrence.kernels.update_ring import (
    faded,
    load_records,
    recorded,
    ring_arguments,
    ring_lengths,
    with_records,
)


@triton.jit
def _log_decay(f_ptr, bias_ptr, rate, floor, at, mask, floored: tl.constexpr):
    """-rate softplus(f + bias), or floor sigmoid(rate (f + bias)); fp32, at most 0."""
    biased = load(f_ptr + at, mask).to(tl.float32) + load(bias_ptr + at, mask)
    if floored:
        return floor * tl.sigmoid(rate * biased)
    return -rate * tl.where(biased > 20.0, biased, tl.log(1.0 + tl.exp(tl.minimum(biased, 20.0))))


@triton.jit
def _step(
    qkv_ptr,
    qkv_stride,
    b_ptr,
    b_stride,
    f_ptr,
    f_stride,
    g_ptr,
    g_stride,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slots_ptr,
    window_ptr,
    window_stride,
    state_ptr,
    state_stride,
    arrivals_ptr,
    partial_ptr,
    out_ptr,
    pending_ptr,
    ring_keys_ptr,
    ring_keys_stride,
    ring_updates_ptr,
    ring_updates_stride,
    ring_decays_ptr,
    ring_decays_stride,
    scale,
    l2_eps,
    norm_eps,
    floor,
    floored: tl.constexpr,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    inner: tl.constexpr,
    tile_rows: tl.constexpr,
    splits: tl.constexpr,
    padded_value_dim: tl.constexpr,
    length: tl.constexpr,
    levels: tl.constexpr,
    overlap: tl.constexpr,
):
    keys: tl.constexpr = heads * key_dim
    values: tl.constexpr = heads * value_dim
    channels: tl.constexpr = 2 * keys + values
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    x_ptr = qkv_ptr + row * qkv_stride
    gate_ptr = g_ptr + row * g_stride + head * value_dim
    out_head = out_ptr + row * values + head * value_dim
    partial_head = partial_ptr + row * values + head * value_dim
    window = window_ptr + slot * window_stride
    exact: tl.constexpr = parts * inner == key_dim and splits * tile_rows == value_dim
    k_at = tl.arange(0, parts * inner)
    v_at = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    k_mask = None if exact else k_at < key_dim
    v_mask = None if exact else v_at < value_dim
    key_tile = key_channels(parts, inner)
    tile_mask = None if exact else (v_at < value_dim)[:, None, None] & (key_tile < key_dim)
    state = state_ptr + slot * state_stride + head * (value_dim * key_dim)
    q_channels = head * key_dim + k_at
    k_channels = keys + q_channels
    v_channels = 2 * keys + head * value_dim + v_at

    if overlap:
        if slot >= 0:
            key_lines = lines(0, key_dim, parts * inner)
            v_lines = tl.minimum(v_at, value_dim - 1)
            state_lines = v_lines[:, None] * key_dim + key_lines[None, :]
            fetch(state, state_lines, 0, 1)
            fetch(taps_ptr, head * key_dim + key_lines, channels, width)
            fetch(taps_ptr, keys + head * key_dim + key_lines, channels, width)
            fetch(window, head * key_dim + key_lines, channels, width - 1)
            fetch(window, keys + head * key_dim + key_lines, channels, width - 1)
            fetch(window, 2 * keys + head * value_dim + v_lines, channels, width - 1)
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if slot < 0:
        return

    # Everything is asked for before anything is computed, the state at last: Triton lays out what comes of
    # several loads as the last one wants it.
    q, q_columns = convolve(x_ptr, window, taps_ptr, q_channels, channels, width, k_mask)
    k, k_columns = convolve(x_ptr, window, taps_ptr, k_channels, channels, width, k_mask)
    v, v_columns = convolve(x_ptr, window, taps_ptr, v_channels, channels, width, v_mask)
    rate = tl.exp(tl.load(a_log_ptr + head))
    log_decay = _log_decay(f_ptr + row * f_stride, dt_bias_ptr, rate, floor, q_channels, k_mask, floored)
    beta = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
    if splits == 1:
        gate = load(gate_ptr + v_at, v_mask).to(tl.float32)
        norm = load(norm_ptr + v_at, v_mask)
    if length > 0:
        pending = tl.load(pending_ptr + row)
        ring_keys = ring_keys_ptr + slot * ring_keys_stride + head * key_dim
        ring_updates = ring_updates_ptr + slot * ring_updates_stride + head * value_dim
        ring_decays = ring_decays_ptr + slot * ring_decays_stride + head * key_dim
        kj = load_records(ring_keys, keys, k_at, key_dim, pending, length, levels)
        gj = load_records(ring_decays, keys, k_at, key_dim, pending, length, levels)
        uj = load_records(ring_updates, values, v_at, value_dim, pending, length, levels)
    tile = state + tile_offsets(v_at, key_tile, key_dim)
    s = load(tile, tile_mask).to(tl.float32)

    qq, kk, qk = products(q, k)
    q_norm = tl.rsqrt(qq + l2_eps) * scale
    k_norm = tl.rsqrt(kk + l2_eps)
    k_tile = in_parts(k, parts, inner)
    total = log_decay
    behind_k = 0.0
    behind_q = 0.0
    if length > 0:
        faded_keys, total = faded(kj, gj, log_decay, levels)
        behind_k, behind_q = recorded(faded_keys, uj, k, q, levels)

    # Both reads from the state as it was, so that neither waits for the other: S q = S' q + u (k . q).
    decay = tl.exp(total)
    u = beta * (v - (read(s, in_parts(k * decay, parts, inner)) + behind_k) * k_norm)
    o = (read(s, in_parts(q * decay, parts, inner)) + behind_q) * q_norm + u * (qk * q_norm * k_norm)
    if splits > 1:
        tl.store(partial_head + v_at, o, mask=v_mask)
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    if length > 0 and pending < length - 1:
        tl.store(ring_updates + pending * values + v_at, u, mask=v_mask)
        if tl.program_id(0) == 0:
            tl.store(ring_decays + pending * keys + k_at, log_decay, mask=k_mask)
            tl.store(ring_keys + pending * keys + k_at, k * k_norm, mask=k_mask)
    else:
        s = s * in_parts(decay, parts, inner) + outer(u * k_norm, k_tile)
        if length > 0:
            s = with_records(s, faded_keys, uj, parts, inner, length)
        tl.store(tile, s.to(state_ptr.dtype.element_ty), mask=tile_mask, cache_modifier=".cs")
    store_window(window, v_columns, v_channels, channels, width, v_mask)

    if splits == 1:
        y = gated_norm(o, norm, gate, value_dim, norm_eps, True)
        tl.store(out_head + v_at, y.to(out_ptr.dtype.element_ty), mask=v_mask)
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)
    elif arrive(arrivals_ptr + row * heads + head, splits):
        norm_stored(
            out_head, partial_head, gate_ptr, norm_ptr, 1, value_dim, padded_value_dim, norm_eps, True
        )
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)


def kimi_delta_step_fused(
    qkv: Tensor,
    b: Tensor,
    f: Tensor,
    g: Tensor,
    conv_taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_scale: Tensor,
    norm_eps: float,
    slots: Tensor,
    window: Tensor,
    state: Tensor,
    arrivals: Tensor,
    decay_floor: float | None = None,
    ring: Ring | None = None,
    pending: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """One token for each of B rows: from the projections to the input of the output projection.

    qkv: [B, channels]; b: [B, H]; f: [B, H·d_k], the decay's projection; g: [B, H·d_v], the output gate's;
    all in the model's dtype, rows dense, at any distance; conv_taps: [W, channels], dense; a_log [H],
    dt_bias [H·d_k], norm_scale [d_v]: fp32; slots: [B] int64, negative for padding; window: [slots, W - 1,
    channels] and state: [slots, H, d_v, d_k], views of the arena, updated in place; arrivals:
    `denim.recurrence.arrivals.new_arrivals`. The log of the decay is -exp(a_log) softplus(f + dt_bias), or
    decay_floor sigmoid(exp(a_log) (f + dt_bias)).

    With a ring, of which row i has pending[i] records ([B] int32, below its length L), the state is not
    written but for rows with L - 1. Returns [B, H·d_v] in qkv's dtype; rows of padding are not written.
    tiling: how states are laid out, None: as measured.

    Where kernels overlap (`overlap`), the one launched last before this must write some of qkv, b, f and g
    and nothing else that is read here.
    Rule and gates: Kimi Linear (arXiv 2510.26692), `denim.recurrence.gated_delta`; fp32 inside.
    """
    rows, heads = qkv.shape[0], arrivals.shape[1]
    _, _, value_dim, key_dim = state.shape
    assert all(t.stride(1) == 1 for t in (qkv, b, f, g))
    assert window.stride(1) == window.shape[2] and state[0].is_contiguous()
    assert arrivals.is_contiguous() and conv_taps.is_contiguous()
    if tiling is None and on_hopper(state.device):
        from denim.recurrence.kernels.hopper_decode import step_for

        step = step_for(state, rows, heads, ring, pending)
        if step is not None:
            weights = (conv_taps, a_log, dt_bias, norm_scale, norm_eps)
            places = (slots, window, state, heads)
            return step(qkv, g, b, f, *weights, *places, vector_decay=True, decay_floor=decay_floor)
    tiling = tiling or tiling_of(rows * heads, value_dim, recording=ring is not None)
    splits = tiling.splits(value_dim)
    assert splits == 1 or rows <= len(arrivals)
    parts, inner = tiling.parts(key_dim)
    out = torch.empty(rows, heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    partial = torch.empty(out.shape if splits > 1 else 0, dtype=torch.float32, device=out.device)
    overlap = overlaps(out.device)
    _step[(splits, heads, rows)](
        qkv,
        qkv.stride(0),
        b,
        b.stride(0),
        f,
        f.stride(0),
        g,
        g.stride(0),
        conv_taps,
        a_log,
        dt_bias,
        norm_scale,
        slots,
        window,
        window.stride(0),
        state,
        state.stride(0),
        arrivals,
        partial,
        out,
        pending,
        *ring_arguments(ring),
        key_dim**-0.5,
        L2NORM_EPS,
        norm_eps,
        decay_floor or 0.0,
        floored=decay_floor is not None,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=conv_taps.shape[0],
        parts=parts,
        inner=inner,
        tile_rows=tiling.rows,
        splits=splits,
        padded_value_dim=triton.next_power_of_2(value_dim),
        **ring_lengths(ring),
        overlap=overlap,
        num_warps=tiling.warps,
        **launch_options(overlap),
    )
    return out
