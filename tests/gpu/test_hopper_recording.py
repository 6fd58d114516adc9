"""Steps on Hopper that record their updates, against plain steps that write every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.deferred import Ring, flush
from denim.recurrence.kernels.hopper_delta_step import LONGEST, suits
from tests.recurrence.kernels.test_gated_delta_step import Case as Gated
from tests.recurrence.kernels.test_kimi_delta_step import Case as Kimi

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


def new_case(layer: str, dtype: torch.dtype) -> Gated | Kimi:
    if layer == "kimi":
        return Kimi.random(32, DIM, DIM, dtype, SLOTS)
    return Gated.random(16, int(layer[-1]), DIM, DIM, dtype, SLOTS)


def new_token(case: Gated | Kimi, same: Gated | Kimi, strong: bool) -> None:
    """Inputs of a step, the same for both; with `strong` the third row forgets nearly all, and the fourth
    nothing."""
    if isinstance(case, Kimi):
        case.token(len(SLOTS), case.qkv.dtype)
        decays = case.f
    else:
        case.projected = torch.randn_like(case.projected)
        decays = case.projected[:, -case.state.shape[1] :]
    if strong:
        decays[2], decays[3] = 90.0, -90.0
    for name in ("qkv", "b", "f", "g") if isinstance(case, Kimi) else ("projected",):
        setattr(same, name, getattr(case, name))


def filled_ring(case: Gated | Kimi, length: int, pending: list[int]) -> Ring:
    """Of each row as many records as it has pending, and NaN everywhere else."""
    slots, heads = case.state.shape[:2]
    key_heads = case.key_heads if isinstance(case, Gated) else heads
    decay = (DIM,) if isinstance(case, Kimi) else ()
    shapes = ((key_heads, DIM), (heads, DIM), (heads, *decay))
    ring = Ring(*(torch.full((slots, length, *shape), float("nan")) for shape in shapes))
    for slot, count in zip(SLOTS, pending, strict=True):
        if slot >= 0:
            ring.keys[slot, :count] = F.normalize(torch.randn(count, *shapes[0]), dim=-1)
            ring.updates[slot, :count] = torch.randn(count, *shapes[1])
            ring.log_decays[slot, :count] = -torch.rand(count, *shapes[2])
    return ring


@pytest.mark.parametrize(("dtype", "length"), KINDS, ids=str)
@pytest.mark.parametrize("layer", ["gated 1", "gated 2", "kimi"])
def test_equals_writing_every_time(layer: str, dtype: torch.dtype, length: int) -> None:
    case, every = new_case(layer, dtype), new_case(layer, dtype)
    assert suits(case.state, len(SLOTS), 32 if layer == "kimi" else 16, length)
    counts = [i % length for i in range(len(SLOTS))]
    filled = filled_ring(case, length, counts)
    ring, pending = Ring(*(part.cuda() for part in filled)), torch.tensor(counts, dtype=torch.int32)
    flush(every.state, filled, torch.tensor(SLOTS), pending)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for step in range(length + 1):
        new_token(case, every, strong=step % 2 == 1)
        before = case.state.clone()
        expected, every.window, every.state = every.plain()
        out = case.fused(ring=ring, pending=pending.cuda())
        torch.testing.assert_close(out[LIVE], expected, **tolerance)
        torch.testing.assert_close(case.window, every.window, equal_nan=True, atol=0, rtol=0)
        for slot, count in zip(SLOTS, pending.tolist(), strict=True):
            if slot >= 0 and count < length - 1:
                assert torch.equal(case.state[slot], before[slot])
        pending = (pending + 1) % length
        recorded = torch.zeros(len(case.state), length, dtype=torch.bool)
        for slot, count in zip(SLOTS, pending.tolist(), strict=True):
            if slot >= 0:
                recorded[slot, :count] = True
        for part in ring:  # what is no longer pending is nobody's
            part[~recorded.cuda()] = float("nan")
    flush(case.state, Ring(*(part.cpu() for part in ring)), torch.tensor(SLOTS), pending)
    torch.testing.assert_close(case.state, every.state, equal_nan=True, **tolerance)


@pytest.mark.parametrize("layer", ["gated 1", "gated 2", "kimi"])
def test_the_same_every_time(layer: str) -> None:
    """Thousands of steps from one state, bit for bit: a program that reads too early would differ once."""
    length = 5
    case = new_case(layer, torch.bfloat16)
    new_token(case, case, strong=False)
    counts = [i % length for i in range(len(SLOTS))]
    ring = Ring(*(part.cuda() for part in filled_ring(case, length, counts)))
    place_on_device(case)
    pending = torch.tensor(counts, dtype=torch.int32, device="cuda")
    tensors = (case.state, case.window, *ring)
    begin = [t.clone() for t in tensors]
    live = torch.tensor(LIVE, device="cuda")

    def step() -> list[Tensor]:
        for t, first in zip(tensors, begin, strict=True):
            t.copy_(first)
        return [run_in_place(case, ring, pending)[live], *tensors]

    wanted = [t.clone() for t in step()]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for got, want in zip(step(), wanted, strict=True):
            differing += (got.view(torch.int16) != want.view(torch.int16)).sum()
    for _ in range(2000):
        graph.replay()
    assert differing.item() == 0


def place_on_device(case: Gated | Kimi) -> None:
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            setattr(case, name, value.cuda())


def run_in_place(case: Gated | Kimi, ring: Ring, pending: Tensor) -> Tensor:
    """`fused` without the way of the states to the CPU and back."""
    from denim.recurrence.arrivals import new_arrivals
    from denim.recurrence.kernels.gated_delta_step import gated_delta_step_fused
    from denim.recurrence.kernels.kimi_delta_step import kimi_delta_step_fused

    heads = case.state.shape[1]
    weights = (case.conv.t().contiguous(), case.a_log, case.dt_bias, case.norm, 1e-6)
    places = (case.slots, case.window, case.state)
    if isinstance(case, Kimi):
        token = (case.qkv, case.b, case.f, case.g)
        arrivals = new_arrivals(heads, heads, "cuda")
        return kimi_delta_step_fused(*token, *weights, *places, arrivals, ring=ring, pending=pending)
    arrivals = new_arrivals(case.key_heads, heads, "cuda")
    return gated_delta_step_fused(case.projected, *weights, *places, arrivals, ring=ring, pending=pending)
