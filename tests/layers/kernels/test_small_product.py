"""Products of a few rows, with what is fused around them, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.layers.kernels.small_product import small_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 40, 96), (1, 5, 5000), (2, 24, 64), (17, 50, 272), (64, 33, 40)]


def exact(x: Tensor, weight: Tensor, scale: Tensor | None, gated: bool, add: Tensor | None) -> Tensor:
    x, weight = x.double(), weight.double()
    if scale is not None:
        x = F.rms_norm(x, (x.shape[1],), scale.double(), 1e-6)
    y = x @ weight.T
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(0.5 * gate) * up
    return y if add is None else add.double() + y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fused", ["plain", "norm", "gated", "add", "norm gated", "norm gated add"])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_equals_plain(m: int, n: int, k: int, fused: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and m > 1 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter has no dot of bf16")
    torch.manual_seed(0)
    gated = "gated" in fused
    place = {"dtype": dtype, "device": DEVICE}
    rows = torch.full((m, k + 16), torch.nan, **place)
    x = rows[:, :k].copy_(torch.randn(m, k))
    weight = torch.randn(2 * n if gated else n, k, device=DEVICE).mul_(k**-0.5).to(dtype)
    scale = torch.randn(k, device=DEVICE) if "norm" in fused else None
    add = torch.randn(m, n, **place) if "add" in fused else None
    arrivals = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    y = small_product(
        x,
        weight,
        scale=scale,
        eps=1e-6,
        gated=gated,
        gate_scale=0.5,
        add=add,
        arrivals=arrivals if m % 2 else None,
    )
    assert not arrivals.any()
    expected = exact(x, weight, scale, gated, add)
    assert y.dtype == dtype and y.shape == (m, n)
    bound = 2e-6 if dtype == torch.float32 else 2**-7
    assert (y.double() - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("m", [1, 3])
def test_result_in_fp32(m: int) -> None:
    """Products of small whole numbers are exact, so bf16 rows need no rounding at all."""
    dtype = torch.bfloat16 if m == 1 or DEVICE == "cuda" else torch.float32
    x, weight = (torch.randint(-8, 8, (rows, 300), device=DEVICE).to(dtype) for rows in (m, 20))
    y = small_product(x, weight, out_dtype=torch.float32)
    assert torch.equal(y, x.float() @ weight.float().T)
