"""The device functions of exponentials against torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from denim.recurrence.kernels.exponentials import exp, sigmoid, silu, softplus
from tests.recurrence.kernels.slots import DEVICE


@triton.jit
def _apply(x_ptr, out_ptr, function: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    x = tl.load(x_ptr + at)
    if function == 0:
        y = exp(x)
    elif function == 1:
        y = sigmoid(x)
    elif function == 2:
        y = silu(x)
    else:
        y = softplus(x)
    tl.store(out_ptr + at, y)


@pytest.mark.parametrize("function, want", list(enumerate([torch.exp, torch.sigmoid, F.silu, F.softplus])))
def test_as_accurate_as_fp32(function: int, want: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat((torch.linspace(-30, 30, 1016), torch.tensor([-80, -19.9, -4.2, -4.1, 0, 19.9, 20.1, 80])))
    x = x.to(DEVICE)
    out = torch.empty_like(x)
    _apply[(1,)](x, out, function, 1024)
    torch.testing.assert_close(out.double(), want(x.double()), rtol=1e-5, atol=0)
