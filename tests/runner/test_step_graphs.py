"""What a step looks like in the static buffers of a shape; the graphs themselves need a GPU."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from denim.runner.captured_batch import CapturedBatch
from denim.runner.packing import arrange, one_further
from denim.runner.plan import DecodeRows, Span
from denim.runner.static_inputs import InputBuffers, StaticInputs, ints_of
from denim.runner.step_graphs import StepGraphs
from denim.runner.step_shapes import StepShape

PAGE = 4


class NoEvent:
    def __init__(self, device: torch.device) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "Event", NoEvent)


def graphs_without_a_device(shape: StepShape) -> tuple[StepGraphs, CapturedBatch, StaticInputs]:
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.storage = SimpleNamespace(layout=SimpleNamespace(recorded=lambda rows: 5))
    graphs.paged, graphs.page_size = True, PAGE
    graphs._inputs = InputBuffers(ints_of(shape) + 40, torch.device("cpu"))
    for buffer in (graphs._inputs._buffer, *(staged for staged, _ in graphs._inputs._staged)):
        buffer.fill_(77)
    batch, inputs = graphs._batch(shape)
    return graphs, batch, inputs


def test_a_step_and_its_padding() -> None:
    graphs, batch, inputs = graphs_without_a_device(StepShape(rows=3, spans=3, tokens=12))
    table = batch.chunks(4)
    spans = [
        Span(10, 5, [-1], [8, 9], 2, 2, "draws"),
        Span(11, 3, [41], [7], 3, 3, "draws"),
        Span(12, 0, [1, 2, 3, 4, 5], [20, 21], -1, 4, None, saves=[(2, 9)]),
        Span(13, 4, [6, 7], [30, 31], 6, 5, "draws"),
    ]
    step = arrange(spans, {10: 1}, page_size=PAGE, paged=True)
    assert graphs._fill(batch, step, [2, 1])
    tokens, sources, ends = inputs.tokens, inputs.sources, inputs.ends
    nothing = [0] * 5
    assert tokens.tolist() == [-1, 41, 0, 1, 2, 3, 4, 5, 6, 7, *nothing]
    assert batch.pending.tolist()[:2] == [2, 1]
    assert sources.tolist() == [1] + [-1] * 14
    assert batch.positions.tolist() == [5, 3, 0, 0, 1, 2, 3, 4, 4, 5, *nothing]
    assert batch.token_pages.tolist() == [9, 7, -1, 20, 20, 20, 20, 21, 31, 31] + [-1] * 5
    assert batch.decode_slots.tolist() == [2, 3, -1]
    assert ends.tolist() == [0, 1, 9, 0, 0, 0]  # of the rows that draw, in order; then padding
    assert batch.kv_lens.tolist() == batch.kv_lengths == [6, 4, 0, 5, 6, 0]
    assert batch.page_indptr.tolist() == batch.page_offsets == [0, 2, 3, 3, 5, 7, 7]
    assert batch.q_indptr.tolist() == batch.cu_seqlens == [0, 1, 2, 3, 8, 10, 10]
    assert batch.page_ids[:7].tolist() == [8, 9, 7, 20, 21, 30, 31]
    assert batch.num_decode == 3
    chunks = [[0, 0, 2], [0, 2, 2], [0, 4, 1], [1, 5, 2]]
    assert table.chunks[:4].tolist() == chunks and (table.chunks[4:, 0] == -1).all()
    assert table.first_chunk.tolist() == [0, 3, 4, 4]
    assert table.cu_seqlens.tolist() == [0, 5, 7, 7]
    assert (table.slot_in.tolist(), table.slot_out.tolist()) == ([-1, 6, -1], [4, 5, -1])
    assert table.save is not None and table.save[:4].tolist() == [9, -1, -1, -1]

    follows = [Span(11, 4, [42], [7, 17], 3, 3, "draws")]
    assert graphs._fill(batch, arrange(follows, {}, page_size=PAGE, paged=True))
    assert tokens.tolist() == [42] + [0] * 14
    assert batch.decode_slots.tolist() == [3, -1, -1]
    assert (table.chunks[:, 0] == -1).all() and table.slot_out.tolist() == [-1] * 3
    assert batch.kv_lens.tolist() == [5, 0, 0, 0, 0, 0]


def test_what_a_step_with_the_same_rows_does_not_write_is_there() -> None:
    graphs, batch, inputs = graphs_without_a_device(StepShape(rows=3))
    drawn = {10: 0, 11: 1}
    pages = array("i", [8, 9]), array("i", [7])
    rows = DecodeRows((10, 11), (2, 3), pages, ("draws", "draws"), [5, 2], [-1, -1])
    step = arrange([], drawn, page_size=PAGE, paged=True, rows=rows)
    for more in range(1, 9):  # either of the host's buffers comes several times
        assert graphs._fill(batch, step, [more % 3, 1])
        seen = [part.tolist() for part in inputs]
        fresh, other, fresh_inputs = graphs_without_a_device(StepShape(rows=3))
        assert fresh._fill(other, step, [more % 3, 1])
        length = len(step.page_ids)
        for name, ours, theirs in zip(inputs._fields, seen, fresh_inputs, strict=True):
            end = {"page_ids": length, "records": 2}.get(name)
            assert ours[:end] == theirs.tolist()[:end], (more, name)
        rows = rows._replace(starts=[5 + more, 2 + more], tokens=[-1, -1])
        for table, start in zip(pages, rows.starts, strict=True):
            table.extend([20 + more] * (start // PAGE + 1 - len(table)))
        further = one_further(step, rows, drawn, page_size=PAGE)
        assert further is not None
        step = further
    changed = rows._replace(slots=(6, 3))
    assert graphs._fill(batch, arrange([], drawn, page_size=PAGE, paged=True, rows=changed), [0, 0])
    assert inputs.decode_slots.tolist() == [6, 3, -1]


def test_more_wanted_states_than_a_shape_has_chunks() -> None:
    graphs, batch, _ = graphs_without_a_device(StepShape(rows=1, spans=1, tokens=64))
    batch.chunks(64)
    spans = [Span(1, 0, [5] * 64, list(range(16)), -1, 0, saves=[(at, at) for at in range(1, 64)])]
    assert not graphs._fill(batch, arrange(spans, {}, page_size=PAGE, paged=True))
