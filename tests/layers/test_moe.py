"""The experts as one product give what they give one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.spec.ffn import MoEFFN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACE = {"dtype": torch.float32, "device": DEVICE}
SPEC = MoEFFN(num_experts=6, top_k=2, intermediate=20, shared_intermediate=16)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"gated": False, "activation": "relu2", "shared_gate": False},
        {"activation": "gelu", "shared_intermediate": 0},
        {"latent": 24, "scoring": "sigmoid", "selection_bias": True},
    ],
    ids=["swiglu", "plain", "gelu", "latent"],
)
def test_at_once_equals_one_by_one(changed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    moe = SparseMoE(replace(SPEC, **changed), 32, **PLACE)
    norm = RMSNorm(32, 1e-6, zero_centred=False, **PLACE)
    for parameter in (*moe.parameters(), norm.weight):
        torch.nn.init.normal_(parameter, std=0.3)
    norm.prepare()
    x = torch.randn(11, 32, device=DEVICE)
    results = []
    for at_once in (False, True):
        monkeypatch.setattr("denim.layers.moe.in_kernels", lambda x, answer=at_once: answer)
        results.append(moe(x, norm=norm, add=x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], x, atol=1e-2)
