"""What a latent attention layer keeps of a token, normed, turned and written to its page, as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.overlap import launch_options, overlaps


@triton.jit
def _kept(x, kept_ptr, saturate: tl.constexpr):
    if saturate > 0:  # the largest number of an 8-bit format; conversion may give NaN beyond it
        x = tl.minimum(tl.maximum(x, -saturate), saturate)
    return x.to(kept_ptr.dtype.element_ty)


@triton.jit
def _latent_key(
    latent_ptr,
    shared_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    pages_ptr,
    offsets_ptr,
    kept_ptr,
    eps,
    latent_stride,
    shared_stride,
    page_stride,
    offset_stride,
    dim: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    saturate: tl.constexpr,
    block_d: tl.constexpr,
    block_half: tl.constexpr,
    overlap: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block_d)
    scale = tl.load(scale_ptr + d, mask=d < dim, other=0.0)
    if overlap:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    page = tl.load(pages_ptr + token)
    if page < 0:
        return
    kept_ptr += page * page_stride + tl.load(offsets_ptr + token) * offset_stride
    x = tl.load(latent_ptr + token * latent_stride + d, mask=d < dim, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps) * scale
    tl.store(kept_ptr + d, _kept(x, kept_ptr, saturate), mask=d < dim)

    h = tl.arange(0, block_half)
    inside = h < half
    shared_ptr += token * shared_stride
    if turned:
        even = tl.load(shared_ptr + 2 * h, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(shared_ptr + 2 * h + 1, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * half + h, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * half + h, mask=inside, other=0.0).to(tl.float32)
        first, second = even * cos - odd * sin, odd * cos + even * sin
    else:
        first = tl.load(shared_ptr + h, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(shared_ptr + half + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept_ptr + dim + h, _kept(first, kept_ptr, saturate), mask=inside)
    tl.store(kept_ptr + dim + half + h, _kept(second, kept_ptr, saturate), mask=inside)


def latent_key(
    latent: Tensor,
    shared: Tensor,
    kept: Tensor,
    pages: Tensor,
    offsets: Tensor,
    *,
    scale: Tensor,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    """Write [norm(latent) | turn(shared)] of every token into its place.

    latent: [T, dim], shared: [T, 2 · half], rows dense; scale: [dim] fp32. cos, sin: [T, 1, half], None:
    nothing is turned. RoPE turns the pairs (0, 1), (2, 3), ..., and the result lies as [0, 2, .. | 1, 3, ..],
    like that of the plain layer. kept: [pages, page_size, dim + 2 · half], a layer's view of all pages;
    pages, offsets: [T] int64, a negative page for padding, which is not written. fp32 inside; numbers beyond
    an 8-bit format's range saturate.
    """
    tokens, dim = latent.shape
    half = shared.shape[1] // 2
    assert latent.stride(1) == shared.stride(1) == kept.stride(2) == 1
    assert kept.shape[2] == dim + 2 * half and shared.shape[1] == 2 * half
    assert cos is None or (cos.is_contiguous() and sin.is_contiguous() and cos.shape[-1] == half)
    overlap = overlaps(latent.device)
    _latent_key[(tokens,)](
        latent,
        shared,
        scale,
        latent if cos is None else cos,
        latent if sin is None else sin,
        pages,
        offsets,
        kept,
        eps,
        latent.stride(0),
        shared.stride(0),
        kept.stride(0),
        kept.stride(1),
        dim=dim,
        half=half,
        turned=cos is not None,
        saturate=torch.finfo(kept.dtype).max if kept.dtype.itemsize == 1 else 0.0,
        block_d=triton.next_power_of_2(dim),
        block_half=triton.next_power_of_2(max(half, 1)),
        overlap=overlap,
        num_warps=2,
        **launch_options(overlap),
    )
