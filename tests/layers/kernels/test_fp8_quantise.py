"""The quantising kernel, interpreted: scales, groups, strides and padding.

Triton's interpreter rounds to FP8 wrongly (126 becomes 64), so the kernel's values are taken here as fp32
numbers, before they are rounded; tests/gpu/test_fp8.py compares the rounded ones.
"""

from __future__ import annotations

import pytest
import torch

from denim.layers.fp8_linear import BLOCK, LARGEST, SMALLEST, quantise
from denim.layers.kernels.fp8_quantise import quantise_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("groups", [1, 5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_plain_form(rows: int, groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    columns = groups * BLOCK
    wide = torch.randn(rows, columns + 3) * torch.logspace(-4, 4, rows)[:, None]
    wide[0, :BLOCK] = 0
    x = wide.to(dtype)[:, :columns]
    rounded, expected_scales = quantise(x)
    padded = len(rounded)
    values = torch.full((padded, columns), torch.nan, device=DEVICE)
    scales = torch.full((groups, padded), torch.nan, device=DEVICE)
    quantise_rows(x.to(DEVICE), values, scales, size=BLOCK, largest=LARGEST, smallest=SMALLEST)
    torch.testing.assert_close(scales.cpu(), expected_scales.t(), rtol=1e-6, atol=0)
    expected = x.float() / expected_scales[:rows].repeat_interleave(BLOCK, 1)
    torch.testing.assert_close(values[:rows].cpu(), expected, rtol=1e-6, atol=0)
    assert not values[rows:].any(), "rows of padding are zeros"
