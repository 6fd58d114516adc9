"""Swap space: reservations, the limit, and nothing left behind."""

from __future__ import annotations

import pytest

from denim.errors import CapacityError
from denim.memory.swap import SwapSpace


def test_reserve_put_take():
    swap = SwapSpace(100)
    assert swap.reserve(1, 60)
    assert not swap.reserve(2, 50)
    assert swap.reserve(3, 40)
    swap.put(1, ("slot", "pages"))
    swap.check()
    assert swap.take(1) == ("slot", "pages")
    assert swap.used_bytes == 40 and not swap.holds(1)
    swap.drop(3)
    swap.drop(3)
    assert swap.used_bytes == 0
    swap.check()


def test_payload_needs_a_reservation():
    swap = SwapSpace(100)
    with pytest.raises(CapacityError, match="request 5"):
        swap.put(5, "payload")
    assert swap.reserve(5, 10)
    with pytest.raises(CapacityError, match="request 5"):
        swap.reserve(5, 10)
    with pytest.raises(KeyError):
        swap.take(5)


def test_no_limit_no_swap():
    assert not SwapSpace(0).reserve(1, 1)
