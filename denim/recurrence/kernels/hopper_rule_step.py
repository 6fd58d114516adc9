"""One decode step of the delta rule alone, for many fp32 states of 128 x 128, on Hopper.

It does what `delta_rule_step` does elsewhere. With many states memory sets the pace, and what is left to win
is the order in which it is touched: programs of one warp take 4 KiB each, one behind the other as states lie,
and read them 512 bytes at a time. A thread holds four channels of each of its rows, so that a program needs
64 registers and a multiprocessor has all of its 32 places filled. Sums over d_k would take five shuffles for
each row and vector; the threads' parts go through shared memory instead, from where four threads have a row.

Knows slots; rows of padding are skipped. Offsets into slots are 64-bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options

DIM = gl.constexpr(128)  # d_k and d_v
ROWS = gl.constexpr(8)  # of a state, a program's
LANES = gl.constexpr(32)

# States of all rows together from which on memory sets the pace.
LEAST_STATES = 1024


def suits(state: Tensor, rows: int) -> bool:
    """Whether the kernel takes a step of so many rows with states [slots, Hv, d_v, d_k], and is faster: as
    measured on an H200."""
    many = rows * state.shape[1] >= LEAST_STATES
    return many and state.dtype == torch.float32 and state.shape[2:] == (DIM.value, DIM.value)


@gluon.jit
def _step(
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
    key_heads: gl.constexpr,
    group: gl.constexpr,
    vector_decay: gl.constexpr,
):
    # A tile of a state, a row at a time; and the parts of its sums for k and q, 8 of a row beside each other.
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [1, LANES], [1, 1], [1, 0])
    key: gl.constexpr = gl.SliceLayout(0, tile)
    value: gl.constexpr = gl.SliceLayout(1, tile)
    parts: gl.constexpr = gl.BlockedLayout([1, ROWS, 2], [ROWS, LANES // ROWS, 1], [1, 1, 1], [2, 1, 0])
    summed: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, parts))
    first_row = gl.program_id(0) * ROWS
    value_head = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()
    slot = gl.load(slots_ptr + row)
    channel = gl.arange(0, DIM, layout=key)
    value_row = row * (key_heads * group) + value_head
    key_at = (row * key_heads + value_head // group) * DIM + channel
    value_at = value_row * DIM + first_row + gl.arange(0, ROWS, layout=summed)
    q = gl.load(q_ptr + key_at)
    k = gl.load(k_ptr + key_at)
    v = gl.load(v_ptr + value_at)
    beta = gl.load(beta_ptr + value_row)
    if vector_decay:
        log_decay = gl.load(log_decay_ptr + value_row * DIM + channel)
    else:
        log_decay = gl.load(log_decay_ptr + value_row)
    if slot < 0:
        return
    rows = (value_head * DIM + first_row + gl.arange(0, ROWS, layout=value)) * DIM
    state = state_ptr + slot * state_stride + rows[:, None] + channel[None, :]
    s = gl.load(state)
    q = q.to(gl.float32)
    k = k.to(gl.float32)
    qk = gl.sum(q * k, 0)
    decay = gl.exp(log_decay.to(gl.float32))
    # Both reads from the state as it was, so that neither waits for the other: S q = S' q + u (k . q).
    if vector_decay:
        read_k = s * (k * decay)[None, :]
        read_q = s * (q * decay)[None, :]
        decay = decay[None, :]
    else:
        read_k = s * k[None, :]
        read_q = s * q[None, :]
    read_k = gl.sum(gl.reshape(read_k, [ROWS, LANES, 4]), 2)
    read_q = gl.sum(gl.reshape(read_q, [ROWS, LANES, 4]), 2)
    read_k, read_q = gl.split(gl.sum(gl.convert_layout(gl.join(read_k, read_q), parts), 1))
    read_k = gl.convert_layout(read_k, summed)
    read_q = gl.convert_layout(read_q, summed)
    if not vector_decay:
        read_k = read_k * decay
        read_q = read_q * decay
    u = beta.to(gl.float32) * (v.to(gl.float32) - read_k)
    o = (read_q + u * qk) * scale
    s = s * decay + gl.convert_layout(u, value)[:, None] * k[None, :]
    gl.store(state, s)
    gl.store(out_ptr + value_at, o.to(out_ptr.dtype.element_ty))


def hopper_rule_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, slots: Tensor, state: Tensor
) -> Tensor:
    """As `delta_rule_step.delta_rule_step`, for what `suits`."""
    rows, key_heads, key_dim = k.shape
    value_heads = state.shape[1]
    out = torch.empty_like(v)
    _step[(DIM.value // ROWS.value, value_heads, rows)](
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
        vector_decay=log_decay.dim() == 3,
        num_warps=1,
        **launch_options(overlap=True),
    )
    return out
