"""A step on the host: which of its spans comes where, and what the device must know of each."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from denim.runner.packing import HostStep, arrange, one_further
from denim.runner.plan import NO_ROWS, DecodeRows, Span

PAGE = 4
DRAWS = object()


def arranged(*spans: Span, rows_before: dict[int, int] | None = None, paged: bool = True) -> HostStep:
    return arrange(spans, rows_before or {}, page_size=PAGE, paged=paged)


def test_decode_rows_come_first_and_keep_their_order() -> None:
    fork = Span(1, 8, [5], [0, 1, 2], 9, 3, DRAWS)
    first, second = Span(2, 3, [6], [4], 5, 5, DRAWS), Span(3, 4, [7], array("i", [6, 7]), 6, 6, DRAWS)
    prompt = Span(4, 0, [1, 2], [8], -1, 7)
    step = arranged(fork, first, prompt, second)
    assert (step.request_ids, step.decode) == ((2, 3, 1, 4), 2)
    assert [span.request_id for span in step.spans] == [2, 3, 1, 4]
    assert step.tokens.tolist() == [6, 7, 5, 1, 2]
    assert step.positions.tolist() == [3, 4, 8, 0, 1]
    assert step.token_pages.tolist() == [4, 7, 2, 8, 8]
    assert step.page_ids.tolist() == [4, 6, 7, 0, 1, 2, 8]
    assert step.page_offsets.tolist() == [0, 1, 3, 6, 7]
    assert step.kv_lengths.tolist() == [4, 5, 9, 2]
    assert step.cu_seqlens.tolist() == [0, 1, 2, 3, 5]
    assert (step.slot_in, step.slot_out) == ((5, 6, 9, -1), (5, 6, 3, 7))
    assert (step.drawing, step.unknown) == ([0, 1, 2], [False] * 3)
    assert not step.scored


def test_tokens_that_the_host_does_not_know_name_their_rows() -> None:
    rows = [Span(7, 4, [-1], [0, 1], 0, 0, DRAWS), Span(8, 2, [9], [2], 1, 1, DRAWS)]
    behind = Span(9, 6, [3, -1], [3, 4], 2, 5, DRAWS)
    step = arranged(*rows, behind, rows_before={9: 1, 7: 4})
    assert step.sources.tolist() == [4, -1, -1, 1]
    assert step.unknown == [True, False, True]


def test_a_table_may_hold_more_pages_than_are_read() -> None:
    step = arranged(Span(1, 3, [1], array("i", [5, 6, 7]), 0, 0, DRAWS), Span(2, 4, [1], [8, 9, 3], 1, 1))
    assert step.page_ids.tolist() == [5, 8, 9]
    assert step.drawing == [0]


def test_a_model_without_pages() -> None:
    step = arranged(Span(1, 3, [1], array("i"), 0, 0, DRAWS), Span(2, 0, [1, 2], [], -1, 1), paged=False)
    assert not len(step.token_pages) and not len(step.page_ids)
    assert step.page_offsets.tolist() == [0, 0, 0]


def test_a_report_on_a_prompt_is_seen() -> None:
    assert arranged(Span(1, 0, [1, 2], [0], -1, 1, all_logits=True, follows=3)).scored


def test_nothing_to_run() -> None:
    step = arranged()
    assert step.decode == 0 and step.cu_seqlens.tolist() == [0] and not len(step.tokens)


def rows_at(starts: list[int], paged: bool = True) -> DecodeRows:
    """Rows of requests 5, 6, … with pages of their own for so many tokens and the next."""
    count = len(starts)
    pages = [array("i", range(100 * n, 100 * n + start // PAGE + 1)) for n, start in enumerate(starts)]
    return DecodeRows(
        request_ids=tuple(range(5, 5 + count)),
        slots=tuple(range(40, 40 + count)),
        pages=tuple(pages if paged else [array("i")] * count),
        states=(DRAWS,) * count,
        starts=starts,
        tokens=[-1] * count,
    )


@pytest.mark.parametrize("paged", [True, False])
def test_rows_one_token_further_are_as_if_arranged_anew(paged: bool) -> None:
    first = rows_at([3, 9, 14], paged)
    drawn = {5: 0, 6: 1, 7: 2}
    step = arrange([], drawn, page_size=PAGE, paged=paged, rows=first)
    for more in range(1, 2 * PAGE):
        starts = [start + more for start in (3, 9, 14)]
        rows = first._replace(starts=starts, tokens=[-1] * 3)
        if paged:
            for table, start in zip(rows.pages, starts, strict=True):
                table.extend([900 + more] * (start // PAGE + 1 - len(table)))
        before, step = step, one_further(step, rows, drawn, page_size=PAGE)
        assert step is not None and step.tokens is before.tokens
        anew = arrange([], drawn, page_size=PAGE, paged=paged, rows=rows)
        for name, ours, theirs in zip(HostStep._fields, step, anew, strict=True):
            assert np.array_equal(ours, theirs), (more, name)


def test_rows_that_are_not_those_of_the_step_before() -> None:
    first, drawn = rows_at([3, 9]), {5: 0, 6: 1}
    step = arrange([], drawn, page_size=PAGE, paged=True, rows=first)
    follow = first._replace(starts=[4, 10], tokens=[-1, -1])
    assert one_further(step, follow, drawn, page_size=PAGE) is not None
    for rows, before in (
        (follow, {5: 0, 6: 1}),  # another step may have drawn them in between
        (follow._replace(tokens=[-1, 8]), drawn),
        (follow._replace(request_ids=(5, 7)), drawn),
        (follow._replace(slots=(40, 50)), drawn),
    ):
        assert one_further(step, rows, before, page_size=PAGE) is None
    known = arrange([], {}, page_size=PAGE, paged=True, rows=first._replace(tokens=[4, 4]))
    assert one_further(known, follow._replace(tokens=[4, 4]), known.rows_before, page_size=PAGE) is None
    nobody = arrange([], drawn, page_size=PAGE, paged=True)
    assert one_further(nobody, NO_ROWS, drawn, page_size=PAGE) is None
