"""What a decode step of a delta-rule layer does around the rule on Hopper, for one value head.

Owns the loads (the window's columns with their taps, and what the projections made of the token), the
convolution, the gates, the window's move and the gated norm, for a program that has a head to itself. q, k
and v lie side by side as [4, DIM], of which the last section is empty. Knows neither states nor records.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from denim.recurrence.kernels.exponentials import exp, sigmoid, silu, softplus
from denim.recurrence.kernels.state_ring import DIM


@gluon.jit
def _channels(head, lanes, key_heads: gl.constexpr, group: gl.constexpr):
    """Of q, k and v (sections 0 to 2) of a value head, in [q | k | v]."""
    unit, i, _, _ = head
    section, lane = lanes
    key_head = unit % key_heads
    head_at = gl.where(section < 2, section * key_heads + key_head, 2 * key_heads + key_head * group + i)
    return head_at * DIM + lane


@gluon.jit
def load_columns(
    windows, head, units, lanes, key_heads: gl.constexpr, group: gl.constexpr, width: gl.constexpr
):
    """The window's columns for q, k and v of a value head, and the taps."""
    window_ptr, window_stride, taps_ptr = windows
    unit, _, slot, _ = head
    section, _ = lanes
    channels: gl.constexpr = (2 + group) * key_heads * DIM
    at = _channels(head, lanes, key_heads, group)
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
def load_rates(rates, head, spread, key_heads: gl.constexpr, group: gl.constexpr, vector_decay: gl.constexpr):
    """A value head's a_log and the decay's bias, for a vector decay like `spread`."""
    a_log_ptr, dt_bias_ptr = rates
    unit, i, _, _ = head
    value_head = (unit % key_heads) * group + i
    a_log = gl.load(a_log_ptr + value_head)
    if vector_decay:
        return a_log, gl.load(dt_bias_ptr + value_head * DIM + spread)
    else:
        return a_log, gl.load(dt_bias_ptr + value_head).to(gl.float32)


@gluon.jit
def load_token(
    tensors,
    head,
    units,
    lanes,
    whole,
    spread,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
):
    """What the projections made of the token for a value head: q, k and v; the gate; b and a. whole, spread:
    0 .. DIM - 1 as the gate and a vector decay lie."""
    x_ptr, x_stride, z_ptr, z_stride, b_ptr, b_stride, a_ptr, a_stride = tensors
    unit, i, _, _ = head
    section, _ = lanes
    row = (unit // key_heads).to(gl.int64)
    value_head = (unit % key_heads) * group + i
    there = unit < units
    at = _channels(head, lanes, key_heads, group)
    x = gl.load(x_ptr + row * x_stride + at, mask=(section < 3) & there, other=0.0)
    z = gl.load(z_ptr + row * z_stride + value_head * DIM + whole, mask=(whole >= 0) & there, other=0.0)
    b = gl.load(b_ptr + row * b_stride + value_head, mask=there, other=0.0)
    if vector_decay:
        at = a_ptr + row * a_stride + value_head * DIM + spread
        a = gl.load(at, mask=(spread >= 0) & there, other=0.0)
    else:
        a = gl.load(a_ptr + row * a_stride + value_head, mask=there, other=0.0)
    return x, z, b, a


@gluon.jit
def convolve(x, columns, taps, width: gl.constexpr):
    """SiLU of the convolution, in fp32."""
    acc = x.to(gl.float32) * taps[width - 1].to(gl.float32)
    for j in gl.static_range(width - 1):
        acc += columns[j].to(gl.float32) * taps[j].to(gl.float32)
    acc = acc.to(x.dtype).to(gl.float32)  # the plain form returns the model's dtype here
    return silu(acc)


@gluon.jit
def log_decay_of(a, rates, floor, floored: gl.constexpr):
    """-rate softplus(a + bias), or floor sigmoid(rate (a + bias)), with rate = e^a_log."""
    a_log, bias = rates
    biased = a.to(gl.float32) + bias
    if floored:
        return floor * sigmoid(exp(a_log) * biased)
    else:
        return -exp(a_log) * softplus(biased)


@gluon.jit
def move_window(
    windows, head, x, columns, lanes, key_heads: gl.constexpr, group: gl.constexpr, width: gl.constexpr
):
    """The token enters the window: a thread has read what it overwrites. q and k are moved on for the last
    value head of a key head."""
    window_ptr, window_stride, _ = windows
    _, i, slot, _ = head
    section, _ = lanes
    channels: gl.constexpr = (2 + group) * key_heads * DIM
    moved = window_ptr + slot * window_stride + _channels(head, lanes, key_heads, group)
    mask = (section == 2) | ((section < 2) & (i == group - 1))
    for j in gl.static_range(width - 1):
        if j < width - 2:
            gl.store(moved + j * channels, columns[j + 1], mask=mask)
        else:
            gl.store(moved + j * channels, x, mask=mask)


@gluon.jit
def gated_norm(o, gate, norm, norm_eps, sigmoid_gate: gl.constexpr):
    """RMS norm of o [DIM], times the SiLU of the gate, or its sigmoid."""
    y = o * gl.rsqrt(gl.sum(o * o, 0) / DIM + norm_eps) * norm
    if sigmoid_gate:
        return y * sigmoid(gate.to(gl.float32))
    else:
        return y * silu(gate.to(gl.float32))
