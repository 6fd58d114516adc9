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


def live_step() -> dict[str, Tensor | Ring]:
    q, k, v, log_decay, beta = token(2, vector=True)
    state = torch.zeros(SLOTS, HEADS, VALUE_DIM, KEY_DIM)
    at = {"slots": torch.tensor([4, 1]), "pending": torch.tensor([0, LENGTH - 1])}
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        "beta": beta,
        "state": state,
        "ring": ring(True),
        **at,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"slots": torch.tensor([4, SLOTS])},
            r"slots must differ, and lie in 0 .. 5 or be negative; got \[4, 6\]",
        ),
        ({"slots": torch.tensor([4, 4])}, "slots must differ"),
        ({"slots": torch.tensor([4, 1, 2])}, "a whole number for each row"),
        ({"slots": torch.tensor([4.0, 1.0])}, "a whole number for each row"),
        (
            {"pending": torch.tensor([-1, 0])},
            r"pending must lie in 0 .. 3 with rings of 4 records; got \[-1, 0\]",
        ),
        ({"pending": torch.tensor([LENGTH, 0])}, "pending must lie in 0 .. 3"),
        (
            {"log_decay": torch.zeros(2, HEADS)},
            r"log_decay must be \[T, Hv, d_k\] = \[2, 4, 8\]; got \[2, 4\]",
        ),
        ({"log_decay": None}, "log_decay must be a torch.Tensor"),
        ({"state": torch.zeros(SLOTS, HEADS, KEY_DIM, VALUE_DIM)}, "keys must be"),
        ({"v": torch.zeros(2, 2, VALUE_DIM)}, "v must be"),
        ({"ring": None}, "ring must be a Ring of three tensors; got NoneType"),
        ({"ring": Ring([], [], [])}, "ring must be a Ring of three tensors; got Ring"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments = live_step()
    gated_delta_step_deferred(**arguments)
    with pytest.raises(ValueError, match=message):
        gated_delta_step_deferred(**arguments | change)


def test_flush_without_a_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="ring must be a Ring of three tensors; got NoneType"):
        flush(torch.zeros(1, 1, 1, 1), None, torch.tensor([0]), torch.tensor([0]))  # type: ignore[arg-type]


def test_padding_gives_zeros() -> None:
    out = gated_delta_step_deferred(**live_step() | {"slots": torch.tensor([4, -1])})
    assert out[0].any() and not out[1].any()


def test_flush_takes_up_to_a_full_ring() -> None:
    state, records = torch.zeros(SLOTS, HEADS, VALUE_DIM, KEY_DIM), ring(True)
    for slots, pending in (([SLOTS], [1]), ([1, 1], [1, 1]), ([1], [LENGTH + 1]), ([1], [-1])):
        with pytest.raises(ValueError, match="must"):
            flush(state, records, torch.tensor(slots), torch.tensor(pending))
    assert not state.any()
    flush(state, records, torch.tensor([1, -1]), torch.tensor([LENGTH, 0]))
    assert state[1].isnan().all() and not state[0].any()
