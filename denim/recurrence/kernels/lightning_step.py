"""One decode step of a lightning attention layer between its two projections, as two kernels.

The first does SiLU on q, k and v and takes one token through the gated accumulation with a constant decay,
on the state in its arena slot, which is read once and written once; a program owns some value channels of
one head of one row. The second is the norm over all heads with its gate (`gated_norm`).

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.exponentials import exp, silu
from denim.recurrence.kernels.gated_norm import gated_norm
from denim.recurrence.kernels.overlap import launch_options, overlaps
from denim.recurrence.kernels.ssd_step import WARPS, value_block


@triton.jit
def _step(
    projected_ptr,
    projected_stride,
    log_decay_ptr,
    slots_ptr,
    state_ptr,
    state_stride,
    y_ptr,
    dim: tl.constexpr,
    splits: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    head = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    heads = tl.num_programs(0) // splits
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    v_at = part * block_v + tl.arange(0, block_v)
    k_at = tl.arange(0, block_k)
    v_mask = v_at < dim
    k_mask = k_at < dim
    tile = head * (dim * dim) + v_at[:, None] * dim + k_at[None, :]
    tile_mask = v_mask[:, None] & k_mask[None, :]
    state = state_ptr + slot * state_stride + tile
    s = tl.load(state, mask=tile_mask, other=0.0).to(tl.float32)

    qkv = projected_ptr + row * projected_stride + head * (3 * dim)
    q = silu(tl.load(qkv + k_at, mask=k_mask, other=0.0).to(tl.float32))
    k = silu(tl.load(qkv + dim + k_at, mask=k_mask, other=0.0).to(tl.float32))
    v = silu(tl.load(qkv + 2 * dim + v_at, mask=v_mask, other=0.0).to(tl.float32))
    s = s * exp(tl.load(log_decay_ptr + head)) + v[:, None] * k[None, :]
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=tile_mask)
    y = tl.sum(s * q[None, :], 1)
    tl.store(y_ptr + (row * heads + head) * dim + v_at, y, mask=v_mask)


def lightning_step(projected: Tensor, log_decay: Tensor, slots: Tensor, state: Tensor) -> Tensor:
    """The rule alone for one token of each of R rows: [R, H·d] in fp32; rows of padding are not written.

    projected: [R, >= 3·H·d] = [(q | k | v) of every head | ...] before SiLU, rows any distance apart;
    log_decay: [H] fp32; slots: [R] int64, negative for padding; state: [slots, H, d, d], a view of the arena,
    updated in place. Scale 1. Rule: `denim.recurrence.gated_accumulation`; fp32 inside.
    """
    rows = len(projected)
    _, heads, dim, _ = state.shape
    assert projected.stride(1) == 1 and state[0].is_contiguous() and projected.shape[1] >= 3 * heads * dim
    y = torch.empty(rows, heads * dim, dtype=torch.float32, device=projected.device)
    block_v = value_block(dim, dim)
    splits = triton.cdiv(dim, block_v)
    overlap = overlaps(state.device)
    _step[(heads * splits, rows)](
        projected,
        projected.stride(0),
        log_decay,
        slots,
        state,
        state.stride(0),
        y,
        dim=dim,
        splits=splits,
        block_v=block_v,
        block_k=triton.next_power_of_2(dim),
        overlap=overlap,
        num_warps=WARPS,
        **launch_options(overlap),
    )
    return y


def lightning_step_fused(
    projected: Tensor, log_decay: Tensor, norm_scale: Tensor, norm_eps: float, slots: Tensor, state: Tensor
) -> Tensor:
    """From the input projection to the input of the output projection: [R, H·d] in projected's dtype.

    projected: [R, 4·H·d] = [(q | k | v) of every head | gate]; norm_scale: [H·d] fp32; the rest as in
    `lightning_step`.
    """
    y = lightning_step(projected, log_decay, slots, state)
    return gated_norm(y, projected[:, -y.shape[1] :], norm_scale, norm_eps, before_gate=True, sigmoid=True)
