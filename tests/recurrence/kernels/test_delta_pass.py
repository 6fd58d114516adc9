"""How the pass over chunks is cut, for a device of so many multiprocessors as an H200 has."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels import delta_pass
from denim.recurrence.kernels.delta_pass import plan_of


@pytest.mark.parametrize(
    ("vector", "heads", "lengths", "rows", "span"),
    [
        (False, 16, [2048], 64, 8),  # eight segments of 32 programs, two on a multiprocessor; none under 8
        (False, 16, [2048] * 16, 64, 0),  # there is enough to do
        (True, 32, [2048], 128, 11),  # three: the walk for B and P has 96 programs, one on a multiprocessor
        (True, 16, [32768], 128, 103),  # five: 112 programs
        (True, 32, [2048] * 16, 128, 0),
        (True, 32, [512], 64, 0),  # too short to cut; all 64 programs of 64 rows have a place
        (True, 32, [512] * 3, 128, 0),  # 192 would not
    ],
)
def test_cuts(
    monkeypatch: pytest.MonkeyPatch, vector: bool, heads: int, lengths: list[int], rows: int, span: int
) -> None:
    monkeypatch.setattr(delta_pass, "multiprocessors", lambda device: 132)
    slots = list(range(len(lengths)))
    table = ChunkTable.of([0, *accumulate(lengths)], slots, slots, 64, "cpu")
    state = torch.empty(len(lengths), heads, 128, 128, device="meta")
    plan = plan_of(table, state, torch.bfloat16, vector=vector)
    assert (plan.rows, plan.span) == (rows, span)
    assert plan_of(table, state, torch.float32, vector=vector).span == 0
