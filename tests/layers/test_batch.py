"""Decode rows' entries of a view: changed in place whichever way they are reached."""

from __future__ import annotations

import torch

from denim.layers.batch import StepBatch


def batch_of(slots: list[int]) -> StepBatch:
    index = torch.tensor(slots)
    none = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        memory=None,
        positions=none,
        token_pages=none,
        token_offsets=none,
        tables=[],
        decode_slots=index,
        prefill_slots=none,
        carried=none,
        carried_slots=none,
        cu_seqlens=list(range(len(slots) + 1)),
        kv_lengths=[1] * len(slots),
        slot_out=[*slots, 4],  # a span behind the decode rows, which must not be touched
    )


def test_both_ways_change_the_rows_and_nothing_else() -> None:
    slots = [3, 0, 5]
    before = torch.randn(6, 2, 3)
    expected = before.clone()
    for row, slot in enumerate(slots):
        expected[slot] = before[slot] * (row + 2)
    for way in ("gathered", "in_place"):
        view = before.clone()
        with getattr(batch_of(slots), way)(view) as rows:
            assert len(rows) == 3
            for row, entry in enumerate(rows):
                entry.mul_(row + 2)
        assert torch.equal(view, expected), way


def test_on_a_cpu_nothing_is_copied() -> None:
    view = torch.randn(6, 2, 3)
    with batch_of([1, 2]).in_place(view) as rows:
        assert [row.data_ptr() for row in rows] == [view[1].data_ptr(), view[2].data_ptr()]
