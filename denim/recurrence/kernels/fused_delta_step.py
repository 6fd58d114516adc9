"""One decode step of a delta-rule layer between its projections, as one kernel, with scalar or vector decay.

Fuses the short convolution with SiLU, the normalisation of q and k, the gates, the delta rule on the state in
its arena slot, and the gated norm. The state is read once and written once, or only read where writes are
deferred (`denim.recurrence.deferred`); everything else that moves is a few KiB a row. How several programs
share a key head: `fused_delta`. On Hopper `hopper_decode` may take the step to another kernel.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_inputs import DeltaInputs
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
from denim.recurrence.kernels.exponentials import SOFTPLUS_LINEAR
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
    load_numbers,
    load_records,
    recorded,
    ring_arguments,
    ring_lengths,
    with_records,
)


@triton.jit
def _log_decay(a, rate, floor, floored: tl.constexpr):
    """-rate softplus(a), or floor sigmoid(rate a); fp32, at most 0."""
    if floored:
        return floor * tl.sigmoid(rate * a)
    else:
        # The series of `exponentials` would need registers that a step with records has not got.
        softplus = tl.log(1.0 + tl.exp(tl.minimum(a, SOFTPLUS_LINEAR)))
        return -rate * tl.where(a > SOFTPLUS_LINEAR, a, softplus)


@triton.jit
def _step(
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
    floor,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    vector_decay: tl.constexpr,
    floored: tl.constexpr,
    sigmoid_gate: tl.constexpr,
    width: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    parts: tl.constexpr,
    inner: tl.constexpr,
    tile_rows: tl.constexpr,
    splits: tl.constexpr,
    padded_value_dim: tl.constexpr,
    length: tl.constexpr,
    levels: tl.constexpr,
    overlap: tl.constexpr,
):
    # A program takes one value head, or one after the other all of a key head that it has for itself.
    taken: tl.constexpr = group if splits == 1 else 1
    readers: tl.constexpr = splits * (group // taken)
    value_heads: tl.constexpr = key_heads * group
    keys: tl.constexpr = key_heads * key_dim
    values: tl.constexpr = value_heads * value_dim
    decays: tl.constexpr = value_heads * key_dim if vector_decay else value_heads
    channels: tl.constexpr = 2 * keys + values
    first_head = tl.program_id(1) * taken
    head = first_head // group
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    x_row = x_ptr + row * x_stride
    z_row = z_ptr + row * z_stride
    b_row = b_ptr + row * b_stride
    a_row = a_ptr + row * a_stride
    out_row = out_ptr + row * values
    partial_row = partial_ptr + row * values
    window = window_ptr + slot * window_stride
    state = state_ptr + slot * state_stride
    exact: tl.constexpr = parts * inner == key_dim and splits * tile_rows == value_dim
    k_at = tl.arange(0, parts * inner)
    v_at = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    k_mask = None if exact else k_at < key_dim
    v_mask = None if exact else v_at < value_dim
    key_tile = key_channels(parts, inner)
    tile_mask = None if exact else (v_at < value_dim)[:, None, None] & (key_tile < key_dim)
    tile = tile_offsets(v_at, key_tile, key_dim)
    q_channels = head * key_dim + k_at
    k_channels = keys + q_channels

    if overlap:
        # Whole heads run in waves, and wait for the memory anyway: asking early would only ask twice.
        if splits > 1 and slot >= 0:
            key_lines = lines(0, key_dim, parts * inner)
            v_lines = tl.minimum(v_at, value_dim - 1)
            state_lines = v_lines[:, None] * key_dim + key_lines[None, :]
            fetch(state + first_head * (value_dim * key_dim), state_lines, 0, 1)
            fetch(taps_ptr, head * key_dim + key_lines, channels, width)
            fetch(taps_ptr, keys + head * key_dim + key_lines, channels, width)
            fetch(window, head * key_dim + key_lines, channels, width - 1)
            fetch(window, keys + head * key_dim + key_lines, channels, width - 1)
            fetch(window, 2 * keys + first_head * value_dim + v_lines, channels, width - 1)
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if slot < 0:
        return

    q, q_columns = convolve(x_row, window, taps_ptr, q_channels, channels, width, k_mask)
    k, k_columns = convolve(x_row, window, taps_ptr, k_channels, channels, width, k_mask)
    if length > 0:
        pending = tl.load(pending_ptr + row)
        ring_keys = ring_keys_ptr + slot * ring_keys_stride + head * key_dim
        kj = load_records(ring_keys, keys, k_at, key_dim, pending, length, levels)

    for i in tl.static_range(taken):
        # Everything is asked for before anything is computed, the state at last: Triton lays out what comes
        # of several loads as the last one wants it.
        value_head = first_head + i
        head_at = value_head * value_dim
        v_channels = 2 * keys + head_at + v_at
        v, v_columns = convolve(x_row, window, taps_ptr, v_channels, channels, width, v_mask)
        b = tl.load(b_row + value_head).to(tl.float32)
        rate = tl.exp(tl.load(a_log_ptr + value_head))
        if vector_decay:
            decay_at = value_head * key_dim + k_at
            a = load(a_row + decay_at, k_mask).to(tl.float32) + load(dt_bias_ptr + decay_at, k_mask)
        else:
            decay_at = value_head
            a = tl.load(a_row + decay_at).to(tl.float32) + tl.load(dt_bias_ptr + decay_at).to(tl.float32)
        if splits == 1:
            norm = load(norm_ptr + v_at, v_mask)
            z = load(z_row + head_at + v_at, v_mask).to(tl.float32)
        if length > 0:
            ring_updates = ring_updates_ptr + slot * ring_updates_stride + head_at
            ring_decays = ring_decays_ptr + slot * ring_decays_stride
            uj = load_records(ring_updates, values, v_at, value_dim, pending, length, levels)
            if vector_decay:
                ring_decays += value_head * key_dim
                gj = load_records(ring_decays, decays, k_at, key_dim, pending, length, levels)
            else:
                gj = load_numbers(ring_decays + value_head, decays, pending, length, levels)
        head_state = state + head_at * key_dim + tile
        s = load(head_state, tile_mask).to(tl.float32)

        if i == 0:
            qq, kk, qk = products(q, k)
            q_norm = tl.rsqrt(qq + l2_eps) * scale
            k_norm = tl.rsqrt(kk + l2_eps)
            q_tile = in_parts(q, parts, inner)
            k_tile = in_parts(k, parts, inner)
        beta = beta_limit * tl.sigmoid(b)
        log_decay = _log_decay(a, rate, floor, floored)
        total = log_decay
        behind_k = 0.0
        behind_q = 0.0
        if length > 0:
            faded_keys, total = faded(kj, gj, log_decay, levels)
            behind_k, behind_q = recorded(faded_keys, uj, k, q, levels)

        # Both reads from the state as it was, so that neither waits for the other:
        # S q = S' q + u (k . q).
        decay = tl.exp(total)
        if vector_decay:
            read_k = read(s, in_parts(k * decay, parts, inner))
            read_q = read(s, in_parts(q * decay, parts, inner))
            decay = in_parts(decay, parts, inner)
        else:
            read_k = read(s, k_tile) * decay
            read_q = read(s, q_tile) * decay
        u = beta * (v - (read_k + behind_k) * k_norm)
        o = (read_q + behind_q) * q_norm + u * (qk * q_norm * k_norm)
        if splits > 1:
            tl.store(partial_row + head_at + v_at, o, mask=v_mask)
        tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
        if length > 0 and pending < length - 1:
            tl.store(ring_updates + pending * values + v_at, u, mask=v_mask)
            if tl.program_id(0) == 0:
                if vector_decay:
                    tl.store(ring_decays + pending * decays + k_at, log_decay, mask=k_mask)
                else:
                    tl.store(ring_decays + value_head + pending * decays, log_decay)
                if value_head % group == 0:
                    tl.store(ring_keys + pending * keys + k_at, k * k_norm, mask=k_mask)
        else:
            s = s * decay + outer(u * k_norm, k_tile)
            if length > 0:
                s = with_records(s, faded_keys, uj, parts, inner, length)
            tl.store(head_state, s.to(state_ptr.dtype.element_ty), mask=tile_mask, cache_modifier=".cs")
        store_window(window, v_columns, v_channels, channels, width, v_mask)
        if splits == 1:
            y = gated_norm(o, norm, z, value_dim, norm_eps, sigmoid_gate)
            tl.store(out_row + head_at + v_at, y.to(out_ptr.dtype.element_ty), mask=v_mask)

    if readers == 1:
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)
    elif arrive(arrivals_ptr + row * key_heads + head, readers):
        at = head * group * value_dim
        norm_stored(
            out_row + at,
            partial_row + at,
            z_row + at,
            norm_ptr,
            group,
            value_dim,
            padded_value_dim,
            norm_eps,
            sigmoid_gate,
        )
        store_window(window, q_columns, q_channels, channels, width, k_mask)
        store_window(window, k_columns, k_channels, channels, width, k_mask)


def fused_delta_step(
    inputs: DeltaInputs,
    arrivals: Tensor,
    ring: Ring | None = None,
    pending: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The input of the output projection, [B, Hv·d_v] in the model's dtype; rows of padding are not written.

    arrivals: `denim.recurrence.arrivals.new_arrivals`. With a ring, of which row i has pending[i] records
    ([B] int32, below its length L), the state is not written but for rows with L - 1. tiling: how states are
    laid out, None: as measured.

    Where kernels overlap (`overlap`), the one launched last before this must write some of qkv, z, b and a,
    and nothing else that is read here. Rule and gates: Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv
    2510.26692), `denim.recurrence.gated_delta`; fp32 inside.
    """
    inputs.check()
    assert arrivals.is_contiguous()
    if tiling is None and on_hopper(inputs.state.device):
        from denim.recurrence.kernels.hopper_decode import hopper_decode

        out = hopper_decode(inputs, ring, pending)
        if out is not None:
            return out
    rows, key_heads = inputs.rows, inputs.key_heads
    _, value_heads, value_dim, key_dim = inputs.state.shape
    if tiling is None:
        kind = {"recording": ring is not None, "vector_decay": inputs.vector_decay}
        tiling = tiling_of(rows * value_heads, value_dim, **kind)
    splits = tiling.splits(value_dim)
    assert splits == 1 or rows <= len(arrivals)
    parts, inner = tiling.parts(key_dim)
    out = inputs.new_output()
    partial = torch.empty(out.shape if splits > 1 else 0, dtype=torch.float32, device=out.device)
    overlap = overlaps(out.device)
    _step[(splits, key_heads if splits == 1 else value_heads, rows)](
        *inputs.tensors(),
        inputs.state,
        inputs.state.stride(0),
        arrivals,
        partial,
        out,
        pending,
        *ring_arguments(ring),
        *inputs.numbers(),
        **inputs.constants(),
        key_dim=key_dim,
        value_dim=value_dim,
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
