"""silu(gate) · up against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.layers.kernels.gated_activation import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (2, 2500)])
def test_equals_plain(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(rows, 2 * width + 4)).to(dtype)[:, : 2 * width].to(DEVICE)
    gate, up = gate_up.double().chunk(2, dim=-1)
    tight = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(silu_mul(gate_up, 0.5).double(), F.silu(0.5 * gate) * up, **tight)
