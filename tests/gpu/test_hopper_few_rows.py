"""The product of few rows by TMA and wgmma against float64: cuts, widths that no tile divides, what is fused
around it; and many of them one behind the other, of which each begins before the end of the one before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.layers.kernels.hopper_few_rows import Cut, cut_of, launch_hopper_few_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
]

CUTS = [Cut(1, 4), Cut(1, 2), Cut(2, 3), Cut(4, 4)]  # programs, stages
SIZES = [(1024, 3584), (8224, 1024), (100, 320), (48, 192), (64, 64)]  # N, K


def exact(x: Tensor, weight: Tensor, gated: bool, add: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(0.5 * gate) * up
    return y if add is None else add.double() + y


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("fused", ["plain", "gated", "add", "gated add"])
@pytest.mark.parametrize("m", [2, 9, 31, 64])
def test_equals_plain(m: int, fused: str, n: int, k: int, cut: Cut) -> None:
    torch.manual_seed(0)
    gated = "gated" in fused
    place = {"dtype": torch.bfloat16, "device": "cuda"}
    around = torch.full((m + 2, k + 24), torch.nan, **place)  # what lies beside x is not x
    x = around[1:-1, 8 : k + 8].copy_(torch.randn(m, k))
    weight = torch.randn(2 * n if gated else n, k, device="cuda").mul_(k**-0.5).bfloat16()
    add = torch.randn(m, n + 3, **place)[:, :n] if "add" in fused else None
    target = torch.full((m + 1, n), 7.0, **place)
    launch_hopper_few_rows(x, weight, add, target[:m], cut, gated=gated, gate_scale=0.5)
    expected = exact(x, weight, gated, add)
    assert (target[:m].double() - expected).norm() < 2.5e-3 * expected.norm()
    assert (target[m] == 7).all()


@pytest.mark.parametrize("programs", [1, 2, 4])
@pytest.mark.parametrize("pieces", range(1, 10))
@pytest.mark.parametrize("rows", [8, 32])
def test_rings_of_every_fill(rows: int, pieces: int, programs: int) -> None:
    """From one piece of K for all programs to more than a ring holds; whole numbers are exact."""
    x, weight = (torch.randint(-8, 8, (n, 128 * pieces), device="cuda").bfloat16() for n in (rows, 72))
    out = torch.empty(rows, 72, device="cuda")
    launch_hopper_few_rows(x, weight, None, out, Cut(programs, 7), gated=False, gate_scale=1.0)
    assert torch.equal(out, x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_whole_numbers_are_exact(cut: Cut, dtype: torch.dtype) -> None:
    x, weight = (torch.randint(-8, 8, (rows, 1024), device="cuda").to(dtype) for rows in (33, 200))
    out = torch.empty(33, 200, device="cuda")
    launch_hopper_few_rows(x, weight, None, out, cut, gated=False, gate_scale=1.0)
    assert torch.equal(out, x.float() @ weight.float().T)


def test_what_it_takes() -> None:
    x = torch.empty(32, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")
    assert cut_of(x, weight, 1024, gated=False) == Cut(4, 7)
    assert cut_of(x[:, 8:], weight[:, :1016], 1024, gated=False) is None  # not whole blocks of K
    assert (
        cut_of(x[:, 1:961], weight[:, :960].contiguous(), 1024, gated=False) is None
    )  # not where TMA can begin
    assert cut_of(x.float(), weight.float(), 1024, gated=False) is None


@pytest.mark.parametrize("rows", [2, 8, 32, 64])
def test_chain_in_a_graph(rows: int) -> None:
    """Each product takes the one before; all of them again give the same numbers, bit by bit."""
    torch.manual_seed(0)
    weights = [torch.randn(1024, 1024, device="cuda").div_(32).bfloat16() for _ in range(40)]
    given = torch.randn(rows, 1024, device="cuda").bfloat16()

    def chain() -> Tensor:
        x = given
        for i, weight in enumerate(weights):
            out = torch.empty_like(x)
            launch_hopper_few_rows(x, weight, x, out, CUTS[i % len(CUTS)], gated=False, gate_scale=1.0)
            x = out * 0.7
        return x

    expected = given.double()
    for weight in weights:
        expected = ((expected + expected @ weight.double().T).bfloat16().double() * 0.7).bfloat16().double()
    eager = chain()
    assert (eager.double() - expected).norm() < 0.05 * expected.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)
