"""A chain of networks whose kernels overlap gives what plain torch gives, eagerly and as a captured graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.layers.ffn import GatedFFN
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.spec.ffn import MoEFFN

pytestmark = pytest.mark.gpu

HIDDEN, INNER, LAYERS = 1024, 3584, 6


def network(dtype: torch.dtype) -> list[tuple[RMSNorm, GatedFFN]]:
    place = {"dtype": dtype, "device": "cuda"}
    layers = []
    for _ in range(LAYERS):
        norm, ffn = RMSNorm(HIDDEN, 1e-6, zero_centred=True, **place), GatedFFN(HIDDEN, INNER, **place)
        for weight in (norm.weight, ffn.gate_up.weight, ffn.down.weight):
            torch.nn.init.normal_(weight, std=0.03)
        norm.prepare()
        layers.append((norm, ffn))
    torch.cuda.synchronize()
    return layers


def plain(x: Tensor, layers: list[tuple[RMSNorm, GatedFFN]]) -> Tensor:
    x = x.double()
    for norm, ffn in layers:
        normed = F.rms_norm(x, (HIDDEN,), norm.scale.double(), norm.eps)
        gate, up = (normed @ ffn.gate_up.weight.double().T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ ffn.down.weight.double().T
    return x


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 300])
def test_chain(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = network(dtype)
    given = torch.randn(rows, HIDDEN, device="cuda").to(dtype)
    expected = plain(given, layers)

    def chain() -> Tensor:
        x = given.clone()
        for norm, ffn in layers:
            x = ffn(x, norm=norm, add=x)
        return x

    eager = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    bound = (1e-5 if dtype == torch.float32 else 0.02) * expected.abs().max()
    assert (eager.double() - expected).abs().max() < bound
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_captured_experts_follow_the_input(rows: int) -> None:
    """A captured mixture of experts sends other inputs to other experts, as an eager one does."""
    torch.manual_seed(0)
    spec = MoEFFN(num_experts=8, top_k=2, intermediate=64, shared_intermediate=64)
    moe = SparseMoE(spec, 128, dtype=torch.bfloat16, device="cuda")
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    given = torch.randn(rows, 128, dtype=torch.bfloat16, device="cuda")
    moe(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(given)
    for _ in range(3):
        given.normal_()
        graph.replay()
        assert torch.equal(captured, moe(given))
