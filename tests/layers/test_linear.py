"""Packed weights give the products of plain ones."""

from __future__ import annotations

import pytest
import torch

from denim.layers.linear import FEW_ROWS, Linear, can_pack
from denim.layers.norm import RMSNorm


@pytest.mark.parametrize("rows", [1, 2, 8, 65])
@pytest.mark.parametrize("keep", [True, False])
def test_packed_equals_plain(rows: int, keep: bool) -> None:
    linear = Linear(96, 40, dtype=torch.bfloat16, device="cpu")
    torch.nn.init.normal_(linear.weight)
    x = torch.randn(rows, 96, dtype=torch.bfloat16)
    weight = linear.weight.clone()
    if not can_pack(weight):
        pytest.skip("this CPU or torch does not pack bf16 weights")
    linear.pack(keep=keep)
    linear.pack(keep=keep)  # packing twice changes nothing
    assert (linear.weight.numel() > 0) == keep
    exact = x.double() @ weight.double().T
    assert (linear(x).double() - exact).abs().max() < 2**-7 * exact.abs().max()


def test_fp32_is_not_packed() -> None:
    linear = Linear(8, 4, dtype=torch.float32, device="cpu")
    linear.pack()
    assert linear.weight.numel() == 32


@pytest.mark.parametrize("rows", [1, 7, 20, 70])
@pytest.mark.parametrize("parts", ["", "norm", "add", "norm add"])
def test_project_is_norm_then_product_then_sum(
    rows: int, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows in the kernel (interpreted here, if there is no CUDA device) as without it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = Linear(48, 24, dtype=torch.float32, device=device)
    torch.nn.init.normal_(linear.weight)
    norm = RMSNorm(48, 1e-6, zero_centred=True, dtype=torch.float32, device=device)
    torch.nn.init.normal_(norm.weight)
    norm.prepare()
    x, add = torch.randn(rows, 48, device=device), torch.randn(rows, 24, device=device)
    expected = norm.normed(x) if "norm" in parts else x
    expected = expected @ linear.weight.T + (add if "add" in parts else 0)
    monkeypatch.setattr("denim.layers.linear.few_rows", lambda x, weight: len(x) <= FEW_ROWS)
    given = {"norm": norm if "norm" in parts else None, "add": add if "add" in parts else None}
    torch.testing.assert_close(linear.project(x, **given), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x), x @ linear.weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.wide(x), x @ linear.weight.T, rtol=1e-5, atol=1e-5)
