"""From an attention layer's projection to what attention reads: QK-norm, RoPE and the write of KV, as one
kernel.

Owns everything between the two products of a layer but attention itself. RoPE turns the first 2 · half
entries of a head in the half-split form (arXiv 2104.09864); the norm is that of `denim.layers.norm.RMSNorm`,
a head at a time.

A program takes one head of a few tokens: a query head, or a key head together with the value head beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps

ELEMENTS = 1024  # of a tile of several tokens: 8 for each thread of 4 warps
FEW_TOKENS = 16  # up to which a program takes one: there are too few to fill a device otherwise


@triton.jit
def _turned(
    x_ptr,
    at,
    rows,
    d,
    inside,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    dim: tl.constexpr,
    half: tl.constexpr,
    normed: tl.constexpr,
):
    """One head of some tokens [rows, d], normed and turned. fp32. The partner of a turned entry is loaded
    once more: it is in the cache."""
    x = tl.load(x_ptr + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.full([1, 1], 1.0, tl.float32)
    if normed:
        factor = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
        x = x * factor * tl.load(scale_ptr + d, mask=d < dim, other=0.0)[None, :]
    if half > 0:
        partner = tl.where(d < half, d + half, d - half)
        turns = d < 2 * half
        turned = inside & turns[None, :]
        y = tl.load(x_ptr + at + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        if normed:
            y = y * factor * tl.load(scale_ptr + partner, mask=turns, other=0.0)[None, :]
        angle = rows[:, None] * half + (d % half)[None, :]
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
        x = x * cos + tl.where(d < half, -y, y) * sin
    return x


@triton.jit(do_not_specialize=["tokens"])
def _query_key(
    q_ptr,
    k_ptr,
    v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    cos_ptr,
    sin_ptr,
    pages_ptr,
    offsets_ptr,
    kv_ptr,
    out_ptr,
    tokens,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    v_token_stride,
    page_stride,
    side_stride,
    offset_stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    normed: tl.constexpr,
    saturate: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    rows = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    head = tl.program_id(1)
    d = tl.arange(0, block_d)
    inside = (rows < tokens)[:, None] & (d < dim)[None, :]
    if head < heads:
        at = rows[:, None] * q_token_stride + head * q_head_stride
        q = _turned(q_ptr, at, rows, d, inside, q_scale_ptr, cos_ptr, sin_ptr, eps, dim, half, normed)
        out_at = (rows[:, None] * heads + head) * dim + d[None, :]
        tl.store(out_ptr + out_at, q.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        kv_head = head - heads
        page = tl.load(pages_ptr + rows, mask=rows < tokens, other=-1)
        offset = tl.load(offsets_ptr + rows, mask=rows < tokens, other=0)
        kept = inside & (page >= 0)[:, None]
        place = (page * page_stride + offset * offset_stride)[:, None] + kv_head * dim + d[None, :]
        at = rows[:, None] * k_token_stride + kv_head * dim
        k = _turned(k_ptr, at, rows, d, inside, k_scale_ptr, cos_ptr, sin_ptr, eps, dim, half, normed)
        v = tl.load(
            v_ptr + rows[:, None] * v_token_stride + kv_head * dim + d[None, :], mask=inside, other=0.0
        )
        if saturate > 0:  # the largest number of an 8-bit format; conversion may give NaN beyond it
            k = tl.minimum(tl.maximum(k, -saturate), saturate)
            v = tl.minimum(tl.maximum(v.to(tl.float32), -saturate), saturate)
        tl.store(kv_ptr + place, k.to(kv_ptr.dtype.element_ty), mask=kept)
        tl.store(kv_ptr + place + side_stride, v.to(kv_ptr.dtype.element_ty), mask=kept)


def query_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    pages: Tensor,
    offsets: Tensor,
    *,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Norm and turn q and k, write k and v into their pages; returns the queries [T, heads, dim], dense.

    q: [T, heads, dim], k, v: [T, kv_heads, dim]: views of one projection, k's and v's heads dense. q_scale,
    k_scale: [dim] fp32 scales of the norms, None: no norm. cos, sin: [T, 1, half], None: nothing is turned.
    kv: [pages, 2, page_size, kv_heads, dim], a layer's view of all pages; pages, offsets: [T] int64, the
    place of each token, a negative page for padding, which is not written. fp32 inside; numbers beyond an
    8-bit KV's range saturate."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and kv.stride()[3:] == (dim, 1)
    assert k.stride(1) == v.stride(1) == dim and (q_scale is None) == (k_scale is None)
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    overlap = overlaps(q.device)
    half = 0
    if cos is not None:
        half = cos.shape[-1]
        assert cos.is_contiguous() and sin.is_contiguous()
    block_d = triton.next_power_of_2(dim)
    block_t = 1 if tokens <= FEW_TOKENS else max(1, ELEMENTS // block_d)
    _query_key[(triton.cdiv(tokens, block_t), heads + kv_heads)](
        q,
        k,
        v,
        q if q_scale is None else q_scale,
        k if k_scale is None else k_scale,
        q if cos is None else cos,
        q if sin is None else sin,
        pages,
        offsets,
        kv,
        out,
        tokens,
        eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        heads=heads,
        dim=dim,
        half=half,
        normed=q_scale is not None,
        saturate=torch.finfo(kv.dtype).max if kv.dtype.itemsize == 1 else 0.0,
        block_t=block_t,
        block_d=block_d,
        overlap=overlap,
        num_warps=1 if block_t == 1 else 4,
        **launch_options(overlap),
    )
    return out
