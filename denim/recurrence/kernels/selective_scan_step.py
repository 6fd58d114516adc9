"""One token of the selective scan for each of many rows, with what Mamba1 does around it, as one kernel.

Fuses softplus of Δ, the norm of B and C, the decay, the state in its arena slot (read once, written once),
the read-out, the skip and the gate. A program owns some channels of one row.

Every row reads A, as large as its states, from the cache: programs that took two rows and read A once were
14% slower at 64 and 256 rows of 8,192 channels on an H200, since fewer of them are under way.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.exponentials import LOG2_E, exp, silu, softplus
from denim.recurrence.kernels.overlap import launch_options, overlaps

# Channels of a program; 16 states each are 64 bytes in fp32.
CHANNELS = 64
WARPS = 2


@triton.jit
def normed(raw, scale, size, eps, norm: tl.constexpr):
    """Rows [rows, N] of B or C in fp32, normed and rounded to their dtype if `norm`. scale: [N] or None."""
    wide = raw.to(tl.float32)
    if norm:
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
        if scale is not None:
            wide = wide * scale[None, :]
        wide = wide.to(raw.dtype).to(tl.float32)
    return wide


@triton.jit
def load_scale(scale_ptr, n, mask):
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n, mask=mask, other=0.0)
    return scale


@triton.jit
def _step(
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
    z_stride,
    slots_ptr,
    state_ptr,
    state_stride,
    out_ptr,
    total,
    states: tl.constexpr,
    norm: tl.constexpr,
    block: tl.constexpr,
    block_n: tl.constexpr,
    overlap: tl.constexpr,
):
    channel = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    mask = channel < total
    n = tl.arange(0, block_n)
    n_mask = n < states
    tile = channel[:, None] * states + n[None, :]
    tile_mask = mask[:, None] & n_mask[None, :]
    a = exp(tl.load(a_log_ptr + tile, mask=tile_mask, other=0.0)) * -LOG2_E
    dt_bias = tl.load(dt_bias_ptr + channel, mask=mask, other=0.0)
    skip = tl.load(d_ptr + channel, mask=mask, other=0.0)
    if overlap:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    state = state_ptr + slot * state_stride + tile
    h = tl.load(state, mask=tile_mask & (slot >= 0), other=0.0).to(tl.float32)
    live = mask & (slot >= 0)
    bc_mask = (n_mask & (slot >= 0))[None, :]
    x = tl.load(x_ptr + row * total + channel, mask=live, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * total + channel, mask=live, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + channel, mask=live, other=0.0).to(tl.float32)
    b = tl.load(bc_ptr + row * bc_stride + n[None, :], mask=bc_mask, other=0.0)
    c = tl.load(bc_ptr + row * bc_stride + states + n[None, :], mask=bc_mask, other=0.0)
    b = normed(b, load_scale(b_scale_ptr, n, n_mask), states, eps, norm)
    c = normed(c, load_scale(c_scale_ptr, n, n_mask), states, eps, norm)
    delta = softplus(dt + dt_bias)

    h = h * tl.exp2(delta[:, None] * a) + (delta * x)[:, None] * b
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, h.to(state_ptr.dtype.element_ty), mask=tile_mask & (slot >= 0))
    y = (tl.sum(h * c, 1) + x * skip) * silu(z)
    tl.store(out_ptr + row * total + channel, y.to(out_ptr.dtype.element_ty), mask=live)


def selective_scan_step_fused(
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
    slots: Tensor,
    state: Tensor,
) -> Tensor:
    """One token for each of R rows: silu(z) · (scan + D x), [R, channels] in z's dtype.

    x, dt: [R, channels] dense, x behind convolution and SiLU, Δ = softplus(dt + dt_bias); dt_bias, d:
    [channels] fp32; a_log: [channels, N] fp32, A = -exp(a_log); bc: [R, 2 N] = [B | C], rows any distance
    apart; norm_eps: that of the RMS norms on B and C, whose weights (fp32, [N]) are b_scale and c_scale, or
    None for none; None: no norms. z: [R, channels], rows any distance apart; slots: [R] int64, negative for
    padding; state: [slots, channels, N], a view of the arena, updated in place. Rows of padding are not
    written. Rule: `denim.recurrence.selective_scan`; fp32 inside.
    """
    rows, channels = x.shape
    states = a_log.shape[1]
    assert x.is_contiguous() and dt.is_contiguous() and bc.stride(1) == 1 and z.stride(1) == 1
    assert state[0].is_contiguous() and bc.shape[1] == 2 * states
    out = torch.empty(rows, channels, dtype=z.dtype, device=x.device)
    overlap = overlaps(x.device)
    _step[(triton.cdiv(channels, CHANNELS), rows)](
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
        slots,
        state,
        state.stride(0),
        out,
        channels,
        states=states,
        norm=norm_eps is not None,
        block=CHANNELS,
        block_n=triton.next_power_of_2(states),
        overlap=overlap,
        num_warps=WARPS,
        **launch_options(overlap),
    )
    return out
