"""Products with FP8 blocks: activations quantised as the recipe says, FP8 rows and plain rows together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers import fp8_linear
from denim.layers.fp8_linear import BLOCK, LARGEST, Fp8Linear, multiplies_blocks, quantise
from denim.models.fp8 import dequantise


def reference_product(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """What torch's product means, in fp32."""
    x = values.float() * scales.repeat_interleave(BLOCK, 1)
    grid = weight_scales[:, : weight.shape[1] // BLOCK]
    return x @ dequantise(weight, grid, (BLOCK, BLOCK)).t()


def filled(columns: int, rows: int, quantised: int) -> Fp8Linear:
    torch.manual_seed(0)
    linear = Fp8Linear(columns, rows, quantised, dtype=torch.float32, device="cpu")
    linear.values.data.copy_((torch.randn(quantised, columns) * 50).to(torch.float8_e4m3fn))
    linear.scales.data[:, : columns // BLOCK] = torch.rand(quantised // BLOCK, columns // BLOCK) + 0.5
    linear.plain.data.copy_(torch.randn(rows - quantised, columns))
    return linear


def meant(linear: Fp8Linear) -> Tensor:
    grid = linear.scales[:, : linear.in_features // BLOCK]
    return torch.cat((dequantise(linear.values, grid, (BLOCK, BLOCK)), linear.plain))


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_quantise(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 3 * BLOCK) * torch.logspace(-3, 3, rows)[:, None]
    x[0, BLOCK : 2 * BLOCK] = 0
    values, scales = quantise(x)
    padded = -(-rows // 4) * 4
    assert values.shape == (padded, 3 * BLOCK) and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (padded, 3) and scales.stride() == (1, padded)
    for row in range(rows):
        for group in range(3):
            part = x[row, group * BLOCK : (group + 1) * BLOCK]
            if part.abs().max() > 0:
                assert scales[row, group].item() == pytest.approx(part.abs().max().item() / LARGEST, rel=1e-6)
            back = values[row, group * BLOCK : (group + 1) * BLOCK].float() * scales[row, group]
            # e4m3 has three bits behind the point; numbers under 2^-6 are multiples of 2^-9.
            bound = torch.maximum(part.abs() / 16, scales[row, group] * 2.0**-10)
            assert ((back - part).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize(("rows", "quantised"), [(256, 256), (300, 256), (128 + 7, 128)])
def test_forward(monkeypatch: pytest.MonkeyPatch, rows: int, quantised: int) -> None:
    monkeypatch.setattr(fp8_linear, "product", reference_product)
    linear = filled(2 * BLOCK, rows, quantised)
    x = torch.randn(2, 5, 2 * BLOCK)
    values, scales = quantise(x.view(10, -1))
    rounded = (values.float() * scales.repeat_interleave(BLOCK, 1))[:10]
    expected = torch.cat((rounded @ meant(linear)[:quantised].t(), x.view(10, -1) @ linear.plain.t()), 1)
    torch.testing.assert_close(linear(x), expected.view(2, 5, rows), rtol=1e-5, atol=1e-3)


def test_rows_that_move_in_whole_blocks_stay_in_fp8() -> None:
    linear = filled(BLOCK, 2 * BLOCK + 3, 2 * BLOCK)
    before = meant(linear)
    rows = torch.cat(
        (torch.arange(BLOCK, 2 * BLOCK), torch.arange(BLOCK), 2 * BLOCK + torch.tensor([2, 0, 1]))
    )
    linear.reorder_rows(rows)
    assert linear.quantised == 2 * BLOCK
    assert torch.equal(meant(linear), before[rows])


@pytest.mark.parametrize("kind", ["torn", "shifted", "into the plain rows"])
def test_rows_that_tear_blocks_apart_are_dequantised(kind: str) -> None:
    linear = filled(BLOCK, 2 * BLOCK + 3, 2 * BLOCK)
    before = meant(linear)
    n = 2 * BLOCK + 3
    rows = {
        "torn": torch.randperm(n, generator=torch.Generator().manual_seed(0)),
        "shifted": torch.cat(
            (torch.arange(64, 64 + 2 * BLOCK - 64), torch.arange(64), torch.arange(n - 3, n))
        ),
        "into the plain rows": torch.arange(n).roll(-3),
    }[kind]
    linear.reorder_rows(rows)
    assert linear.quantised == 0 and len(linear.values) == 0
    x = torch.randn(4, BLOCK)
    torch.testing.assert_close(linear(x), x @ before[rows].t())


def test_nothing_is_multiplied_as_it_is_on_a_cpu() -> None:
    assert not multiplies_blocks(torch.device("cpu"), torch.bfloat16)
