"""The decode step of the delta rules for Hopper at its one size, against the plain parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.hopper_delta_spread import hopper_delta_spread
from denim.recurrence.kernels.hopper_delta_step import hopper_delta_step, suits
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
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(case: Case, dtype: torch.dtype) -> None:
    assert suits(case.inputs.state, len(SLOTS), case.inputs.key_heads)
    case.check(TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("key_heads", "group"), [(16, 1), (16, 2), (16, 3)])
def test_gated_delta(key_heads: int, group: int, dtype: torch.dtype) -> None:
    check(Case(key_heads, group, DIM, DIM, dtype, SLOTS, beta_limit=2.0), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("floor", [None, -5.0])
def test_kimi_delta(floor: float | None, dtype: torch.dtype) -> None:
    check(Case(32, 1, DIM, DIM, dtype, SLOTS, vector_decay=True, decay_floor=floor), dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    many, few = (Case(16, 1, DIM, DIM, torch.float32, SLOTS) for _ in range(2))
    some = slice(6, 8)
    state = few.inputs.state.cuda()
    out = run(hopper_delta_step, few, state, some)
    assert torch.equal(out.cpu(), many.fused()[some])
    assert torch.equal(state[SLOTS[some]].cpu(), many.inputs.state[SLOTS[some]])


@pytest.mark.parametrize("kernel", [hopper_delta_step, hopper_delta_spread])
def test_slots_far_apart(kernel: Callable[[DeltaInputs], Tensor]) -> None:
    """The last slot's place passes 2^31 elements; what is not touched takes no memory."""
    case = Case(16, 1, DIM, DIM, torch.float32, [4, 1])
    pitch, shape = 2**31 // 4, case.inputs.state[:5].shape
    far = torch.empty(5 * pitch, device="cuda").as_strided(shape, (pitch, DIM * DIM, DIM, 1))
    for slot in (1, 4):
        far[slot] = case.inputs.state[slot].cuda()
    near = case.inputs.state.cuda()
    assert torch.equal(run(kernel, case, far), run(kernel, case, near))
    assert torch.equal(far[[1, 4]], near[[1, 4]])


def run(
    kernel: Callable[[DeltaInputs], Tensor], case: Case, state: Tensor, some: slice = slice(None)
) -> Tensor:
    """Some rows of a case by one kernel, on states on the GPU, which are updated in place; no window is."""
    inputs = case.on("cuda")
    rows = {name: getattr(inputs, name)[some] for name in ("qkv", "z", "b", "a", "slots")}
    return kernel(inputs._replace(state=state, **rows))
