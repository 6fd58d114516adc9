"""The one-token convolution on slots against the plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.kernels.short_conv_step import short_conv_step_slots
from denim.recurrence.short_conv import short_conv_step
from tests.recurrence.kernels.slots import BOUND, DEVICE, DTYPES, check_close, check_slots, slots_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [24, 600])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    "biased, silu, gated", [(False, False, True), (True, True, False), (True, False, True)]
)
def test_equals_the_plain_form(
    channels: int, width: int, biased: bool, silu: bool, gated: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [3, -1, 8, 0]
    parts = torch.randn(len(rows), 3 * channels, generator=generator).to(dtype)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if biased else None
    windows = torch.randn(len(rows), width - 1, channels, generator=generator).to(dtype)
    window = slots_of(rows, windows)
    b, c, x = parts.to(DEVICE).chunk(3, -1)
    out = short_conv_step_slots(
        x,
        weight.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
        torch.tensor(rows, device=DEVICE),
        window,
        silu=silu,
        before=b if gated else None,
        behind=c if gated else None,
    )
    b, c, x = parts.chunk(3, -1)
    y = short_conv_step(b * x if gated else x, weight, windows).float()
    y = y if bias is None else y + bias.float()
    y = F.silu(y) if silu else y
    want = y.to(dtype) * c if gated else y.to(dtype)
    live = [0, 2, 3]
    check_close(out[live], want[live], BOUND[dtype])
    check_slots(window, rows, windows, 0)
