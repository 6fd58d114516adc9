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


def test_an_exact_router_tells_apart_what_bf16_does_not() -> None:
    spec = MoEFFN(2, 1, 8, scoring="sigmoid", exact_router=True)
    moe = SparseMoE(spec, 4, dtype=torch.bfloat16, device="cpu")
    moe.router.weight.copy_(torch.tensor([[1.0], [1.001]]).expand(2, 4))
    moe.up.fill_(1.0)
    moe.down[0], moe.down[1] = 0.0, 1.0
    assert (moe(torch.ones(1, 4, dtype=torch.bfloat16)) > 1).all()


def test_experts_whose_scores_are_all_zero_add_nothing() -> None:
    moe = SparseMoE(MoEFFN(4, 2, 8, scoring="sigmoid"), 4, dtype=torch.float32, device="cpu")
    moe.router.weight.fill_(-100.0)
    moe.up.fill_(1.0)
    moe.down.fill_(1.0)
    assert torch.equal(moe(torch.ones(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("scoring", ["softmax", "softmax_top_k", "sigmoid"])
def test_the_scale_multiplies_what_the_routed_experts_say(scoring: str) -> None:
    torch.manual_seed(0)
    spec = replace(SPEC, scoring=scoring, shared_intermediate=0)
    moe = SparseMoE(spec, 32, **PLACE)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, 32, device=DEVICE)
    plain = moe(x)
    moe.spec = replace(spec, scale=2.5)
    torch.testing.assert_close(moe(x), 2.5 * plain)
