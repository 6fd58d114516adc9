"""Packed weights give the products of plain ones."""

from __future__ import annotations

import pytest
import torch

from denim.layers.linear import Linear, can_pack


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
