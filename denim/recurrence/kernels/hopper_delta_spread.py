"""One decode step of a delta-rule layer between its projections, on Hopper, for few rows: a key head is
spread over the programs of a cluster.

Owns the kernel; it does what `fused_delta_step` does elsewhere, by the same formulas, for heads of 128 x 128
whose states are written in every step. With few rows a step is a chain of waits, not of bytes. So:

* Whatever the kernel before does not write is in registers when that one ends: states, windows, weights.
* Each program makes q and k of its key head for itself, and has some rows of its value heads' states.
* Programs wait for each other once, for an output's sum of squares (`cluster_sum`), and write their states
  meanwhile. Who has that sum also knows that all have read the window of q and k, and may move it.

Rows of padding are skipped. Offsets into slots are 64-bit.
"""

from __future__ import annotations

from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.cluster import meet, over
from denim.recurrence.kernels.cluster_sum import give, open_sum, take
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.delta_token import convolve, log_decay_of
from denim.recurrence.kernels.exponentials import exp, sigmoid
from denim.recurrence.kernels.overlap import launch_options
from denim.recurrence.kernels.state_ring import DIM

WARPS = gl.constexpr(4)  # of a program

# Key heads of all rows up to which the kernel is fastest, for each number of value heads of one.
MOST_HEADS = {1: 128, 2: 64, 4: 64}
# Heads of all rows with a decay a channel up to which a larger cluster is faster.
MANY_PROGRAMS_TO = 64
# Registers of a thread in a smaller cluster. A multiprocessor then holds five of its programs: all of a step
# are to run at once, and the first of the next beside them.
REGISTERS = 96


def suits(state: Tensor, rows: int, key_heads: int) -> bool:
    """Whether the kernel takes a step of so many rows with states [slots, Hv, d_v, d_k], and is fastest: as
    measured on an H200."""
    group = state.shape[1] // key_heads
    most = MOST_HEADS.get(group, 0)
    return state.shape[2:] == (DIM.value, DIM.value) and rows * key_heads <= most


def programs_of(heads: int, group: int, vector_decay: bool) -> int:
    """Programs of a cluster, for so many key heads of all rows with `group` value heads each: as measured on
    an H200. A program has 32 rows of states where it can, and 16 where that leaves multiprocessors idle."""
    return 8 if group > 1 or (vector_decay and heads <= MANY_PROGRAMS_TO) else 4


@constexpr_function
def _layout(size, lanes, warps, programs, dim=None):
    dims = len(size)
    return gl.BlockedLayout(size, lanes, warps, [*range(dims)][::-1], over(programs, dims, dim))


@constexpr_function
def _plain(dims, programs):
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(dims)][::-1], over(programs, dims))


@gluon.jit
def _columns(ptr, count: gl.constexpr, distance: gl.constexpr, mask):
    """What lies at `ptr` and at `count` - 1 places behind it, each so far from the next."""
    columns = ()
    for j in gl.static_range(count):
        columns = columns + (gl.load(ptr + j * distance, mask=mask),)  # noqa: RUF005
    return columns


@gluon.jit
def _moved(ptr, columns, x, distance: gl.constexpr):
    """Store the window one token on: its columns but the first, and x."""
    for j in gl.static_range(len(columns) - 1):
        gl.store(ptr + j * distance, columns[j + 1])
    gl.store(ptr + (len(columns) - 1) * distance, x)


@gluon.jit
def _read(state, x):
    return gl.sum(gl.sum(state * x[None, :, :], 1), 1)


@gluon.jit
def _beside(x):
    """A number for each row, beside a tile."""
    return gl.expand_dims(gl.expand_dims(x, 1), 1)


