"""The decode step of the delta rules for Hopper at its one size, against the plain parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from denim.recurrence.kernels.hopper_delta_spread import hopper_delta_spread
from denim.recurrence.kernels.hopper_delta_step import hopper_delta_step, suits
from tests.recurrence.kernels.test_gated_delta_step import EPS
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
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(case: Gated | Kimi, dtype: torch.dtype) -> None:
    key_heads = case.key_heads if isinstance(case, Gated) else case.state.shape[1]
    assert suits(case.state, len(case.slots), key_heads)
    expected, window, state = case.plain()
    out = case.fused()
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out[LIVE], expected, **tolerance)
    torch.testing.assert_close(case.window, window, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.state, state, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("key_heads", "group"), [(16, 1), (16, 2), (16, 3)])
def test_gated_delta(key_heads: int, group: int, dtype: torch.dtype) -> None:
    case = Gated.random(key_heads, group, DIM, DIM, dtype, SLOTS)
    case.beta_limit = 2.0
    check(case, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("floor", [None, -5.0])
def test_kimi_delta(floor: float | None, dtype: torch.dtype) -> None:
    case = Kimi.random(32, DIM, DIM, dtype, SLOTS)
    case.floor = floor
    check(case, dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    many, few = (Gated.random(16, 1, DIM, DIM, torch.float32, SLOTS) for _ in range(2))
    some = slice(6, 8)
    few.projected, few.slots = few.projected[some], few.slots[some]
    state = few.state.cuda()
    assert torch.equal(run(hopper_delta_step, few, state).cpu(), many.fused()[some])
    assert torch.equal(state[SLOTS[some]].cpu(), many.state[SLOTS[some]])


@pytest.mark.parametrize("kernel", [hopper_delta_step, hopper_delta_spread])
def test_slots_far_apart(kernel: Callable[..., Tensor]) -> None:
    """The last slot's place passes 2^31 elements; what is not touched takes no memory."""
    case = Gated.random(16, 1, DIM, DIM, torch.float32, [4, 1])
    pitch = 2**31 // 4
    far = torch.empty(5 * pitch, device="cuda").as_strided(case.state[:5].shape, (pitch, DIM * DIM, DIM, 1))
    for slot in (1, 4):
        far[slot] = case.state[slot].cuda()
    near = case.state.cuda()
    assert torch.equal(run(kernel, case, far), run(kernel, case, near))
    assert torch.equal(far[[1, 4]], near[[1, 4]])


def run(kernel: Callable[..., Tensor], case: Gated, state: Tensor) -> Tensor:
    """A case's step by one kernel, on states on the GPU, which are updated in place; no window is."""
    heads, channels = state.shape[1], len(case.conv)
    projected, window = case.projected.cuda(), case.window.cuda()
    z, b, a = projected[:, channels:].split((heads * DIM, heads, heads), dim=1)
    weights = (case.conv.t().contiguous(), case.a_log, case.dt_bias, case.norm)
    places = (case.slots.cuda(), window, state, case.key_heads)
    return kernel(projected, z, b, a, *(w.cuda() for w in weights), EPS, *places, vector_decay=False)
