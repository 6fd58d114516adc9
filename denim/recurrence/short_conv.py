"""The short causal depthwise convolution before a linear rule, over whole sequences and by one token.

Owns the sum y_t = sum_j weight[:, j] x_{t - (W - 1) + j} per channel, and the window of the last W - 1
inputs that a sequence carries from call to call (zeros before its first token). Knows nothing of what the
channels mean. There is no bias and no activation in it: the caller applies SiLU where the model has it.

Sums are fp32 (fp64 for fp64 inputs), results in x's dtype. The window is [W - 1, channels], oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from denim.recurrence.operands import check_numbers, check_operands
from denim.recurrence.sequences import offsets_of


def short_conv(
    x: Tensor, weight: Tensor, *, cu_seqlens: Sequence[int] | Tensor, window: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The convolution over N sequences that lie one behind the other.

    x: [T, C]; weight: [C, W]; cu_seqlens: N + 1 offsets into T; window: [N, W - 1, C], the inputs before
    each sequence's first token, None for zeros. Returns y [T, C] and the windows after the sequences
    [N, W - 1, C], both in x's dtype. A sequence shorter than the window shifts it. Differentiable. ValueError
    for operands that do not fit each other.
    """
    check_operands(x=(x, "T C"), weight=(weight, "C W"))
    offsets = offsets_of(cu_seqlens, x.shape[0])
    sequences = len(offsets) - 1
    window = _window(window, (sequences, weight.shape[1] - 1, x.shape[1]), x)
    lengths = [end - start for start, end in pairwise(offsets)]
    if any(length != lengths[0] for length in lengths):
        each = zip(x.split(lengths), window.split(1), lengths, strict=True)
        parts = [short_conv(part, weight, cu_seqlens=[0, n], window=w) for part, w, n in each]
        ys, windows = zip(*parts, strict=True)
        return torch.cat(ys), torch.cat(windows)
    length = lengths[0] if lengths else 0
    rows = torch.cat((window.to(x.dtype), x.reshape(sequences, length, x.shape[1])), 1)
    if not length:
        return x, rows
    convolve = channels_last_convolution if x.is_cpu else shifted_sum
    return convolve(rows, weight).reshape(x.shape), rows[:, length:]


def channels_last_convolution(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [N, L + W - 1, C], weight [C, W] to y [N, L, C], by torch's convolution.

    Such rows are images of height 1 in channels-last order, for which the CPU library has a depthwise kernel
    that reads them as they lie: five to ten times as fast there as conv1d or the shifted sum. It wants the
    weight in the rows' dtype; sums are fp32.
    """
    image = rows.unsqueeze(1).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight.to(rows.dtype)[:, None, None], groups=rows.shape[2])
    return y.permute(0, 2, 3, 1).squeeze(1)


def shifted_sum(rows: Tensor, weight: Tensor) -> Tensor:
    """The same by W multiply-adds of whole tensors, which a compiler for GPUs turns into one kernel."""
    wide = rows.to(_sum_dtype(rows))
    length = rows.shape[1] - weight.shape[1] + 1
    taps = weight.to(wide.dtype).unbind(1)
    y = wide[:, :length] * taps[0]
    for j, tap in enumerate(taps[1:], start=1):
        y = torch.addcmul(y, wide[:, j : j + length], tap)
    return y.to(rows.dtype)


def short_conv_step(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    """One token for each of B sequences. x: [B, C]; weight: [C, W]; returns y [B, C] in x's dtype.

    window: [B, W - 1, C] is shifted in place (rows may lie any distance apart). For inference: no gradients.
    ValueError for operands that do not fit each other.
    """
    check_operands(x=(x, "T C"), weight=(weight, "C W"))
    check_numbers("window", window, "x", x)
    _window(window, (len(x), weight.shape[1] - 1, x.shape[1]), x)
    rows = torch.cat((window, x.to(window.dtype).unsqueeze(1)), 1)
    window.copy_(rows[:, 1:])
    wide = _sum_dtype(x)
    return (rows.to(wide) * weight.t().to(wide)).sum(1).to(x.dtype)


def _window(window: Tensor | None, shape: tuple[int, int, int], x: Tensor) -> Tensor:
    if window is None:
        return x.new_zeros(shape)
    check_numbers("window", window, "x", x)
    if window.shape != shape:
        raise ValueError(f"window must be [N, W - 1, C] = {list(shape)}; got {list(window.shape)}")
    return window


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
