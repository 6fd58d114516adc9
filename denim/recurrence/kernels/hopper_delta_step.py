"""One decode step of a delta-rule layer between its projections, on Hopper: heads one behind the other.

Owns the kernel; it does what `fused_delta_step` does elsewhere, by the same formulas, for fp32 states of
128 x 128, written in every step or recorded (`denim.recurrence.deferred`). A program takes all value heads of
a key head (`state_ring`), so a window has one owner and an output is normalised by the program that has all
of it: programs wait for nobody. What the next head needs beside its state (`delta_token`, `head_records`) is
asked for while one is computed.

Rows of padding are skipped. Offsets into slots are 64-bit.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.delta_token import (
    convolve,
    gated_norm,
    load_columns,
    load_rates,
    load_token,
    log_decay_of,
    move_window,
)
from denim.recurrence.kernels.exponentials import exp, sigmoid
from denim.recurrence.kernels.head_records import faded, load_records, store_record
from denim.recurrence.kernels.overlap import launch_options
from denim.recurrence.kernels.program_barrier import barrier
from denim.recurrence.kernels.state_ring import (
    DIM,
    HALVES,
    PARTS,
    PIECE,
    ROWS,
    WARPS,
    behind,
    bring,
    first_head,
    give,
    live,
    new_ring,
    pieces_of,
    processors,
    slot_pieces,
    stages_for,
    take,
)
from denim.recurrence.kernels.state_ring import suits as ring_suits
from denim.recurrence.kernels.update_ring import ring_arguments

# Key heads of all rows, for each value head of one, below which heads spread over programs are faster.
LEAST_HEADS = 32
LONGEST = 9  # ring of records: no more are pending, when a step begins, than a program has warps


def suits(state: Tensor, rows: int, key_heads: int, length: int = 0) -> bool:
    """Whether the kernel takes a step of so many rows with states [slots, Hv, d_v, d_k] and rings of `length`
    records, 0 for none, and is faster: as measured on an H200. With few rows most multiprocessors would have
    no head."""
    group = state.shape[1] // key_heads
    return ring_suits(state) and length <= LONGEST and rows * key_heads >= LEAST_HEADS * group


@gluon.jit
def _products(vectors, by_head, rows: gl.constexpr):
    """(of k, of q): the products with each vector [n, DIM], a warp's own, in layout `rows`."""
    x = vectors.load(rows)
    lane: gl.constexpr = gl.SliceLayout(0, rows)
    k = by_head.index(1).load(lane)[None, :]
    q = by_head.index(0).load(lane)[None, :]
    return gl.sum(x * k, 1), gl.sum(x * q, 1)


@gluon.jit
def _number(numbers, n, like: gl.constexpr):
    """The n-th of some numbers [1, n] in shared memory. like: a layout in which all threads have it."""
    return gl.max(numbers.index(0).slice(n, 1).load(like), 0)


@gluon.jit
def _joined(halves):
    """Two vectors [ROWS] as [ROWS, HALVES]."""
    return gl.join(halves[0], halves[1])


@gluon.jit
def _outer(u, k):
    """u k^T: [rows], [PARTS, PIECE] -> [rows, PARTS, PIECE]."""
    return gl.expand_dims(gl.expand_dims(u, 1), 1) * k[None, :, :]


