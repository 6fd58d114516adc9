"""The selective scan of Mamba1 over whole sequences, with what stands around it.

Owns the walk over the chunks of a `ChunkTable`: a program takes some channels of one sequence from its first
token to its last and keeps their states in registers, so that a state inside a sequence costs its bytes only
where it is wanted. Fuses softplus of Δ, the decay, the read-out, the skip and the gate. States are read from
and written to their slots; offsets are 64-bit.

The rule has one exponential for each token, channel and state, and these set the pace: a multiprocessor forms
16 a clock, and multiplies eight times as fast. So long sequences are not cut, which would form them twice,
and whatever else an instruction is spent on counts: a thread has one channel with all of its states, so that
nothing is summed across threads. Where that makes too few threads, several share the states of a channel,
and each of them does the rest of the channel's work again; in fp32 always as many, so that a token's sum does
not depend on what else is in a step. B and C lie in fp32, two numbers to a load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.exponentials import LOG2_E, exp, silu, softplus
from denim.recurrence.kernels.selective_scan_step import load_scale, normed

# The `size` of the table that `selective_scan_chunks` wants.
CHUNK_TOKENS = 64
# Tokens whose inputs a program asks for at once.
AHEAD = 8
# Threads of a program, and those that fill a device: 132 multiprocessors of four schedulers, two warps each.
THREADS, FILLING = 32, 132 * 4 * 2 * 32
MOST_SHARES = 4
# Rows of B and C that a program of `_inputs` takes.
ROWS = 64


@triton.jit(do_not_specialize=["total"])  # a number of tokens is as good as another: no kernel of its own
def _inputs(
    bc_ptr,
    bc_stride,
    b_scale_ptr,
    c_scale_ptr,
    eps,
    out_ptr,
    total,
    states: tl.constexpr,
    norm: tl.constexpr,
    rows: tl.constexpr,
    block_n: tl.constexpr,
    behind: tl.constexpr,
):
    """B and C, normed and in fp32: [total + behind, 2 block_n], zero where there are no tokens or states."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    n = tl.arange(0, block_n)
    mask = (row < total)[:, None] & (n < states)[None, :]
    source = bc_ptr + row[:, None] * bc_stride + n[None, :]
    target = out_ptr + row[:, None] * (2 * block_n) + n[None, :]
    b = normed(
        tl.load(source, mask=mask, other=0.0), load_scale(b_scale_ptr, n, n < states), states, eps, norm
    )
    c = normed(
        tl.load(source + states, mask=mask, other=0.0),
        load_scale(c_scale_ptr, n, n < states),
        states,
        eps,
        norm,
    )
    written = (row < total + behind)[:, None] & (n < block_n)[None, :]
    tl.store(target, b, mask=written)
    tl.store(target + block_n, c, mask=written)


