"""Deferred writes, in the plain form, against writing the state every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.recurrence.deferred import Ring, flush, gated_delta_step_deferred
from denim.recurrence.gated_delta import gated_delta_step, l2norm

SLOTS, LENGTH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 6, 4, 2, 4, 8, 6


def ring(vector: bool) -> Ring:
    nan = float("nan")
    return Ring(
        torch.full((SLOTS, LENGTH, KEY_HEADS, KEY_DIM), nan),
        torch.full((SLOTS, LENGTH, HEADS, VALUE_DIM), nan),
        torch.full((SLOTS, LENGTH, HEADS, *[KEY_DIM] * vector), nan),
    )


def token(rows: int, vector: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k = l2norm(torch.randn(2, rows, KEY_HEADS, KEY_DIM))
    log_decay = -torch.rand(rows, HEADS, *[KEY_DIM] * vector).exponential_()
    log_decay[::2, 1] = -30000.0  # forgets all that was before, and nothing after it
    return q, k, torch.randn(rows, HEADS, VALUE_DIM), log_decay, torch.rand(rows, HEADS)


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_equals_writing_every_step(vector: bool) -> None:
    """Rows whose records are written at different times, and one of padding."""
    torch.manual_seed(0)
    state = torch.full((SLOTS, HEADS, VALUE_DIM, KEY_DIM), float("nan"))
    slots, pending = torch.tensor([4, -1, 0, 5]), torch.tensor([0, 0, 0, 0])
    live = slots >= 0
    state[slots[live]] = torch.randn(3, HEADS, VALUE_DIM, KEY_DIM)
    expected = state[slots[live]].double()
    records = ring(vector)
    for step in range(3 * LENGTH + 2):
        if step == 2:  # one row now runs ahead of the others
            flush(state, records, slots[2:3], pending[2:3])
            pending[2] = 0
        x = token(4, vector)
        out = gated_delta_step_deferred(*x, state, records, slots, pending)
        want = gated_delta_step(*(t[live].double() for t in x), expected)
        torch.testing.assert_close(out[live].double(), want, atol=1e-5, rtol=1e-5)
        pending = (pending + 1) % LENGTH
    flush(state, records, slots, pending)
    torch.testing.assert_close(state[slots[live]].double(), expected, atol=1e-5, rtol=1e-5)
    assert state[[1, 2, 3]].isnan().all()
