"""A network with its norm and residual is the same in the kernels as written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from denim.layers.ffn import GatedFFN, PlainFFN
from denim.layers.linear import FEW_ROWS
from denim.layers.norm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACE = {"dtype": torch.float32, "device": DEVICE}


@pytest.mark.parametrize("rows", [1, 5, 20, 70])
@pytest.mark.parametrize("kind", ["silu", "gelu", "plain"])
def test_equals_plain(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ffn = (
        PlainFFN(40, 24, **PLACE)
        if kind == "plain"
        else GatedFFN(40, 24, activation=kind, gate_scale=0.5, **PLACE)
    )
    norm = RMSNorm(40, 1e-6, zero_centred=True, **PLACE)
    for parameter in (*ffn.parameters(), norm.weight):
        torch.nn.init.normal_(parameter, std=0.3)
    norm.prepare()
    x = torch.randn(rows, 40, device=DEVICE)
    normed = norm.normed(x)
    if kind == "plain":
        inner = F.relu(normed @ ffn.up.weight.T).square()
    else:
        gate, up = (normed @ ffn.gate_up.weight.T).chunk(2, dim=-1)
        inner = (F.silu if kind == "silu" else F.gelu)(0.5 * gate) * up
    expected = x + inner @ ffn.down.weight.T
    for module in ("linear", "ffn"):
        monkeypatch.setattr(f"denim.layers.{module}.few_rows", lambda x, weight: len(x) <= FEW_ROWS)
    monkeypatch.setattr("denim.layers.ffn.in_kernels", lambda x: True)
    torch.testing.assert_close(ffn(x, norm=norm, add=x.clone()), expected, rtol=1e-5, atol=1e-5)
