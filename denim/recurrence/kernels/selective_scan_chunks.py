"""The selective scan of Mamba1 over whole sequences, with what stands around it.

Owns the walk over the chunks of a `ChunkTable`: a program takes some channels of one sequence from its first
token to its last and keeps their states in registers, so that a state inside a sequence costs its bytes only
where it is wanted. Fuses softplus of Δ, the decay, the read-out, the skip and the gate. States are read from
and written to their slots; offsets are 64-bit.

The rule has one exponential for each token, channel and state, and these set the pace: a multiprocessor forms
16 a clock, and multiplies eight times as fast. So long sequences are not cut, which would form them twice.
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
# Tokens whose inputs a program asks for at once; its channels and warps: a thread has 4 of 16 states.
AHEAD, CHANNELS, WARPS = 8, 32, 4


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
):
    """B and C, normed and in fp32: [total, 2 states]."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    n = tl.arange(0, block_n)
    mask = (row < total)[:, None] & (n < states)[None, :]
    source = bc_ptr + row[:, None] * bc_stride + n[None, :]
    target = out_ptr + row[:, None] * (2 * states) + n[None, :]
    b = tl.load(source, mask=mask, other=0.0)
    c = tl.load(source + states, mask=mask, other=0.0)
    tl.store(target, normed(b, load_scale(b_scale_ptr, n, n < states), states, eps, norm), mask=mask)
    tl.store(
        target + states,
        normed(c, load_scale(c_scale_ptr, n, n < states), states, eps, norm),
        mask=mask,
    )


@triton.jit
def _scan(
    x_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_log_ptr,
    d_ptr,
    bc_ptr,
    z_ptr,
    z_stride,
    chunks_ptr,
    first_chunk_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    channels,
    states: tl.constexpr,
    ahead: tl.constexpr,
    block: tl.constexpr,
    block_n: tl.constexpr,
):
    sequence = tl.program_id(1)
    slot_out = tl.load(slot_out_ptr + sequence)
    if slot_out < 0:
        return
    c = tl.program_id(0) * block + tl.arange(0, block)
    n = tl.arange(0, block_n)
    real = c < channels
    known = n < states
    tile = c[:, None] * states + n[None, :]
    tile_mask = real[:, None] & known[None, :]
    a = exp(tl.load(a_log_ptr + tile, mask=tile_mask, other=0.0)) * -LOG2_E
    dt_bias = tl.load(dt_bias_ptr + c, mask=real, other=0.0)
    skip = tl.load(d_ptr + c, mask=real, other=0.0)
    h = tl.zeros([block, block_n], tl.float32)
    slot = tl.load(slot_in_ptr + sequence)
    if slot >= 0:
        h += tl.load(state_ptr + slot * state_stride + tile, mask=tile_mask, other=0.0)

    for chunk in range(tl.load(first_chunk_ptr + sequence), tl.load(first_chunk_ptr + sequence + 1)):
        first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
        count = tl.load(chunks_ptr + chunk * 3 + 2)
        for begun in range(0, count, ahead):
            xs = ()
            dts = ()
            zs = ()
            bs = ()
            cs = ()
            for i in tl.static_range(ahead):
                row = first + begun + i
                mask = real & (begun + i < count)
                bc_mask = known & (begun + i < count)
                xs += (tl.load(x_ptr + row * channels + c, mask=mask, other=0.0),)
                dts += (tl.load(dt_ptr + row * channels + c, mask=mask, other=0.0),)
                zs += (tl.load(z_ptr + row * z_stride + c, mask=mask, other=0.0),)
                bs += (tl.load(bc_ptr + row * (2 * states) + n, mask=bc_mask, other=0.0),)
                cs += (tl.load(bc_ptr + row * (2 * states) + states + n, mask=bc_mask, other=0.0),)
            for i in tl.static_range(ahead):
                x = xs[i].to(tl.float32)
                z = zs[i].to(tl.float32)
                delta = tl.where(begun + i < count, softplus(dts[i].to(tl.float32) + dt_bias), 0.0)
                h = h * tl.exp2(delta[:, None] * a) + (delta * x)[:, None] * bs[i][None, :]
                y = tl.sum(h * cs[i][None, :], 1) + x * skip
                y = y * silu(z)
                out = out_ptr + (first + begun + i) * channels + c
                tl.store(out, y.to(out_ptr.dtype.element_ty), mask=real & (begun + i < count))
        if save_ptr is not None:
            save = tl.load(save_ptr + chunk)
            if save >= 0:
                tl.store(
                    state_ptr + save * state_stride + tile, h.to(state_ptr.dtype.element_ty), mask=tile_mask
                )
    tl.store(state_ptr + slot_out * state_stride + tile, h.to(state_ptr.dtype.element_ty), mask=tile_mask)


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
    block_n = triton.next_power_of_2(number)
    wide = torch.empty(tokens, 2 * number, dtype=torch.float32, device=x.device)
    _inputs[(triton.cdiv(tokens, 64),)](
        bc,
        bc.stride(0),
        b_scale,
        c_scale,
        0.0 if norm_eps is None else norm_eps,
        wide,
        tokens,
        states=number,
        norm=norm_eps is not None,
        rows=64,
        block_n=block_n,
    )
    blocks = triton.cdiv(channels, CHANNELS)
    _scan[(blocks, len(table.slot_in))](
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
        block=CHANNELS,
        block_n=block_n,
        num_warps=WARPS,
    )
    return out