@gluon.jit(do_not_specialize_on_alignment=["slots_ptr", "b_ptr", "a_ptr"])
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
    out_ptr,
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
    programs: gl.constexpr,
):
    values: gl.constexpr = group * DIM  # rows of the states of a key head, which the programs divide
    rows: gl.constexpr = values // (programs * WARPS)  # of a warp
    # A thread has 4 numbers of each of so many parts of a row; as many rows are read by a warp at once. With
    # a decay a channel it holds three vectors over them beside the state: over fewer where it has more rows.
    parts: gl.constexpr = 16 // rows if vector_decay else 4
    piece: gl.constexpr = DIM // parts
    channels: gl.constexpr = key_heads * (2 * DIM + values)
    v_channels: gl.constexpr = 2 * key_heads * DIM
    tile: gl.constexpr = _layout(
        [rows // parts, parts, 4], [parts, 1, 32 // parts], [WARPS, 1, 1], programs, 0
    )
    key: gl.constexpr = gl.SliceLayout(0, tile)
    value: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, tile))
    side_by_side: gl.constexpr = _layout([1, 2], [1, 32], [2, WARPS // 2], programs)
    spread: gl.constexpr = _layout([1], [32], [WARPS], programs)
    lines: gl.constexpr = _plain(2, programs)
    mixed = gl.allocate_shared_memory(gl.float32, [1, 2, DIM], lines)
    by_parts = mixed._reinterpret(gl.float32, [2, parts, piece], lines)
    if vector_decay:
        decays = gl.allocate_shared_memory(gl.float32, [1, parts, piece], lines)
        decay_line = decays._reinterpret(gl.float32, [1, DIM], _plain(1, programs))

    head = gl.program_id(0)
    row = gl.program_id(1).to(gl.int64)
    slot = gl.load(slots_ptr + row)
    live = slot >= 0
    place = open_sum(programs)
    section = gl.arange(0, 2, layout=gl.SliceLayout(1, side_by_side))[:, None]
    lane = gl.arange(0, DIM, layout=gl.SliceLayout(0, side_by_side))[None, :]
    qk_at = (section * key_heads + head) * DIM + lane
    at = gl.arange(0, values, layout=value)
    v_at = head * values + at
    value_head = head * group + at // DIM
    tile_row = gl.arange(0, values, layout=gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None, None]
    part = gl.arange(0, parts, layout=gl.SliceLayout(0, gl.SliceLayout(2, tile)))[None, :, None]
    inner = gl.arange(0, piece, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile)))[None, None, :]
    k_at = head * DIM + gl.arange(0, DIM, layout=spread)

    # The kernel before this one writes x, z, b and a: all else is asked for before that one has ended.
    x_at = x_ptr + row * x_stride + qk_at
    v_x_at = x_ptr + row * x_stride + v_channels + v_at
    z_at = z_ptr + row * z_stride + v_at
    b_at = b_ptr + row * b_stride + value_head
    if vector_decay:
        a_at = a_ptr + row * a_stride + k_at
        a_log = gl.load(a_log_ptr + head)
        bias = gl.load(dt_bias_ptr + k_at)
    else:
        a_at = a_ptr + row * a_stride + value_head
        a_log = gl.load(a_log_ptr + value_head)
        bias = gl.load(dt_bias_ptr + value_head).to(gl.float32)
    norm = gl.load(norm_ptr + at % DIM)
    taps = _columns(taps_ptr + qk_at, width, channels, None)
    v_taps = _columns(taps_ptr + v_channels + v_at, width, channels, None)
    window = window_ptr + slot * window_stride + qk_at
    v_window = window_ptr + slot * window_stride + v_channels + v_at
    columns = _columns(window, width - 1, channels, live)
    v_columns = _columns(v_window, width - 1, channels, live)
    state_at = state_ptr + slot * state_stride + ((head * values + tile_row) * DIM + part * piece + inner)
    state = gl.load(state_at, mask=live).to(gl.float32)
    meet()
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()
    if slot < 0:
        return
    z = gl.load(z_at).to(gl.float32)
    b = gl.load(b_at).to(gl.float32)
    v_x = gl.load(v_x_at)
    a = gl.load(a_at)
    x = gl.load(x_at)

    mixed.index(0).store(convolve(x, columns, taps, width))
    decay = exp(log_decay_of(a, (a_log, bias), floor, floored))
    if vector_decay:
        decay_line.index(0).store(decay)
    v = convolve(v_x, v_columns, v_taps, width)
    beta = beta_limit * sigmoid(b)
    q = by_parts.index(0).load(key)
    k = by_parts.index(1).load(key)
    q_norm = gl.rsqrt(gl.sum(gl.sum(q * q, 0), 0) + l2_eps) * scale
    k_norm = gl.rsqrt(gl.sum(gl.sum(k * k, 0), 0) + l2_eps)
    qk = gl.sum(gl.sum(q * k, 0), 0) * q_norm * k_norm
    # Both reads from the state as it was, so that neither waits for the other: S q = S' q + u (k . q).
    if vector_decay:
        fade = decays.index(0).load(key)
        u = beta * (v - _read(state, k * fade) * k_norm)
        o = _read(state, q * fade) * q_norm + u * qk
        fade = fade[None, :, :]
    else:
        u = beta * (v - _read(state, k) * decay * k_norm)
        o = _read(state, q) * decay * q_norm + u * qk
        fade = _beside(decay)
    squares = gl.sum(gl.reshape(o * o, [programs * WARPS, rows]), 1)
    give(squares, place, programs)
    state = state * fade + _beside(u * k_norm) * k[None, :, :]
    gl.store(state_at, state.to(state_ptr.dtype.element_ty), cache_modifier=".cs")
    _moved(v_window, v_columns, v_x, channels)
    y = o * norm * sigmoid(z)
    if not sigmoid_gate:
        y = y * z
    factor = gl.rsqrt(take(squares, place, programs, group) / DIM + norm_eps)
    factor, _ = gl.broadcast(factor[:, None], gl.reshape(y, [programs * WARPS, rows]))
    y = y * gl.convert_layout(gl.reshape(factor, [values]), value, assert_trivial=True)
    gl.store(out_ptr + row * (key_heads * values) + v_at, y.to(out_ptr.dtype.element_ty))
    _moved(window, columns, x, channels)


def hopper_delta_spread(inputs: DeltaInputs) -> Tensor:
    """One token for each of B rows, [B, Hv · 128], for states [slots, Hv, 128, 128]; Hv / Hk is 1, 2 or 4. As
    `fused_delta_step`."""
    out, constants = inputs.new_output(), inputs.constants()
    rows, key_heads = inputs.rows, constants["key_heads"]
    programs = programs_of(rows * key_heads, constants["group"], constants["vector_decay"])
    if rows:
        _step[(key_heads, rows)](
            *inputs.tensors(),
            inputs.state,
            inputs.state.stride(0),
            out,
            *inputs.numbers(),
            **constants,
            programs=programs,
            num_ctas=programs,
            num_warps=WARPS.value,
            maxnreg=REGISTERS if programs == 4 else None,
            **launch_options(overlap=True),
        )
    return out
