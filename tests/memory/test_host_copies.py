"""How bytes are cut and joined to fill the buffers; the copies themselves are tested in tests/gpu."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from denim.memory import host_copies


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 12))
def test_batches(sizes: list[int], room: int) -> None:
    """Everything once, in order; full but for the last; nothing empty."""
    total = sum(sizes)
    parts = list(torch.arange(total, dtype=torch.int64).split(sizes)) if sizes else []
    before, host_copies.STAGING_BYTES = host_copies.STAGING_BYTES, room
    try:
        batches = list(host_copies._batches(parts))
    finally:
        host_copies.STAGING_BYTES = before
    lengths = [sum(piece.numel() for piece in batch) for batch in batches]
    assert all(length == room for length in lengths[:-1]) and sum(lengths) == total
    assert all(piece.numel() for batch in batches for piece in batch)
    if total:
        assert torch.equal(torch.cat([piece for batch in batches for piece in batch]), torch.arange(total))
