"""Which shapes there are for steps of any size."""

from __future__ import annotations

from itertools import product

import pytest

from denim.engine.memory_plan import RECORD_FROM
from denim.runner.step_shapes import StepShape, decode_shapes, prefill_shapes


@pytest.mark.parametrize("most", [1, 3, 8, 9, 64, 100, 256, 300])
def test_every_number_of_rows_has_a_shape(most: int) -> None:
    shapes = decode_shapes(most)
    assert shapes[-1].rows == most and len(set(shapes)) == len(shapes)
    for rows in range(1, most + 1):
        fitting = min(shape.rows for shape in shapes if shape.rows >= rows)
        assert fitting - rows < max(8, rows / 2)


def test_prefill_shapes_keep_within_a_step() -> None:
    assert max(shape.tokens for shape in prefill_shapes(256, 500)) == 500
    assert {shape.rows for shape in prefill_shapes(20, 4096)} == {0, 8, 20}
    assert {shape.rows for shape in prefill_shapes(64, 4096)} == {0, 8, 32, 64}
    assert {shape.spans for shape in prefill_shapes(64, 4096) if not shape.rows} == {1}
    assert {shape.tokens for shape in prefill_shapes(4, 32)} == {32}


def test_a_shape_holds_what_it_has_room_for() -> None:
    shape = StepShape(rows=2, spans=3, tokens=10)
    assert shape.holds(2, 3, 10)
    assert not any(shape.holds(*more) for more in ((3, 3, 10), (2, 4, 10), (2, 3, 11)))


def test_spans_of_a_shape_with_prefill() -> None:
    """One for 16 of its tokens, 16 at least, 64 at most."""
    shapes = {shape.tokens: shape.spans for shape in prefill_shapes(8, 4096) if shape.rows}
    assert shapes == {64: 16, 256: 16, 512: 32, 1024: 64, 2048: 64, 4096: 64}


@pytest.mark.parametrize("most", [RECORD_FROM, 20, 32, 64, 100])
def test_few_rows_never_meet_a_shape_that_records(most: int) -> None:
    """A graph is captured in the mode of its own rows; a step of fewer that took the other mode would run
    eagerly."""
    shapes = sorted(decode_shapes(most) + prefill_shapes(most, 2048), key=lambda shape: shape.cost)
    for rows, spans, tokens in product(range(most + 1), (0, 1, 5, 30), (0, 60, 500, 2000)):
        if (spans > 0) != (tokens > 0) or not rows + spans:
            continue
        first = next(shape for shape in shapes if shape.holds(rows, spans, tokens))
        assert (first.rows >= RECORD_FROM) == (rows >= RECORD_FROM)