@triton.jit
def _first(pair):
    return pair.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _second(pair):
    return (pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _scan(
    x_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_log_ptr,
    d_ptr,
    bc_ptr,
    z_ptr,
    z_stride: tl.constexpr,
    chunks_ptr,
    first_chunk_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    channels: tl.constexpr,
    states: tl.constexpr,
    ahead: tl.constexpr,
    shares: tl.constexpr,
    block: tl.constexpr,
    block_n: tl.constexpr,
):
    """Tiles are [shares, block]; h[i] is the i-th state of each share."""
    sequence = tl.program_id(1)
    slot_out = tl.load(slot_out_ptr + sequence)
    if slot_out < 0:
        return
    each: tl.constexpr = block_n // shares
    c = tl.program_id(0) * block + tl.arange(0, block)
    real = c < channels
    n = tl.arange(0, shares)[:, None] * each
    tile = c[None, :] * states + n
    dt_bias = tl.load(dt_bias_ptr + c, mask=real, other=0.0)
    skip = tl.load(d_ptr + c, mask=real, other=0.0)
    slot = tl.load(slot_in_ptr + sequence)
    begin = state_ptr + slot * state_stride + tile
    a = ()
    h = ()
    for i in tl.static_range(each):
        there = real[None, :] & (n + i < states)
        a += (exp(tl.load(a_log_ptr + tile + i, mask=there, other=0.0)) * -LOG2_E,)
        h += (tl.load(begin + i, mask=there & (slot >= 0), other=0.0).to(tl.float32),)

    pairs_ptr = bc_ptr.to(tl.pointer_type(tl.uint64)) + n // 2
    for chunk in range(tl.load(first_chunk_ptr + sequence), tl.load(first_chunk_ptr + sequence + 1)):
        first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
        count = tl.load(chunks_ptr + chunk * 3 + 2)
        for begun in range(0, count, ahead):
            row = first + begun
            x_at = x_ptr + row * channels + c
            dt_at = dt_ptr + row * channels + c
            z_at = z_ptr + row * z_stride + c
            out_at = out_ptr + row * channels + c
            b_at = pairs_ptr + row * block_n
            c_at = b_at + block_n // 2
            xs = ()
            dts = ()
            zs = ()
            ys = ()
            for i in tl.static_range(ahead):
                mask = real & (begun + i < count)
                xs += (tl.load(x_at + i * channels, mask=mask, other=0.0),)
                dts += (tl.load(dt_at + i * channels, mask=mask, other=0.0),)
                zs += (tl.load(z_at + i * z_stride, mask=mask, other=0.0),)
            for i in tl.static_range(ahead):
                x = xs[i].to(tl.float32)
                delta = softplus(dts[i].to(tl.float32) + dt_bias)
                delta = tl.where(begun + i < count, delta, 0.0)  # and so the state stays behind the end
                value = (delta * x)[None, :]
                delta = delta[None, :]
                y = tl.zeros([shares, block], tl.float32)
                after = ()
                for j in tl.static_range(each // 2):
                    b = tl.load(b_at + (i * block_n + j))
                    read = tl.load(c_at + (i * block_n + j))
                    h0 = h[2 * j] * tl.exp2(delta * a[2 * j]) + value * _first(b)
                    h1 = h[2 * j + 1] * tl.exp2(delta * a[2 * j + 1]) + value * _second(b)
                    y += h0 * _first(read)
                    y += h1 * _second(read)
                    after += (h0, h1)
                h = after
                ys += (tl.sum(y, 0) + x * skip,)
            for i in tl.static_range(ahead):
                y = ys[i] * silu(zs[i].to(tl.float32))
                y = y.to(out_ptr.dtype.element_ty)
                tl.store(out_at + i * channels, y, mask=real & (begun + i < count))
        if save_ptr is not None:
            save = tl.load(save_ptr + chunk)
            if save >= 0:
                for i in tl.static_range(each):
                    target = state_ptr + save * state_stride + tile + i
                    saved = h[i].to(state_ptr.dtype.element_ty)
                    tl.store(target, saved, mask=real[None, :] & (n + i < states))
    for i in tl.static_range(each):
        target = state_ptr + slot_out * state_stride + tile + i
        tl.store(target, h[i].to(state_ptr.dtype.element_ty), mask=real[None, :] & (n + i < states))


def shares_of(table: ChunkTable, channels: int, states: int) -> int:
    """Threads that share the states of a channel, two states each at least; a power of two.

    A table in a captured graph has room for more sequences than there may be; so what counts is how many of
    the longest there can be.
    """
    sequences = max(1, len(table.chunks) // max(1, table.longest))
    shares = 1
    while shares < min(MOST_SHARES, states // 2) and channels * sequences * shares < FILLING:
        shares *= 2
    return shares


def selective_scan_chunks(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    bc: Tensor,
    norm_eps: float | None,
    b_scale: Tensor | None,
    c_scale: Tensor | None,
    z: Tensor,
    table: ChunkTable,
    states: Tensor,
) -> Tensor:
    """The sequences of `table`, from and to their slots: silu(z) · (scan + D x), [T, channels] in z's dtype.

    Arguments as in `denim.recurrence.kernels.selective_scan_step.selective_scan_step_fused`, with T tokens in
    place of R rows; states: [slots, channels, N], slots any distance apart. Rows of no chunk are not written.
    """
    tokens, channels = x.shape
    number = a_log.shape[1]
    assert x.is_contiguous() and dt.is_contiguous() and bc.stride(1) == 1 and z.stride(1) == 1
    assert states[0].is_contiguous() and bc.shape[1] == 2 * number
    out = torch.empty(tokens, channels, dtype=z.dtype, device=x.device)
    block_n = max(2, triton.next_power_of_2(number))
    wide = torch.empty(tokens + AHEAD, 2 * block_n, dtype=torch.float32, device=x.device)
    _inputs[(triton.cdiv(tokens + AHEAD, ROWS),)](
        bc,
        bc.stride(0),
        b_scale,
        c_scale,
        0.0 if norm_eps is None else norm_eps,
        wide,
        tokens,
        states=number,
        norm=norm_eps is not None,
        rows=ROWS,
        block_n=block_n,
        behind=AHEAD,
    )
    sequences = len(table.slot_in)
    shares = (
        min(MOST_SHARES, block_n // 2) if x.dtype == torch.float32 else shares_of(table, channels, block_n)
    )
    block = THREADS // shares
    _scan[(triton.cdiv(channels, block), sequences)](
        x,
        dt,
        dt_bias,
        a_log,
        d,
        wide,
        z,
        z.stride(0),
        table.chunks,
        table.first_chunk,
        table.slot_in,
        table.slot_out,
        table.save,
        states,
        states.stride(0),
        out,
        channels,
        states=number,
        ahead=AHEAD,
        shares=shares,
        block=block,
        block_n=block_n,
        num_warps=max(1, THREADS // 32),
    )
    return out
