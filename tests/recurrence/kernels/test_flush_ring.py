"""The kernel that writes pending updates into states, against the plain form."""

from __future__ import annotations

import pytest
import torch

from denim.recurrence import deferred
from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.flush_ring import flush

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LENGTH = 7, 5
SIZES = [(2, 1, 16, 16), (1, 3, 24, 12)]
if DEVICE == "cuda":
    SIZES += [(16, 2, 128, 128)]


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_the_plain_form(sizes: tuple[int, int, int, int], vector: bool) -> None:
    torch.manual_seed(0)
    key_heads, group, key_dim, value_dim = sizes
    heads = key_heads * group
    slots = torch.tensor([6, -1, 2, 0, 4])
    pending = torch.tensor([5, 3, 0, 1, 2], dtype=torch.int32)
    nan = float("nan")
    state = torch.full((SLOTS, heads + 1, value_dim, key_dim), nan)[:, :heads]
    ring = Ring(
        torch.full((SLOTS, LENGTH + 1, key_heads, key_dim), nan)[:, :LENGTH],
        torch.full((SLOTS, LENGTH + 1, heads, value_dim), nan)[:, :LENGTH],
        torch.full((SLOTS, LENGTH + 1, heads, *[key_dim] * vector), nan)[:, :LENGTH],
    )
    for slot, count in zip(slots.tolist(), pending.tolist(), strict=True):
        if slot >= 0:
            state[slot] = torch.randn(state.shape[1:])
            for part in ring:
                part[slot, :count] = torch.randn(count, *part.shape[2:])
            ring.log_decays[slot, :count].abs_().neg_()
    ring.log_decays[6, 3, 0] = -30000.0
    expected = state.clone()
    deferred.flush(expected, ring, slots, pending)
    moved = state.to(DEVICE)
    flush(moved, Ring(*(part.to(DEVICE) for part in ring)), slots.to(DEVICE), pending.to(DEVICE))
    torch.testing.assert_close(moved.cpu(), expected, equal_nan=True, atol=1e-5, rtol=1e-5)
