"""The norm kernel against the plain layer."""

from __future__ import annotations

import pytest
import torch

from denim.layers.kernels.rms_norm import rms_norm
from denim.layers.norm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (3, 100), (5, 1024)])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_equals_the_layer(rows: int, dim: int, zero_centred: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    place = {"dtype": dtype, "device": "cpu"}
    norm = RMSNorm(dim, 1e-5, zero_centred=zero_centred, **place)
    torch.nn.init.normal_(norm.weight)
    norm.prepare()
    x = torch.randn(rows, dim + 8).to(dtype)[:, :dim]
    scale = norm.scale.to(DEVICE)
    # Triton's interpreter rounds to bf16 towards zero.
    tight = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(rms_norm(x.to(DEVICE), scale, 1e-5).cpu(), norm(x), **tight)
