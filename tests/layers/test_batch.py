"""Decode rows' entries of a view: changed in place whichever way they are reached."""

from __future__ import annotations

import torch

from denim.layers.batch import StepBatch
from tests.batches import batch_of, span_of


def rows(slots: list[int]) -> StepBatch:
    behind = span_of(3, 5, 4, 4)  # a span behind the decode rows, which must not be touched
    return batch_of([*(span_of(3, 4, slot, slot) for slot in slots), behind])


def test_both_ways_change_the_rows_and_nothing_else() -> None:
    slots = [3, 0, 5]
    before = torch.randn(6, 2, 3)
    expected = before.clone()
    for row, slot in enumerate(slots):
        expected[slot] = before[slot] * (row + 2)
    for way in ("gathered", "in_place"):
        view = before.clone()
        with getattr(rows(slots), way)(view) as entries:
            assert len(entries) == 3
            for row, entry in enumerate(entries):
                entry.mul_(row + 2)
        assert torch.equal(view, expected), way


def test_on_a_cpu_nothing_is_copied() -> None:
    view = torch.randn(6, 2, 3)
    with rows([1, 2]).in_place(view) as entries:
        assert [row.data_ptr() for row in entries] == [view[1].data_ptr(), view[2].data_ptr()]


def test_a_chunk_table_tells_of_states_inside_only_where_some_are_wanted() -> None:
    """Kernels of other libraries take what wants none."""
    span = span_of(0, 9, -1, 2)
    assert batch_of([span, span_of(0, 5, -1, 3)]).chunks(4).save is None
    save = batch_of([span._replace(saves=[(4, 1)]), span_of(0, 5, -1, 3)]).chunks(4).save
    assert save is not None and save.tolist() == [1, -1, -1, -1, -1]
