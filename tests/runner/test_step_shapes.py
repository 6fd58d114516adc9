"""Which shapes there are for steps of any size."""

from __future__ import annotations

import pytest

from denim.runner.step_shapes import decode_shapes, prefill_shapes


@pytest.mark.parametrize("most", [1, 3, 8, 9, 64, 100, 256, 300])
def test_every_number_of_rows_has_a_shape(most: int) -> None:
    shapes = decode_shapes(most)
    assert shapes[-1].rows == most and len(set(shapes)) == len(shapes)
    for rows in range(1, most + 1):
        fitting = min(shape.rows for shape in shapes if shape.rows >= rows)
        assert fitting - rows < max(8, rows / 2)


def test_prefill_shapes_keep_within_a_step() -> None:
    assert max(shape.tokens for shape in prefill_shapes(256, 500)) == 500
    assert {shape.rows for shape in prefill_shapes(20, 4096)} == {0, 20}
    assert {shape.rows for shape in prefill_shapes(64, 4096)} == {0, 32, 64}
    assert {shape.spans for shape in prefill_shapes(64, 4096) if not shape.rows} == {1}
    assert {shape.tokens for shape in prefill_shapes(4, 32)} == {32}
