"""Steps on Hopper that record their updates, against plain steps that write every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.arrivals import new_arrivals
from denim.recurrence.deferred import Ring, flush
from denim.recurrence.kernels.fused_delta_step import fused_delta_step
from denim.recurrence.kernels.hopper_delta_step import LONGEST, suits
from tests.recurrence.kernels.delta_case import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
]

DIM = 128
# More heads than there are multiprocessors, and padding at the start, in the midst and at the end.
SLOTS = [-1, 3, 8, 0, -1, -1, 7, 1, 2, 4, 5, 6, -1]
LIVE = [i for i, slot in enumerate(SLOTS) if slot >= 0]
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 4e-2}
KINDS = [*((torch.float32, length) for length in (2, 3, 5, 6, LONGEST)), (torch.bfloat16, 5)]


def new_case(layer: str, dtype: torch.dtype) -> Case:
    if layer == "kimi":
        return Case(32, 1, DIM, DIM, dtype, SLOTS, vector_decay=True)
    return Case(16, int(layer[-1]), DIM, DIM, dtype, SLOTS)


def filled_ring(case: Case, length: int, pending: list[int]) -> Ring:
    """Of each row as many records as it has pending, and NaN everywhere else."""
    ring = Ring(*(part.cpu() for part in case.new_ring(length)))
    for slot, count in zip(SLOTS, pending, strict=True):
        if slot >= 0:
            keys, updates, log_decays = (part[slot, :count] for part in ring)
            keys.copy_(F.normalize(torch.randn_like(keys), dim=-1))
            updates.copy_(torch.randn_like(updates))
            log_decays.copy_(-torch.rand_like(log_decays))
    return ring


@pytest.mark.parametrize(("dtype", "length"), KINDS, ids=str)
@pytest.mark.parametrize("layer", ["gated 1", "gated 2", "kimi"])
def test_equals_writing_every_time(layer: str, dtype: torch.dtype, length: int) -> None:
    case, every = new_case(layer, dtype), new_case(layer, dtype)
    assert suits(case.inputs.state, len(SLOTS), case.inputs.key_heads, length)
    counts = [i % length for i in range(len(SLOTS))]
    filled = filled_ring(case, length, counts)
    ring, pending = Ring(*(part.cuda() for part in filled)), torch.tensor(counts, dtype=torch.int32)
    flush(every.inputs.state, filled, torch.tensor(SLOTS), pending)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for step in range(length + 1):
        case.new_token()
        qkv, z, b, a = case.inputs[:4]
        if step % 2 == 1:
            a[2], a[3] = 90.0, -90.0  # one row forgets nearly all, and another nothing
        every.change(qkv=qkv, z=z, b=b, a=a)
        before = case.inputs.state.clone()
        expected, window, state = every.plain()
        every.change(window=window, state=state)
        out = case.fused(ring=ring, pending=pending.cuda())
        torch.testing.assert_close(out[LIVE], expected, **tolerance)
        torch.testing.assert_close(case.inputs.window, window, equal_nan=True, atol=0, rtol=0)
        for slot, count in zip(SLOTS, pending.tolist(), strict=True):
            if slot >= 0 and count < length - 1:
                assert torch.equal(case.inputs.state[slot], before[slot])
        pending = (pending + 1) % length
        recorded = torch.zeros(len(before), length, dtype=torch.bool)
        for slot, count in zip(SLOTS, pending.tolist(), strict=True):
            if slot >= 0:
                recorded[slot, :count] = True
        for part in ring:  # what is no longer pending is nobody's
            part[~recorded.cuda()] = float("nan")
    flush(case.inputs.state, Ring(*(part.cpu() for part in ring)), torch.tensor(SLOTS), pending)
    torch.testing.assert_close(case.inputs.state, every.inputs.state, equal_nan=True, **tolerance)


@pytest.mark.parametrize("layer", ["gated 1", "gated 2", "kimi"])
def test_the_same_every_time(layer: str) -> None:
    """Thousands of steps from one state, bit for bit: a program that reads too early would differ once."""
    length = 5
    case = new_case(layer, torch.bfloat16)
    counts = [i % length for i in range(len(SLOTS))]
    ring = Ring(*(part.cuda() for part in filled_ring(case, length, counts)))
    inputs, pending = case.on("cuda"), torch.tensor(counts, dtype=torch.int32, device="cuda")
    arrivals = new_arrivals(inputs.key_heads, inputs.state.shape[1], "cuda")
    tensors = (inputs.state, inputs.window, *ring)
    begin = [t.clone() for t in tensors]
    live = torch.tensor(LIVE, device="cuda")

    def step() -> list[Tensor]:
        for t, first in zip(tensors, begin, strict=True):
            t.copy_(first)
        return [fused_delta_step(inputs, arrivals, ring, pending)[live], *tensors]

    wanted = [t.clone() for t in step()]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for got, want in zip(step(), wanted, strict=True):
            differing += (got.view(torch.int16) != want.view(torch.int16)).sum()
    for _ in range(2000):
        graph.replay()
    assert differing.item() == 0
