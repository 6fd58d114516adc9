"""The selective scan over whole sequences on NVIDIA devices, four threads a channel.

Owns the kernel that `selective_scan_chunks` launches there; its arguments and slots are the portable one's.

The rule forms one exponential for each token, channel and state, and a multiprocessor 16 a clock: that sets
the pace, if what stands around them does not. So:

* Four threads have a channel's states in registers, so that 8,192 channels of one sequence are two warps for
  every scheduler of an H200. Sequences are not cut, which would form the exponentials twice.
* What a channel needs once a token (softplus, skip, gate) one of its threads does: thread t for token t of
  every four. Δ and Δx reach the others through shared memory; four sums over states are made at once, each
  left with the thread that has its token (`_sums`).
* The rows of the next tokens are on their way while these are computed.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import LOG2_E, exp, silu, softplus
from denim.recurrence.kernels.selective_scan_step import load_scale, normed

SHARES = gl.constexpr(4)  # threads of a channel; as many tokens are a group
OTHERS = gl.constexpr(32 // 4)  # of a warp's channels, or pairs of them
STAGE = gl.constexpr(16)  # tokens whose rows are asked for at once
GROUPS = gl.constexpr(16 // 4)
# More registers than the compiler would take: what it loads is to be there when it is needed.
REGISTERS = 128
# Channels of all sequences from which two of them a thread are faster. On an H200, 8,192 in a sequence: one
# sequence was 30% slower, four were 3% faster, sixteen 12%.
MANY = 30_000


def warps_of(channels: int, table: ChunkTable, dtype: torch.dtype) -> int:
    """Warps of a program: 4 with one channel a thread, or 2 with two, which a B and a C serve at once.

    A table in a captured graph has room for more sequences than there may be; so what counts is how many of
    the longest there can be. In fp32 always 4: a token's sum does not depend on what else is in a step.
    """
    sequences = len(table.chunks) // max(1, table.longest)
    return 2 if dtype != torch.float32 and channels * sequences >= MANY else 4


@gluon.jit
def _sums(parts, token):
    """parts: four of [channels, 4], each thread's share of a token; thread t gets the sum for token t.

    In the layouts below the threads of a channel are 8 lanes apart. Each step halves what is still to be
    added: it gives away the tokens of the other half and takes its own from there.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred upper, odd;
        .reg .b32 bit;
        .reg .f32 sent, kept, next;
        and.b32 bit, $5, 2;
        setp.ne.b32 upper, bit, 0;
        and.b32 bit, $5, 1;
        setp.ne.b32 odd, bit, 0;
        selp.f32 sent, $1, $3, upper;
        selp.f32 kept, $3, $1, upper;
        shfl.sync.bfly.b32 sent, sent, 16, 0x1f, 0xffffffff;
        add.f32 kept, kept, sent;
        selp.f32 sent, $2, $4, upper;
        selp.f32 next, $4, $2, upper;
        shfl.sync.bfly.b32 sent, sent, 16, 0x1f, 0xffffffff;
        add.f32 next, next, sent;
        selp.f32 sent, kept, next, odd;
        selp.f32 kept, next, kept, odd;
        shfl.sync.bfly.b32 sent, sent, 8, 0x1f, 0xffffffff;
        add.f32 $0, kept, sent;
        }""",
        "=f,f,f,f,f,r",
        [parts[0], parts[1], parts[2], parts[3], token],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _rows(at, stride: gl.constexpr, row, real, token, left):
    """A stage's rows of x, Δ or z from `row` on, [channels, 4] for each group; zeros behind `left` tokens."""
    raw = ()
    for g in gl.static_range(GROUPS):
        there = real[:, None] & (token + SHARES * g < left)[None, :]
        raw += (gl.load(at + (row + SHARES * g) * stride, mask=there, other=0.0),)
    return raw


