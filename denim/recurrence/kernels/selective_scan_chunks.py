"""The selective scan of Mamba1 over whole sequences, with what stands around it.

Owns the launch and the portable kernel: a program takes some channels of one sequence from its first token to
its last, chunk by chunk of a `ChunkTable`, and keeps their states in registers, so that a state inside a
sequence costs its bytes only where it is wanted. Fuses softplus of Δ, the norm of B and C, the decay, the
read-out, the skip and the gate. States are read from and written to their slots; offsets are 64-bit.

NVIDIA devices have a kernel of their own with the same arguments (`cuda_selective_scan`): it asks for tokens
before it needs them, where this one waits for each.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_walk import TABLE
from denim.recurrence.kernels.exponentials import LOG2_E, exp, silu, softplus
from denim.recurrence.kernels.selective_scan_step import load_scale, normed

# The `size` of the table that `selective_scan_chunks` wants.
CHUNK_TOKENS = 64
# Channels of a program.
CHANNELS = 32


@cache
def on_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


@triton.jit(do_not_specialize_on_alignment=TABLE)
def _scan(
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
    z_stride: tl.constexpr,
    chunks_ptr,
    first_chunk_ptr,
    cu_seqlens_ptr,
    slot_in_ptr,
    slot_out_ptr,
    save_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    channels: tl.constexpr,
    states: tl.constexpr,
    norm: tl.constexpr,
    block: tl.constexpr,
    block_n: tl.constexpr,
):
    """A program has some channels of one sequence: h is [block, block_n]."""
    sequence = tl.program_id(1)
    slot_out = tl.load(slot_out_ptr + sequence)
    if slot_out < 0:
        return
    c = tl.program_id(0) * block + tl.arange(0, block)
    n = tl.arange(0, block_n)
    real = c < channels
    n_real = n < states
    tile = c[:, None] * states + n[None, :]
    own = real[:, None] & n_real[None, :]
    dt_bias = tl.load(dt_bias_ptr + c, mask=real, other=0.0)
    skip = tl.load(d_ptr + c, mask=real, other=0.0)
    b_scale = load_scale(b_scale_ptr, n, n_real)
    c_scale = load_scale(c_scale_ptr, n, n_real)
    a = exp(tl.load(a_log_ptr + tile, mask=own, other=0.0)) * -LOG2_E
    slot = tl.load(slot_in_ptr + sequence)
    h = tl.load(state_ptr + slot * state_stride + tile, mask=own & (slot >= 0), other=0.0).to(tl.float32)
    for chunk in range(tl.load(first_chunk_ptr + sequence), tl.load(first_chunk_ptr + sequence + 1)):
        first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
        for row in range(first, first + tl.load(chunks_ptr + chunk * 3 + 2)):
            x = tl.load(x_ptr + row * channels + c, mask=real, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * channels + c, mask=real, other=0.0).to(tl.float32)
            z = tl.load(z_ptr + row * z_stride + c, mask=real, other=0.0).to(tl.float32)
            bc_at = bc_ptr + row * bc_stride + n[None, :]
            b = normed(tl.load(bc_at, mask=n_real[None, :], other=0.0), b_scale, states, eps, norm)
            read = tl.load(bc_at + states, mask=n_real[None, :], other=0.0)
            read = normed(read, c_scale, states, eps, norm)
            delta = softplus(dt + dt_bias)
            h = h * tl.exp2(delta[:, None] * a) + (delta * x)[:, None] * b
            y = (tl.sum(h * read, 1) + x * skip) * silu(z)
            tl.store(out_ptr + row * channels + c, y.to(out_ptr.dtype.element_ty), mask=real)
        if save_ptr is not None:
            save = tl.load(save_ptr + chunk)
            if save >= 0:
                saved = state_ptr + save * state_stride + tile
                tl.store(saved, h.to(state_ptr.dtype.element_ty), mask=own)
    last = state_ptr + slot_out * state_stride + tile
    tl.store(last, h.to(state_ptr.dtype.element_ty), mask=own)


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
    if on_nvidia(x.device):
        from denim.recurrence.kernels import cuda_selective_scan as cuda

        kernel, block_n = cuda.scan, max(cuda.SHARES.value, block_n)
        options = {"num_warps": cuda.warps_of(channels, table, x.dtype), "maxnreg": cuda.REGISTERS}
    else:
        kernel, options = _scan, {"num_warps": 1}
    kernel[(triton.cdiv(channels, CHANNELS), len(table.slot_in))](
        x,
        dt,
        dt_bias,
        a_log,
        d,
        bc,
        bc.stride(0),
        b_scale,
        c_scale,
        0.0 if norm_eps is None else norm_eps,
        z,
        z.stride(0),
        table.chunks,
        table.first_chunk,
        table.cu_seqlens,
        table.slot_in,
        table.slot_out,
        table.save,
        states,
        states.stride(0),
        out,
        channels=channels,
        states=number,
        norm=norm_eps is not None,
        block=CHANNELS,
        block_n=block_n,
        **options,
    )
    return out
