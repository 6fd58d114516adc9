"""The short causal convolution of one token a row, with its window in an arena slot.

Owns the sum over taps and what may stand around it: a bias and SiLU behind it (Mamba), or a product before
and one behind (the gated convolution of LFM2). A program owns some channels of one row: it alone reads their
window and moves it on in place.

Offsets into slots are 64-bit. A row whose slot is negative is padding: it reads and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from denim.recurrence.kernels.exponentials import silu as act
from denim.recurrence.kernels.overlap import launch_options, overlaps

# Channels of a program, 2 for each thread.
CHANNELS = 256
WARPS = 4


@triton.jit
def _step(
    x_ptr,
    x_stride,
    before_ptr,
    behind_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    window_ptr,
    window_stride,
    out_ptr,
    total,
    width: tl.constexpr,
    silu: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    channels = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    mask = channels < total
    taps = ()
    for j in tl.static_range(width):
        taps += (tl.load(weight_ptr + channels * width + j, mask=mask, other=0.0).to(tl.float32),)
    if overlap:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    window = window_ptr + slot * window_stride
    at = row * x_stride + channels
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if before_ptr is not None:
        x = (x.to(tl.float32) * tl.load(before_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    y = x.to(tl.float32) * taps[width - 1]
    for j in tl.static_range(width - 1):
        y += tl.load(window + j * total + channels, mask=mask, other=0.0).to(tl.float32) * taps[j]
    if bias_ptr is not None:
        y = y.to(x.dtype).to(tl.float32)  # the plain form returns the model's dtype here
        y += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    if silu:
        y = act(y)
    if behind_ptr is not None:
        y = y.to(x.dtype).to(tl.float32) * tl.load(behind_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * total + channels, y.to(out_ptr.dtype.element_ty), mask=mask)
    # A short vector lies in several warps at once: all have read a column before one overwrites it.
    for j in tl.static_range(1, width - 1):
        column = tl.load(window + j * total + channels, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(window + (j - 1) * total + channels, column, mask=mask)
    tl.debug_barrier()
    tl.store(window + (width - 2) * total + channels, x, mask=mask)


def short_conv_step_slots(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    window: Tensor,
    *,
    silu: bool = False,
    before: Tensor | None = None,
    behind: Tensor | None = None,
) -> Tensor:
    """One token for each of R rows: behind · act(conv(before · x) + bias), [R, C] in x's dtype.

    x, and before and behind where they are given: [R, C], rows equally far apart in all three; weight:
    [C, W], W >= 2; bias: [C] or None; slots: [R] int64, negative for padding; window: [slots, W - 1, C], a
    view of the arena, moved on in place. act: SiLU if `silu`. Rows of padding are not written. Sums are fp32.
    """
    rows, channels = x.shape
    assert window.stride(1) == channels and weight.shape[1] > 1 and x.stride(1) == 1
    assert all(t is None or t.stride() == x.stride() for t in (before, behind))
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    overlap = overlaps(x.device)
    _step[(triton.cdiv(channels, CHANNELS), rows)](
        x,
        x.stride(0),
        before,
        behind,
        weight,
        bias,
        slots,
        window,
        window.stride(0),
        out,
        channels,
        width=weight.shape[1],
        silu=silu,
        block=min(CHANNELS, triton.next_power_of_2(channels)),
        overlap=overlap,
        num_warps=WARPS,
        **launch_options(overlap),
    )
    return out