@gluon.jit
def _inputs(at, stride, row, n_real, token, left, states: gl.constexpr):
    """A stage's rows of B and of C, [STAGE, N] each."""
    there = (token < left)[:, None] & n_real[None, :]
    here = at + row * stride
    return gl.load(here, mask=there, other=0.0), gl.load(here + states, mask=there, other=0.0)


@gluon.jit(do_not_specialize_on_alignment=TABLE)
def scan(
    x_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_log_ptr,
    d_ptr,
    bc_ptr,
    bc_stride,
    b_scale_ptr,
    c_scale_ptr,
    eps,
    z_ptr,
    z_stride: gl.constexpr,
    chunks_ptr,
    first_chunk_ptr,
    cu_seqlens_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    channels: gl.constexpr,
    states: gl.constexpr,
    norm: gl.constexpr,
    block: gl.constexpr,
    block_n: gl.constexpr,
):
    """A program has `block` channels of one sequence. Layouts: `held`, of the states; `tile`, of a group's
    tokens, one a thread; `flat`, of rows of B and C."""
    sequence = gl.program_id(1)
    slot_out = gl.load(slot_out_ptr + sequence)
    if slot_out < 0:
        return
    warps: gl.constexpr = gl.num_warps()
    each: gl.constexpr = block_n // SHARES
    beside: gl.constexpr = block // (OTHERS * warps)
    held: gl.constexpr = gl.BlockedLayout([beside, each], [OTHERS, SHARES], [warps, 1], [0, 1])
    tile: gl.constexpr = gl.BlockedLayout([beside, 1], [OTHERS, SHARES], [warps, 1], [0, 1])
    wide: gl.constexpr = min(max(1, STAGE * block_n // (32 * warps)), block_n // 2)
    flat: gl.constexpr = gl.BlockedLayout(
        [1, wide], [32 * wide // block_n, block_n // wide], [warps, 1], [1, 0]
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    c = gl.program_id(0) * block + gl.arange(0, block, gl.SliceLayout(1, tile))
    real = c < channels
    token = gl.arange(0, SHARES, gl.SliceLayout(0, tile))
    own_token = gl.zeros([block, SHARES], gl.int32, tile) + token[None, :]
    dense = token[None, :] * channels + c[:, None]
    x_at = x_ptr + dense
    dt_at = dt_ptr + dense
    z_at = z_ptr + (token[None, :] * z_stride + c[:, None])
    dt_bias = gl.load(dt_bias_ptr + c, mask=real, other=0.0)[:, None]
    skip = gl.load(d_ptr + c, mask=real, other=0.0)[:, None]

    bc_token = gl.arange(0, STAGE, gl.SliceLayout(1, flat))
    n = gl.arange(0, block_n, gl.SliceLayout(0, flat))
    n_real = n < states
    bc_at = bc_ptr + (bc_token[:, None] * bc_stride + n[None, :])
    b_scale = load_scale(b_scale_ptr, n, n_real)
    c_scale = load_scale(c_scale_ptr, n, n_real)

    h_c = gl.program_id(0) * block + gl.arange(0, block, gl.SliceLayout(1, held))
    h_n = gl.arange(0, block_n, gl.SliceLayout(0, held))
    own = (h_c < channels)[:, None] & (h_n < states)[None, :]
    h_at = h_c[:, None] * states + h_n[None, :]
    a = exp(gl.load(a_log_ptr + h_at, mask=own, other=0.0)) * -LOG2_E
    slot = gl.load(slot_in_ptr + sequence)
    h = gl.load(state_ptr + slot * state_stride + h_at, mask=own & (slot >= 0), other=0.0).to(gl.float32)

    b_rows = gl.allocate_shared_memory(gl.float32, [STAGE, block_n], plain)
    c_rows = gl.allocate_shared_memory(gl.float32, [STAGE, block_n], plain)
    deltas = ()
    values = ()
    for _ in gl.static_range(GROUPS):
        deltas += (gl.allocate_shared_memory(gl.float32, [block, SHARES], plain),)
        values += (gl.allocate_shared_memory(gl.float32, [block, SHARES], plain),)

    # Where no state inside a sequence is wanted, all of it is one run of `left` tokens; else every chunk is.
    # The length of the next chunk is asked for a chunk ahead, as a tensor, which nothing waits for.
    row = gl.load(cu_seqlens_ptr + sequence)
    left = gl.load(cu_seqlens_ptr + sequence + 1) - row
    row = row.to(gl.int64)
    if save_ptr is not None:
        chunk = gl.load(first_chunk_ptr + sequence)
        end = gl.load(first_chunk_ptr + sequence + 1)
        left = gl.load(chunks_ptr + chunk * 3 + 2, mask=chunk < end, other=0)
        one = gl.arange(0, 1, gl.BlockedLayout([1], [32], [warps], [0]))
        behind = gl.load(chunks_ptr + (chunk * 3 + 5 + one), mask=chunk + 1 + one < end, other=0)
    xs = _rows(x_at, channels, row, real, token, left)
    dts = _rows(dt_at, channels, row, real, token, left)
    zs = _rows(z_at, z_stride, row, real, token, left)
    b_raw, c_raw = _inputs(bc_at, bc_stride, row, n_real, bc_token, left, states)
    while left > 0:
        x = ()
        z = zs
        for g in gl.static_range(GROUPS):
            x += (xs[g].to(gl.float32),)
            delta = softplus(dts[g].to(gl.float32) + dt_bias)
            delta = gl.where(
                (token + SHARES * g < left)[None, :], delta, 0.0
            )  # the state stays behind the end
            deltas[g].store(delta)
            values[g].store(delta * x[g])
        b_rows.store(normed(b_raw, b_scale, states, eps, norm))
        c_rows.store(normed(c_raw, c_scale, states, eps, norm))

        ends = left <= STAGE
        row_next = row + gl.minimum(left, STAGE)
        left_next = left - STAGE
        if save_ptr is not None:  # noqa: SIM102 (known when it is compiled, the other one when it runs)
            if ends:
                left_next = gl.sum(behind, 0)
        xs = _rows(x_at, channels, row_next, real, token, left_next)
        dts = _rows(dt_at, channels, row_next, real, token, left_next)
        zs = _rows(z_at, z_stride, row_next, real, token, left_next)
        b_raw, c_raw = _inputs(bc_at, bc_stride, row_next, n_real, bc_token, left_next, states)

        for g in gl.static_range(GROUPS):
            parts = ()
            for t in gl.static_range(SHARES):
                delta = deltas[g].slice(t, 1, 1).load(held)
                value = values[g].slice(t, 1, 1).load(held)
                b = b_rows.slice(SHARES * g + t, 1, 0).load(held)
                read = c_rows.slice(SHARES * g + t, 1, 0).load(held)
                h = h * gl.exp2(delta * a) + value * b
                part = gl.sum(gl.reshape(h * read, [block, SHARES, each]), 2)
                parts += (gl.convert_layout(part, tile, assert_trivial=True),)
            y = _sums(parts, own_token)
            y = (y + x[g] * skip) * silu(z[g].to(gl.float32))
            there = real[:, None] & (token + SHARES * g < left)[None, :]
            at = out_ptr + dense + (row + SHARES * g) * channels
            gl.store(at, y.to(out_ptr.dtype.element_ty), mask=there)

        if save_ptr is not None:  # noqa: SIM102 (known when it is compiled, the other one when it runs)
            if ends:
                save = gl.load(save_ptr + chunk)
                if save >= 0:
                    saved = state_ptr + save * state_stride + h_at
                    gl.store(saved, h.to(state_ptr.dtype.element_ty), mask=own)
                chunk += 1
                behind = gl.load(chunks_ptr + (chunk * 3 + 5 + one), mask=chunk + 1 + one < end, other=0)
        row = row_next
        left = left_next
    last = state_ptr + slot_out * state_stride + h_at
    gl.store(last, h.to(state_ptr.dtype.element_ty), mask=own)
