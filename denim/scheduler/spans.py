"""From running requests to the spans of one step.

Owns how a token budget is dealt out and where a prompt is cut. Takes no memory and changes no queue:
by now every running request holds the pages of all its known tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from denim.runner.plan import NO_ROWS, DecodeRows, Span
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.holdings import Holdings
from denim.scheduler.request import Request


class Dealt(NamedTuple):
    """What one step serves: `rows`, one of each of `requests`, and `spans` behind them. `plain`: none of
    these requests has a family or wants a checkpoint. `again`: for how many steps from here on all that runs
    is these requests one token further, as long as none comes or goes and no memory moves."""

    rows: DecodeRows
    requests: tuple[Request, ...]
    spans: list[Span]
    plain: bool
    again: int

    def next(self) -> Dealt:
        """The same requests one token further."""
        starts = [request.computed for request in self.requests]
        tokens = [request.tokens[-1] for request in self.requests]
        return self._replace(rows=self.rows._replace(starts=starts, tokens=tokens), again=self.again - 1)


NOTHING_DEALT = Dealt(NO_ROWS, (), [], True, 0)


def deal(
    running: Iterable[Request],
    config: SchedulerConfig,
    holdings: Holdings,
    forks: Mapping[int, int],
    held: Collection[int],
    saves_inside: bool,
) -> Dealt:
    """Spans of one step: all decode rows, then prefill segments, each in the order of `running`.

    A decode row is a request with one token left behind a state: also the end of a prompt. There
    are never more of them than the budget has tokens (`SchedulerConfig.max_running`). One that begins
    elsewhere than it ends, or of whose prompt a report is wanted, is among the spans.
    At most `SchedulerConfig.max_prefill_spans` are no decode rows, but for forks; the others' turn comes.
    Segments end on the chunk grid, so that the linear layers cut a prompt into the same chunks however
    it is scheduled. Only where the decode rows leave less than one chunk a segment takes what is left.
    `forks` maps a request to the slot of another that it starts from; requests in `held` get no span.
    `saves_inside`: checkpoints are written in the middle of a segment; otherwise it ends where one is wanted.
    """
    decoding: list[Request] = []
    spans: list[Span] = []
    behind = []
    for request in running:
        known, start = len(request.tokens), request.computed
        if known >= request.most_tokens:
            continue  # only its last token is still on its way
        if start != known - 1 or start == 0:
            behind.append(request)
        elif request.id in held:
            continue
        elif (
            request.id in forks
            or request.prompt_logprobs is not None
            or (request.reuse is not None and request.reuse.state >= 0)
        ):
            spans.append(_span(request, known, holdings, forks.get(request.id)))
        else:
            decoding.append(request)
    prefills = len(spans)
    left = config.max_num_batched_tokens - len(decoding) - len(spans)
    grid = config.chunk_size if left >= config.chunk_size else 1
    for request in behind:
        if config.max_prefill_spans is not None and prefills >= config.max_prefill_spans:
            break
        end = _segment_end(request, left, grid, saves_inside)
        if end > request.computed:
            left -= end - request.computed
            prefills += 1
            span = _span(request, end, holdings)
            spans.append(_with_saves(span, request) if saves_inside else span)
    return _with_rows(decoding, spans, alone=not (behind or spans or held))


def _with_rows(decoding: Sequence[Request], spans: list[Span], alone: bool) -> Dealt:
    """`alone`: nobody else runs."""
    plain = all([r.family is None and (r.reuse is None or r.reuse.idle) for r in decoding])
    steps = min([r.most_tokens - len(r.tokens) for r in decoding], default=1)
    rows = DecodeRows(
        request_ids=tuple([r.id for r in decoding]),
        slots=tuple([r.slot for r in decoding]),
        pages=tuple([r.pages for r in decoding]),
        states=tuple([r.sampling for r in decoding]),
        starts=[r.computed for r in decoding],
        tokens=[r.tokens[-1] for r in decoding],
    )
    return Dealt(rows, tuple(decoding), spans, plain, steps - 1 if plain and alone else 0)


def _segment_end(request: Request, left: int, grid: int, saves_inside: bool) -> int:
    """Where the next prefill segment ends, given `left` tokens; its start when there is none in this step."""
    goal = len(request.tokens)
    if request.family is not None and request.family.unstarted and request.computed < request.fork_point:
        goal = request.fork_point
    if request.computed < request.scored:
        goal = min(goal, request.scored)  # computed again: what was reported is not reported twice
    if not saves_inside and request.reuse is not None and request.reuse.next_save is not None:
        goal = min(goal, request.reuse.next_save)
    end = request.computed + left
    return goal if end >= goal else max(end // grid * grid, request.computed)


def _span(request: Request, end: int, holdings: Holdings, fork: int | None = None) -> Span:
    """Tokens `request.computed` to `end`, read from slot `fork` if given, else from where the request's state
    lies, and written to its own slot or, where a checkpoint is wanted, to that one's."""
    start, prompt, reuse = request.computed, request.num_prompt, request.reuse
    slot_in = fork if fork is not None else request.state_slot if start else -1
    slot_out = reuse.reserved[0] if reuse is not None and end == reuse.next_save else request.slot
    if slot_in >= 0:
        holdings.arena.expect(slot_in, start)
    num_pages = holdings.pages_for(end)
    pages = request.pages if num_pages == len(request.pages) else request.pages[:num_pages]
    sampling = request.sampling if end == len(request.tokens) else None
    span = Span(request.id, start, request.tokens[start:end], pages, slot_in, slot_out, sampling)
    if request.prompt_logprobs is None or not request.scored <= start < prompt - 1:
        return span
    follows = request.tokens[end] if end < prompt else -1
    return span._replace(all_logits=True, follows=follows, top_logprobs=request.prompt_logprobs)


def _with_saves(span: Span, request: Request) -> Span:
    """The span with the checkpoints that lie inside it. One at its end takes the state of the span itself."""
    reuse = request.reuse
    if reuse is None or not reuse.reserved or span.slot_out != request.slot:
        return span
    wanted = zip(reuse.wanted, reuse.reserved, strict=False)
    return span._replace(
        saves=[(w.position - span.start, slot) for w, slot in wanted if w.position <= span.end]
    )
