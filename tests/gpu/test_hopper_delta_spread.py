"""The decode step of the delta rules for few rows on Hopper, a head spread over a cluster, beside the plain
parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.recurrence.kernels.hopper_delta_spread import (
    MANY_PROGRAMS_TO,
    MOST_HEADS,
    hopper_delta_spread,
    suits,
)
from tests.recurrence.kernels.delta_case import SLOTS as ARENA
from tests.recurrence.kernels.delta_case import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
]

DIM = 128
# Padding at the start, in the midst and at the end.
SLOTS = [-1, 3, 8, -1, -1, 0, -1]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(case: Case, dtype: torch.dtype) -> None:
    assert suits(case.inputs.state, len(SLOTS), case.inputs.key_heads)
    case.check(TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", MOST_HEADS)
def test_gated_delta(group: int, dtype: torch.dtype) -> None:
    check(Case(2, group, DIM, DIM, dtype, SLOTS, beta_limit=2.0), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("floor", [None, -5.0])
@pytest.mark.parametrize("heads", [4, 16])
def test_kimi_delta(heads: int, floor: float | None, dtype: torch.dtype) -> None:
    """In larger and in smaller clusters."""
    assert (heads * len(SLOTS) <= MANY_PROGRAMS_TO) == (heads == 4)
    check(Case(heads, 1, DIM, DIM, dtype, SLOTS, vector_decay=True, decay_floor=floor), dtype)


@pytest.mark.parametrize(("key_heads", "group"), [(16, 2), (32, 1)])
def test_steps_that_overlap(key_heads: int, group: int) -> None:
    """A captured graph of several layers' steps, each of which begins before the end of the one before it,
    gives the bits of steps that run one by one, whatever slots the rows move to."""
    counts = (4, 1, 3, 2, 4, 1)  # rows of each layer's step
    inputs = Case(key_heads, group, DIM, DIM, torch.bfloat16, [*range(ARENA)]).on("cuda")
    widths = [part.shape[1] for part in inputs[:4]]
    tokens = [torch.randn(rows, sum(widths)).bfloat16().cuda() for rows in counts]
    slots = torch.arange(max(counts), device="cuda")
    places = [[(inputs.window.clone(), inputs.state.clone()) for _ in counts] for _ in range(2)]

    def step(layer: int, way: int) -> Tensor:
        qkv, z, b, a = tokens[layer].split(widths, dim=1)
        window, state = places[way][layer]
        rows = {"qkv": qkv, "z": z, "b": b, "a": a, "slots": slots[: len(qkv)]}
        return hopper_delta_spread(inputs._replace(window=window, state=state, **rows))

    order = [*range(len(counts))] * 2
    for way in range(2):
        for layer in range(len(counts)):
            step(layer, way)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step(layer, 0) for layer in order]
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        picked = torch.randperm(ARENA, generator=generator)[: len(slots)]
        picked[torch.rand(len(slots), generator=generator) < 0.3] = -1
        slots.copy_(picked)
        graph.replay()
        for out, layer in zip(outs, order, strict=True):
            expected = step(layer, 1)
            torch.cuda.synchronize()
            live = picked[: counts[layer]] >= 0
            assert torch.equal(out[live], expected[live])
        for overlapped, single in zip(*places, strict=True):
            assert all(torch.equal(*pair) for pair in zip(overlapped, single, strict=True))
