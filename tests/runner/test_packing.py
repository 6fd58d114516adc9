"""A step on the host: which of its spans comes where, and what the device must know of each."""

from __future__ import annotations

from array import array

from denim.runner.packing import HostStep, arrange
from denim.runner.plan import Span

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
