"""The step plan: all that the scheduler tells the runner about one step.

Plain data. The scheduler writes it, the runner carries it out, and neither reaches into the other.
Order of execution: swap_out, stores, moves, swap_in, page_copies, loads, then one forward pass over all
spans. Entries are named by the ids that they have at that place in the order. What is loaded lands beside the
steps, in entries that no step uses before it is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from denim.memory.compaction import Move
from denim.memory.transfer import Transfer


class Span(NamedTuple):
    """`length` consecutive tokens of one request, computed in this step.

    The state is read from `slot_in` (-1: a fresh request, nothing is read; then start is 0) and written
    to `slot_out`. The two differ when a request begins from a state that it does not own.
    `pages` holds the page ids of positions 0 .. start+length, in order.
    `sampling` is the request's sampling state when a token is drawn after the span's last position,
    None when more of the request's known tokens follow. The scheduler never looks inside.
    `all_logits`: a log-probability report is wanted for the token that follows each of the span's tokens
    within the prompt (prompt_logprobs), with so many `top_logprobs`; `follows` is the prompt's token right
    behind the span, -1 for none.
    `saves`: (tokens behind the span's start, slot) of states wanted inside it, none for a decode row.
    """

    request_id: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    slot_in: int
    slot_out: int
    sampling: Any | None = None
    all_logits: bool = False
    follows: int = -1
    top_logprobs: int = 0
    saves: Sequence[tuple[int, int]] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def is_decode(span: Span) -> bool:
    """One token that reads and writes its request's own state, so that it can be updated in place."""
    return len(span.tokens) == 1 and span.slot_in == span.slot_out


class DecodeRows(NamedTuple):
    """Spans of one token each that go on in place from their own state and draw a token, column by column:
    what nearly all of nearly every step is. `slots` are -1 without states; `pages` hold C ints, those of all
    known tokens. While the same requests decode, the columns but for starts and tokens are the same objects
    from step to step."""

    request_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    pages: tuple[array[int], ...] = ()
    states: tuple[Any, ...] = ()
    starts: Sequence[int] = ()
    tokens: Sequence[int] = ()

    def span(self, row: int) -> Span:
        slot = self.slots[row]
        return Span(
            self.request_ids[row],
            self.starts[row],
            [self.tokens[row]],
            self.pages[row],
            slot,
            slot,
            self.states[row],
        )


NO_ROWS = DecodeRows()


class Swap(NamedTuple):
    """A request's slot (-1: it has none) and pages, moved to or from host memory under its id.

    `tokens` is the count that the slot stands for; on the way out, `pending` of them are only recorded and
    are written to the state first.
    """

    request_id: int
    slot: int
    pages: Sequence[int]
    tokens: int
    pending: int = 0


class PageCopy(NamedTuple):
    source: int
    target: int


class StepPlan(NamedTuple):
    """One step: decode rows, and `others` behind them, first those of one token, then prefill segments."""

    rows: DecodeRows
    others: list[Span]
    swap_out: list[Swap]
    swap_in: list[Swap]
    page_copies: list[PageCopy]
    moves: Sequence[Move] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()

    @property
    def request_ids(self) -> list[int]:
        """Of all spans, in order."""
        return [*self.rows.request_ids, *[span.request_id for span in self.others]]

    @property
    def decode_rows(self) -> int:
        return len(self.rows.request_ids) + sum(map(is_decode, self.others))

    @property
    def num_tokens(self) -> int:
        return len(self.rows.request_ids) + sum([span.length for span in self.others])

    @property
    def spans(self) -> list[Span]:
        """All spans one by one, decode rows too."""
        return [*map(self.rows.span, range(len(self.rows.request_ids))), *self.others]
