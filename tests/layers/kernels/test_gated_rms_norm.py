"""The gated norm's kernel against the layer's formula, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.layers.kernels.gated_rms_norm import gated_rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("sigmoid", [False, True], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 128), (5, 3, 24), (70, 2, 16)])
def test_equals_the_formula(tokens: int, heads: int, dim: int, dtype: torch.dtype, sigmoid: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    gate = torch.randn(tokens, heads * dim + 5, generator=generator).to(dtype)[:, 5:]
    scale = 1 + 0.3 * torch.randn(dim, generator=generator)
    gates = gate.float().view(x.shape)
    expected = F.rms_norm(x.float(), (dim,), scale, 1e-6) * (gates.sigmoid() if sigmoid else F.silu(gates))
    out = gated_rms_norm(x.to(DEVICE), gate.to(DEVICE), scale.to(DEVICE), 1e-6, sigmoid=sigmoid)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().float(), expected.flatten(1), atol=5 * tolerance, rtol=tolerance)