@gluon.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "b_ptr", "a_ptr", "pending_ptr"]
)
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
    pending_ptr,
    keys_ptr,
    keys_stride,
    updates_ptr,
    updates_stride,
    decays_ptr,
    decays_stride,
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
    length: gl.constexpr,
    padded: gl.constexpr,
):
    warps: gl.constexpr = gl.num_warps()
    # A tile of a state: 4 channels of each of the 4 parts of a row for a thread, and every 4 · warps-th row.
    pieces: gl.constexpr = gl.BlockedLayout([PARTS, 4], [4, 8], [warps, 1], [1, 0])
    tile: gl.constexpr = gl.BlockedLayout([1, PARTS, 4], [4, 1, 8], [warps, 1, 1], [2, 1, 0])
    key: gl.constexpr = gl.SliceLayout(0, tile)
    value: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, tile))
    side_by_side: gl.constexpr = gl.BlockedLayout([1, 16 // warps], [1, 32], [4, warps // 4], [1, 0])
    in_warp: gl.constexpr = gl.BlockedLayout([4], [32], [warps], [0])
    # Vectors to take products of, a warp for each.
    four_rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, warps // 4], [1, 0])
    by_record: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [padded, warps // padded], [1, 0])
    by_channel: gl.constexpr = gl.BlockedLayout([padded, 1], [1, 32], [1, warps], [1, 0])
    one_each: gl.constexpr = gl.SliceLayout(0, by_channel)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring, full = new_ring(stages)
    # Several small places, each written once a head: a second write to one waits for all warps.
    mixed = gl.allocate_shared_memory(gl.float32, [4, DIM], lines)
    by_parts = mixed._reinterpret(gl.float32, [4, PARTS, PIECE], lines)
    by_head = mixed._reinterpret(gl.float32, [4, DIM], line)
    mixed_k = gl.allocate_shared_memory(gl.float32, [1, 4], line)
    mixed_q = gl.allocate_shared_memory(gl.float32, [1, 4], line)
    read_out = gl.allocate_shared_memory(gl.float32, [HALVES, ROWS], lines)
    if vector_decay or length > 0:
        decays = gl.allocate_shared_memory(gl.float32, [1, DIM], line)
    if length > 0:
        faded_keys = gl.allocate_shared_memory(gl.float32, [padded, DIM], lines)
        keys_by_parts = faded_keys._reinterpret(gl.float32, [padded, PARTS, PIECE], lines)
        faded_k = gl.allocate_shared_memory(gl.float32, [1, padded], line)
        faded_q = gl.allocate_shared_memory(gl.float32, [1, padded], line)
        updates = gl.allocate_shared_memory(gl.float32, [padded, DIM], lines)
        updates_by_row = updates._reinterpret(gl.float32, [padded, DIM], line)
        updated = gl.allocate_shared_memory(gl.float32, [HALVES, ROWS], lines)

    units = rows * key_heads
    lanes = (
        gl.arange(0, 4, layout=gl.SliceLayout(1, side_by_side))[:, None],
        gl.arange(0, DIM, layout=gl.SliceLayout(0, side_by_side))[None, :],
    )
    whole = gl.arange(0, DIM, layout=in_warp)
    spread = gl.arange(0, DIM, layout=one_each)
    channel_lanes = (gl.arange(0, padded, layout=gl.SliceLayout(1, by_channel))[:, None], spread)
    record_lanes = (
        gl.arange(0, padded, layout=gl.SliceLayout(1, by_record))[:, None],
        gl.arange(0, DIM, layout=gl.SliceLayout(0, by_record))[None, :],
    )
    tensors = (x_ptr, x_stride, z_ptr, z_stride, b_ptr, b_stride, a_ptr, a_stride)
    windows = (window_ptr, window_stride, taps_ptr)
    records = (keys_ptr, keys_stride, updates_ptr, updates_stride, decays_ptr, decays_stride)

    # The kernel before this one writes x, z, b and a: all else is asked for before that one has ended.
    row_ptrs = (slots_ptr, pending_ptr)
    head = first_head(row_ptrs, units, key_heads)
    bring(desc, ring, full, 0, head, units, between, key_heads, group, stages)
    columns, taps = load_columns(windows, head, units, lanes, key_heads, group, width)
    rates = load_rates((a_log_ptr, dt_bias_ptr), head, spread, key_heads, group, vector_decay)
    if length > 0:
        keys, later, oldest, before = load_records(
            records, head, channel_lanes, record_lanes, key_heads, group, vector_decay
        )
    norm = gl.load(norm_ptr + whole)
    second = live(behind(head, row_ptrs, units, key_heads, group), row_ptrs, units, key_heads)
    if stages > 2:
        bring(desc, ring, full, 1, second, units, between, key_heads, group, stages)
    third = live(behind(second, row_ptrs, units, key_heads, group), row_ptrs, units, key_heads)
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()
    x, z, b, a = load_token(tensors, head, units, lanes, whole, spread, key_heads, group, vector_decay)

    count = 0
    while head[0] < units:
        far = behind(third, row_ptrs, units, key_heads, group)

        mixed.store(convolve(x, columns, taps, width))
        beta = beta_limit * sigmoid(b.to(gl.float32))
        log_decay = log_decay_of(a, rates, floor, floored)
        decay = exp(log_decay)
        if length > 0:
            keys, total = faded(keys, later, oldest, log_decay)
            faded_keys.store(keys)
            updates.store(before)
            decay = exp(total)
        if vector_decay or length > 0:
            decays.index(0).store(decay)
        # Ahead of the next state, behind which it would come.
        token, moved, gate = x, columns, z
        columns, taps = load_columns(windows, second, units, lanes, key_heads, group, width)
        rates = load_rates((a_log_ptr, dt_bias_ptr), second, spread, key_heads, group, vector_decay)
        x, z, b, a = load_token(tensors, second, units, lanes, whole, spread, key_heads, group, vector_decay)
        if length > 0:
            keys, later, oldest, before = load_records(
                records, second, channel_lanes, record_lanes, key_heads, group, vector_decay
            )
        barrier()
        tma.store_wait(0)  # the state before this one has left the ring
        if stages > 2:
            bring(desc, ring, full, count + 2, third, units, between, key_heads, group, stages)
        else:
            bring(desc, ring, full, count + 1, second, units, between, key_heads, group, stages)
        move_window(windows, head, token, moved, lanes, key_heads, group, width)

        with_k, with_q = _products(mixed, by_head, four_rows)
        mixed_k.index(0).store(with_k)
        mixed_q.index(0).store(with_q)
        if length > 0:
            with_k, with_q = _products(faded_keys, by_head, by_record)
            faded_k.index(0).store(with_k)
            faded_q.index(0).store(with_q)
        q_norm = gl.rsqrt(_number(mixed_q, 0, value) + l2_eps) * scale
        k_norm = gl.rsqrt(_number(mixed_k, 1, value) + l2_eps)
        qk = _number(mixed_k, 0, value) * q_norm * k_norm
        q = by_parts.index(0).load(key)
        k = by_parts.index(1).load(key)
        if vector_decay:
            decay = decays._reinterpret(gl.float32, [1, PARTS, PIECE], lines).index(0).load(key)
            k_read = k * decay
            q_read = q * decay
            decay = decay[None, :, :]
        elif length > 0:
            decay = _number(decays, 0, value)
        outs = ()
        own_updates = ()
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
            for n in gl.static_range(length - 1):
                uj = updates_by_row.index(n).slice(half * ROWS, ROWS).load(value)
                read_k += uj * _number(faded_k, n, value)
                read_q += uj * _number(faded_q, n, value)
            u = beta * (v - read_k * k_norm)
            outs = outs + (read_q * q_norm + u * qk,)  # noqa: RUF005
            own_updates = own_updates + (u,)  # noqa: RUF005
            if length == 0 or head[3] == length - 1:
                state = state * decay + _outer(u * k_norm, k)
                for n in gl.static_range(length - 1):
                    uj = updates_by_row.index(n).slice(half * ROWS, ROWS).load(value)
                    state += _outer(uj, keys_by_parts.index(n).load(key))
                give(desc, ring, state, count, half, head, between, pieces, key_heads, group, stages)
        read_out.permute([1, 0]).store(_joined(outs))
        if length > 0:
            own_key = by_head.index(1).load(one_each) * k_norm
            updated.permute([1, 0]).store(_joined(own_updates))
        o = read_out._reinterpret(gl.float32, [1, DIM], line).index(0).load(in_warp)
        y = gated_norm(o, gate, norm, norm_eps, sigmoid_gate)
        out = out_ptr + (head[0] * group + head[1]).to(gl.int64) * DIM + whole
        gl.store(out, y.to(out_ptr.dtype.element_ty))
        if length > 0 and head[3] < length - 1:
            update = updated._reinterpret(gl.float32, [1, DIM], line).index(0).load(in_warp)
            own = (own_key, update, log_decay)
            store_record(records, head, own, whole, spread, key_heads, group, vector_decay)

        head = second
        second = third
        third = live(far, row_ptrs, units, key_heads)
        count += 1
    tma.store_wait(0)


def hopper_delta_step(inputs: DeltaInputs, ring: Ring | None = None, pending: Tensor | None = None) -> Tensor:
    """One token for each of B rows, [B, Hv · 128], for states that `suits`; as `fused_delta_step`."""
    state, out = inputs.state, inputs.new_output()
    rows, constants = inputs.rows, inputs.constants()
    length = 0 if ring is None else ring.length
    if rows:
        _step[(min(processors(out.device), rows * constants["key_heads"]),)](
            pieces_of(state),
            *inputs.tensors(),
            out,
            pending,
            *ring_arguments(ring),
            slot_pieces(state),
            rows,
            *inputs.numbers(),
            **constants,
            stages=stages_for(rows * state.shape[1], out.device, written=ring is None),
            length=length,
            padded=triton.next_power_of_2(max(length - 1, 1)),
            num_warps=WARPS,
            **launch_options(overlap=True),
        )
    return out
