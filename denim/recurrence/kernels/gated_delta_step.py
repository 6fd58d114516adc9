"""One decode step of a Gated DeltaNet layer between its two projections, as one kernel.

Fuses the short convolution with SiLU, the normalisation of q and k, the gates, the gated delta rule on the
state in its arena slot, and the gated norm. The state is read once and written once; everything else that
moves is a few KiB a row. How several programs share a key head: `fused_delta`.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as tl_cuda
from torch import Tensor

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
    WHOLE_HEAD,
    arrive,
    convolve,
    fetch,
    gated_norm,
    norm_stored,
    store_window,
    tiling_of,
)
from denim.recurrence.kernels.update_ring import (
    record_weights,
    recorded,
    ring_arguments,
    ring_lengths,
    with_records,
)


@triton.jit
def _step(
    projected_ptr,
    projected_stride,
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
    beta_limit,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    taken: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    inner: tl.constexpr,
    tile_rows: tl.constexpr,
    tiles: tl.constexpr,
    prefetch: tl.constexpr,
    splits: tl.constexpr,
    padded_value_dim: tl.constexpr,
    length: tl.constexpr,
    padded_length: tl.constexpr,
    sem: tl.constexpr,
    overlap: tl.constexpr,
):
    first_head = tl.program_id(1) * taken
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    head = first_head // group
    value_heads: tl.constexpr = key_heads * group
    keys: tl.constexpr = key_heads * key_dim
    values: tl.constexpr = value_heads * value_dim
    channels: tl.constexpr = 2 * keys + values
    readers: tl.constexpr = splits * (group // taken)
    x_ptr = projected_ptr + row * projected_stride
    out_row = out_ptr + row * values
    partial_row = partial_ptr + row * values
    window = window_ptr + slot * window_stride
    state = state_ptr + slot * state_stride
    k_at = tl.arange(0, parts * inner)
    row_at = tl.program_id(0) * (tile_rows * tiles) + tl.arange(0, tile_rows)
    k_mask = None if parts * inner == key_dim else k_at < key_dim
    exact: tl.constexpr = splits * tiles * tile_rows == value_dim
    q_channels = head * key_dim + k_at
    k_channels = keys + q_channels
    key_tile = key_channels(parts, inner)
    tile = tile_offsets(row_at, key_tile, key_dim)

    if overlap:
        line = tl.arange(0, key_dim // 32)
        for i in tl.static_range(taken):
            lines = row_at[:, None] * key_dim + line[None, :] * 32
            fetch(state + (first_head + i) * (value_dim * key_dim) + lines)
        at4 = tl.arange(0, 4)[:, None]
        two = head * key_dim + tl.arange(0, 2)[None, :] * 64
        fetch(taps_ptr + at4 * channels + two)
        fetch(taps_ptr + at4 * channels + keys + two)
        fetch(window + tl.minimum(at4, width - 2) * channels + two)
        fetch(window + tl.minimum(at4, width - 2) * channels + keys + two)
        fetch(window + tl.minimum(tl.arange(0, 4), width - 2) * channels + 2 * keys + first_head * value_dim)
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    q, q_columns = convolve(x_ptr, window, taps_ptr, q_channels, channels, width, k_mask)
    k, k_columns = convolve(x_ptr, window, taps_ptr, k_channels, channels, width, k_mask)
    if length > 0:
        pending = tl.load(pending_ptr + row)
        ring_keys = ring_keys_ptr + slot * ring_keys_stride + head * key_dim

    for i in tl.static_range(taken):
        value_head = first_head + i
        head_state = state + value_head * (value_dim * key_dim) + tile
        gates = x_ptr + channels + values + value_head
        b = tl.load(gates).to(tl.float32)
        a = tl.load(gates + value_heads).to(tl.float32) + tl.load(dt_bias_ptr + value_head).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        log_decay = -tl.exp(tl.load(a_log_ptr + value_head)) * softplus
        beta = beta_limit * tl.sigmoid(b)
        total = log_decay
        if length > 0:
            ring_updates = ring_updates_ptr + slot * ring_updates_stride + value_head * value_dim
            ring_decays = ring_decays_ptr + slot * ring_decays_stride + value_head
            total, with_k, with_q = record_weights(
                ring_keys,
                ring_decays,
                pending,
                log_decay,
                k_at,
                q,
                k,
                keys,
                value_heads,
                key_dim,
                False,
                padded_length,
            )
        decay = tl.exp(total)
        for t in tl.static_range(tiles):
            v_at = row_at + t * tile_rows
            v_mask = None if exact else v_at < value_dim
            tile_mask = None
            if not exact or k_mask is not None:
                tile_mask = (v_at < value_dim)[:, None, None] & (key_tile < key_dim)
            v_channels = 2 * keys + value_head * value_dim + v_at
            v, v_columns = convolve(x_ptr, window, taps_ptr, v_channels, channels, width, v_mask)
            if tiles * splits == 1:
                norm = load(norm_ptr + v_at, v_mask)
                z = load(x_ptr + channels + value_head * value_dim + v_at, v_mask).to(tl.float32)
            behind_k = 0.0
            behind_q = 0.0
            if length > 0:
                behind_k, behind_q = recorded(
                    ring_updates, pending, v_at, with_k, with_q, values, value_dim, padded_length
                )
            if prefetch and (i > 0 or t > 0):
                s = s_next
            else:
                s = load(head_state + t * (tile_rows * key_dim), tile_mask).to(tl.float32)
            if prefetch and t + 1 < tiles:
                s_next = load(head_state + (t + 1) * (tile_rows * key_dim), tile_mask).to(tl.float32)
            elif prefetch and i + 1 < taken:
                s_next = load(head_state + value_dim * key_dim, tile_mask).to(tl.float32)
            if i == 0 and t == 0:
                qq, kk, qk = products(q, k)
                q_norm = tl.rsqrt(qq + l2_eps) * scale
                k_norm = tl.rsqrt(kk + l2_eps)
                q_tile = in_parts(q, parts, inner)
                k_tile = in_parts(k, parts, inner)

            # Both reads from the state as it was, so that neither waits for the other: S q = S' q + u (k . q).
            u = beta * (v - (read(s, k_tile) * decay + behind_k) * k_norm)
            o = (read(s, q_tile) * decay + behind_q) * q_norm + u * (qk * q_norm * k_norm)
            if tiles * splits > 1:
                tl.store(partial_row + value_head * value_dim + v_at, o, mask=v_mask)
            tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
            if length > 0 and pending < length - 1:
                tl.store(ring_updates + pending * values + v_at, u, mask=v_mask)
            else:
                s = s * decay + outer(u * k_norm, k_tile)
                if length > 0:
                    s = with_records(
                        s,
                        ring_keys,
                        ring_updates,
                        ring_decays,
                        pending,
                        log_decay,
                        key_tile,
                        v_at,
                        keys,
                        values,
                        value_heads,
                        key_dim,
                        value_dim,
                        False,
                    )
                s_out = s.to(state_ptr.dtype.element_ty)
                tile_ptr = head_state + t * (tile_rows * key_dim)
                tl.store(tile_ptr, s_out, mask=tile_mask, cache_modifier=".cs")
            store_window(window, v_columns, v_channels, channels, width, v_mask)
            if tiles * splits == 1:
                y = gated_norm(o, norm, z, value_dim, norm_eps, False)
                tl.store(out_row + value_head * value_dim + v_at, y.to(out_ptr.dtype.element_ty), mask=v_mask)

        if length > 0 and tl.program_id(0) == 0 and pending < length - 1:
            tl.store(ring_decays + pending * value_heads, log_decay)
            if value_head % group == 0:
                tl.store(ring_keys + pending * keys + k_at, k * k_norm, mask=k_mask)
        if splits == 1 and tiles > 1:
            tl.debug_barrier()  # all parts of the output are stored
            head_at = value_head * value_dim
            norm_stored(
                out_row + head_at,
                partial_row + head_at,
                x_ptr + channels + head_at,
                norm_ptr,
                value_dim,
                padded_value_dim,
                norm_eps,
                False,
            )

    if readers == 1:
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)
    elif arrive(arrivals_ptr + row * key_heads + head, readers, sem):
        if splits > 1:
            for i in tl.static_range(group):
                head_at = (head * group + i) * value_dim
                norm_stored(
                    out_row + head_at,
                    partial_row + head_at,
                    x_ptr + channels + head_at,
                    norm_ptr,
                    value_dim,
                    padded_value_dim,
                    norm_eps,
                    False,
                )
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)


def gated_delta_step_fused(
    projected: Tensor,
    conv_taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_scale: Tensor,
    norm_eps: float,
    slots: Tensor,
    window: Tensor,
    state: Tensor,
    arrivals: Tensor,
    beta_limit: float = 1.0,
    ring: Ring | None = None,
    pending: Tensor | None = None,
    tiling: Tiling | None = None,
    taken: int | None = None,
    sem: str = "acq_rel",
    overlap: bool = False,
    prefetch: bool = False,
    maxnreg: int | None = None,
) -> Tensor:
    """One token for each of B rows: from the input projection to the input of the output projection.

    projected: [B, channels + Hv·d_v + 2·Hv] = [q | k | v | z | b | a], rows dense; conv_taps:
    [W, channels], dense; a_log (fp32), dt_bias: [Hv]; norm_scale: [d_v] fp32; slots: [B] int64, negative for
    padding; window: [slots, W - 1, channels] and state: [slots, Hv, d_v, d_k], views of the arena, updated
    in place; arrivals: [N, Hk] int32, zero before and after every call: for more than N rows heads are not
    spread over several programs. β = beta_limit · sigmoid(b).
    Returns [B, Hv·d_v] in projected's dtype; rows of padding are not written.
    Rule and gates: `denim.recurrence.gated_delta`; fp32 inside.
    """
    rows, (most, key_heads) = projected.shape[0], arrivals.shape
    _, value_heads, value_dim, key_dim = state.shape
    assert projected.stride(1) == 1 and window.stride(1) == window.shape[2] and state[0].is_contiguous()
    assert arrivals.is_contiguous() and conv_taps.is_contiguous()
    tiling = (tiling or tiling_of(rows * value_heads)).within(value_dim)
    if rows > most:
        tiling = WHOLE_HEAD.whole(value_dim)
    splits = tiling.splits(value_dim)
    if taken is None:
        taken = value_heads // key_heads if splits == 1 else 1
    parts, inner = tiling.parts(key_dim)
    out = torch.empty(rows, value_heads * value_dim, dtype=projected.dtype, device=projected.device)
    partial = torch.empty(
        out.shape if splits * tiling.tiles > 1 else 0, dtype=torch.float32, device=out.device
    )
    _step[(splits, value_heads // taken, rows)](
        projected,
        projected.stride(0),
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
        beta_limit,
        key_heads=key_heads,
        group=value_heads // key_heads,
        taken=taken,
        key_dim=key_dim,
        value_dim=value_dim,
        width=conv_taps.shape[0],
        parts=parts,
        inner=inner,
        tile_rows=tiling.rows,
        tiles=tiling.tiles,
        prefetch=prefetch,
        **({"maxnreg": maxnreg} if maxnreg else {}),
        splits=splits,
        padded_value_dim=triton.next_power_of_2(value_dim),
        **ring_lengths(ring),
        sem=sem,
        overlap=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=tiling.warps,
    )
    return out
