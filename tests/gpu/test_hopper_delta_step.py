"""The decode step of the delta rules for Hopper at its one size, against the plain parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.recurrence.kernels.hopper_delta_step import suits
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
    assert suits(few.state, 2, 16)
    assert torch.equal(many.fused()[some], few.fused())
    assert torch.equal(many.state[SLOTS[some]], few.state[SLOTS[some]])


def test_slots_far_apart() -> None:
    """The last slot's place passes 2^31 elements; what is not touched takes no memory."""
    case, near = (Gated.random(16, 1, DIM, DIM, torch.float32, [4, 1]) for _ in range(2))
    pitch = 2**31 // 4
    far = torch.empty(5 * pitch, device="cuda").as_strided(case.state[:5].shape, (pitch, DIM * DIM, DIM, 1))
    for slot in (1, 4):
        far[slot] = case.state[slot].cuda()
    case.state = far
    out, expected = run_in_place(case), near.fused()
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(far[[1, 4]].cpu(), near.state[[1, 4]])


def run_in_place(case: Gated) -> Tensor:
    """`Case.fused` without the way of the states to the CPU and back."""
    from denim.recurrence.kernels.gated_delta_step import gated_delta_step_fused

    weights = (case.projected, case.conv.t().contiguous(), case.a_log, case.dt_bias, case.norm)
    arrivals = torch.zeros(len(case.slots), case.key_heads, dtype=torch.int32, device="cuda")
    places = (case.slots.cuda(), case.window.cuda(), case.state, arrivals)
    return gated_delta_step_fused(*(t.cuda() for t in weights), 1e-6, *places)
