"""Who runs in the next step: the order of requests, admission, preemption, forks.

Owns the queues and every decision about memory. Knows counts and ids; tokens, tensors and sampling pass
through unread. It never runs anything: `schedule` writes a plan, the runner starts it (`launched`), and
`update` notes the outcome.

The next plan may be written before the outcome of the last one is known: which tokens a step draws changes
nothing that is decided here, only that a request may turn out to have ended. Then the plan behind it has
computed one token of that request for nothing. The runner carries plans out in order, so memory that a
request leaves is free at once, whatever plan still writes there.

The rules:

* One order, (priority, arrival), for everything. The first waiting request is never overtaken (but see
  below), and a preempted one waits at its old place.
* A step serves every decode row first, then prefill in that order with what is left of the token budget.
* Admission takes the slot and the pages of all known tokens at once, so a prefill never runs short
  half-way. Beside other requests one page more per running request must be free: otherwise the newcomer
  would be preempted at the next page that any of them needs.
* Only decode needs memory later, one page every `page_size` tokens. When there is none, the running
  request that is last in the order gives way, possibly the one that asked. The first in the order never
  gives way to another, and `add` has made sure that it fits alone: there is always progress.
* A waiting request of a better priority makes running ones of a worse priority give way.
* A request whose prefix is on its way up from a lower tier lets others pass until it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

from denim.cache.lower_tiers import LowerTiers, Sources
from denim.cache.prefix_cache import HasRoom, Hit, PrefixCache
from denim.errors import CapacityError, RequestError
from denim.memory.arena import Arena
from denim.memory.swap import SwapSpace
from denim.runner.plan import PageCopy, Span, StepPlan, is_decode
from denim.scheduler.admission import Admission
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.holdings import Holdings
from denim.scheduler.prefixes import Prefixes
from denim.scheduler.queue import RequestQueue
from denim.scheduler.request import UNKNOWN, Request, Status
from denim.scheduler.room import Room
from denim.scheduler.spans import Dealt, deal
from denim.scheduler.step_draft import StepDraft


class Scheduler:
    """`recompute_cheaper(tokens)`: whether computing so many tokens again beats moving them out and in.
    `open_cache(has_room)`: the prefix cache, given what joins scattered free memory; None: no cache.
    `saves_inside`: whether a step can write states in the middle of a segment. `open_tiers(cache, sources)`:
    the tiers below the cache; None: there are none."""

    def __init__(
        self,
        config: SchedulerConfig,
        arena: Arena,
        swap: SwapSpace,
        recompute_cheaper: Callable[[int], bool],
        open_cache: Callable[[HasRoom], PrefixCache] | None = None,
        saves_inside: bool = False,
        open_tiers: Callable[[PrefixCache, Sources], LowerTiers] | None = None,
    ) -> None:
        self.config = config
        self.requests: dict[int, Request] = {}  # all that have not finished
        self._arena = arena
        self._holdings = Holdings(arena, swap)
        self._recompute_cheaper = recompute_cheaper
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._arrivals = count()
        self._preemptions = {"swap": 0, "recompute": 0}
        self._out: list[StepPlan] = []  # launched, not yet updated; the older first
        self._step = StepDraft()  # in the making, within `schedule`
        self._same: Dealt | None = None  # of the last step, where this one's rows are the same requests
        compactor = self._holdings.compactor
        compactor.watch(self)
        cache = None if open_cache is None else open_cache(compactor.make_room)
        tiers = None
        if cache is not None and open_tiers is not None:
            tiers = open_tiers(cache, compactor.sources)
            compactor.watch(tiers)
        self.prefixes = Prefixes(arena, cache, config.chunk_size, saves_inside, tiers)
        self._saves_inside = saves_inside
        self._room = Room(arena, compactor, cache, tiers)
        self._admission = Admission(
            config, self._holdings, self._room, self.prefixes, self._waiting, self._running
        )

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with nothing kept, when it could never run even alone."""
        tokens = request.num_prompt + request.max_tokens
        asked = f"{request.num_prompt} prompt tokens and max_tokens={request.max_tokens}"
        if tokens > self.config.max_model_len:
            raise RequestError(
                f"{asked} make {tokens} tokens, but max_model_len is {self.config.max_model_len}; "
                "shorten the prompt or lower max_tokens"
            )
        self._holdings.require_fit(tokens, asked)
        if request.num_prompt < 2:
            request.family = None  # no token before the last one that a leader could compute for others
        request.key = (request.priority, next(self._arrivals))
        self._waiting.insert(request)
        self.requests[request.id] = request
        if request.family is not None:
            request.family.unstarted += 1

    def finish(self, request_id: int, reason: str) -> bool:
        """Take a request out, whatever it is doing; False when there is none of this id (any more).

        Its memory is free when this returns. Not to be called between `schedule` and the plan's launch.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        (self._running if request.status is Status.RUNNING else self._waiting).remove(request)
        self._same = None
        request.leave_family()
        request.status = Status.FINISHED
        request.finish_reason = reason
        self.prefixes.finish(request, reason)
        self._holdings.release(request)
        self._holdings.swap.drop(request.id)
        return True

    # One step

    def schedule(self) -> StepPlan | None:
        """The next step, to be started and then given to `launched`; None when there is nothing to run.

        A span's `pages` may be the request's own list, and is valid until the next call.
        """
        self.prefixes.arrive()
        step = self._step = StepDraft()
        self._grow(step)
        self._admission.look_ahead()
        self._admit(step)
        self.prefixes.reserve(self._running, self.config.max_num_batched_tokens)
        if self._same is not None:
            step.dealt = self._same.next()
        else:
            step.dealt = deal(
                self._running, self.config, self._holdings, step.forks, step.held, self._saves_inside
            )
            self._dissolve_families(step.dealt)
        self._same = step.dealt if step.dealt.again else None
        plan = step.plan._replace(rows=step.dealt.rows, others=step.dealt.spans)
        tiers = self.prefixes.tiers
        stores, loads = ((), ()) if tiers is None else tiers.take()
        if plan.rows.request_ids or plan.others or plan.swap_out or loads:
            return plan._replace(moves=self._holdings.compactor.take(), stores=stores, loads=loads)
        if self._waiting and not self._running and not self.prefixes.awaited:
            head = self._waiting[0]
            raise CapacityError(
                f"request {head.id} of {len(head.tokens)} tokens does not fit although nothing runs; it was "
                f"added with room for {head.num_prompt + head.max_tokens}: {self._arena.stats()}"
            )
        return None

    def put_away(self) -> StepPlan | None:
        """A step that brings one checkpoint to the lower tiers, the cheapest first; None: the device holds
        none. Not to be called while requests run."""
        cache, tiers = self.prefixes.cache, self.prefixes.tiers
        victim = cache.order.victim(None) if cache is not None else None
        if cache is None or tiers is None or victim is None:
            return None
        self._step = StepDraft()
        cache.evict(victim)
        stores, loads = tiers.take()
        moves = self._holdings.compactor.take()
        return self._step.plan._replace(moves=moves, stores=stores, loads=loads)

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """A `Holder`: requests and the plan in the making learn the new ids of entries."""
        self._step.moved(name, targets)
        self._same = None
        return sum(request.moved(name, targets) for request in self.requests.values())

    def launched(self, plan: StepPlan) -> None:
        """Note that `plan` is on its way: states and pages will stand for what it computes. After a step that
        could not be started, finish the requests of its spans and swaps instead."""
        self._out.append(plan)
        if self.prefixes.tiers is not None:
            self.prefixes.tiers.launched()
        if plan.page_copies:
            self.prefixes.copied(self.requests[started] for started in self._step.started)
        dealt, records = self._step.dealt, self._arena.layout.recorded(plan.decode_rows)
        assert dealt.rows is plan.rows, "this is not the plan that was written last"
        self._arena.advance_all(plan.rows.slots, records)
        for request in dealt.requests:
            request.computed += 1
            request.tokens.append(UNKNOWN)
        for row, request in enumerate(() if dealt.plain else dealt.requests):
            self._kept_in(request, plan.rows.span(row))
        for span in plan.others:
            request = self.requests[span.request_id]
            request.computed = end = span.end
            if is_decode(span):
                self._arena.advance_all((span.slot_out,), records)
            elif span.slot_out >= 0:
                self._arena.commit(span.slot_out, end)
            self._kept_in(request, span)
            if span.all_logits:
                request.scored = end
            if span.sampling is not None:
                request.tokens.append(UNKNOWN)

    def update(self, plan: StepPlan, tokens: Mapping[int, int]) -> None:
        """Note that `plan`, the oldest that is out, has run. `tokens` names the token drawn for every span
        with `sampling`.

        Requests that were finished meanwhile need no token. After a step that failed, finish the requests
        of its spans and swaps, then call this with no tokens.
        """
        assert self._out and plan is self._out[0], "this is not the oldest plan that is out"
        self._out.pop(0)
        find, rows = self.requests.get, plan.rows
        for id_, start in zip(rows.request_ids, rows.starts, strict=True):
            request = find(id_)
            if request is not None:
                request.tokens[start + 1] = tokens[id_]
        for span in plan.others:
            request = find(span.request_id)
            if request is not None and span.sampling is not None:
                request.tokens[span.end] = tokens[request.id]
        self.prefixes.settled(id_ for plan in self._out for id_ in plan.request_ids)

    # Phases of a step

    def _grow(self, step: StepDraft) -> None:
        """Give every running request the page of its next token; where none is left checkpoints go, then
        what was reserved for them, then the last requests give way."""
        for request in self._holdings.short_of_pages(self._running):
            while request.status is Status.RUNNING and not self._holdings.grow(request, self._make_room):
                if not self.prefixes.drop_reserved(self._running):
                    self._preempt(step, self._running[-1])

    def _admit(self, step: StepDraft) -> None:
        """Start or resume waiting requests as long as there is room.

        One that gave way in this step may come back in it, where the move has joined scattered free memory.
        """
        for entry in self._admission.decide(step.started):
            if entry is None:
                self._preempt(step, self._running[-1])
            else:
                self._start(step, *entry)

    def _make_room(self, need: Mapping[str, int]) -> bool:
        return self._room.make(need, self._running)

    def _start(self, step: StepDraft, request: Request, leader: Request | None, hit: Hit | None) -> None:
        """Give a waiting or swapped request its memory and let it run."""
        self._waiting.remove(request)
        self._same = None
        step.started.add(request.id)
        shared = (
            self._holdings.shareable(leader) if hit is None else hit.pages[: len(hit.pages) - hit.partial]
        )
        self._holdings.take(request, shared)
        if request.status is Status.SWAPPED:
            if request.slot >= 0:
                self._arena.commit(request.slot, request.computed)
            step.plan.swap_in.append(self._holdings.swap_in_of(request))
        elif leader is not None:
            assert (leader.prompt_ids, leader.priority) == (request.prompt_ids, request.priority)
            request.leave_family()
            request.computed = leader.computed
            self.prefixes.begin_as_member(request, leader)
            step.forks[request.id] = leader.state_slot
            step.held.add(leader.id)
            if request.pages and leader.computed % self._holdings.page_size:
                at = len(shared)  # the page that is partly filled
                step.plan.page_copies.append(PageCopy(leader.pages[at], request.pages[at]))
        else:
            copy = self.prefixes.begin(request, hit)
            if copy is not None:
                step.plan.page_copies.append(copy)
            if request.family is not None:
                request.family.unstarted -= 1
                request.family.leader = request
        request.status = Status.RUNNING
        self._running.insert(request)

    def _preempt(self, step: StepDraft, request: Request) -> None:
        """Take a running request's memory; it waits at its place, its state in host memory or gone."""
        self._running.remove(request)
        self._same = None
        request.leave_family()
        swap = (
            request.computed > 0
            and not self._recompute_cheaper(request.computed)
            and self._holdings.reserve_swap(request)
        )
        if swap:
            step.plan.swap_out.append(self._holdings.swap_out_of(request))
            request.status = Status.SWAPPED
        else:
            request.computed = 0
            request.status = Status.WAITING
        self.prefixes.release(request)
        self._holdings.release(request)
        self._preemptions["swap" if swap else "recompute"] += 1
        request.preemptions += 1
        self._waiting.insert(request)

    def _dissolve_families(self, dealt: Dealt) -> None:
        """A leader that goes past the fork point in this step leads no longer."""
        ends = [(request, request.computed + 1) for request in (() if dealt.plain else dealt.requests)]
        ends += [(self.requests[span.request_id], span.end) for span in dealt.spans]
        for request, end in ends:
            if request.family is not None and end > request.fork_point:
                request.leave_family()

    def _kept_in(self, request: Request, span: Span) -> None:
        """What the cache keeps of a span that is on its way."""
        if request.reuse is not None and not request.reuse.idle:
            self.prefixes.launched(request, span)

    # Reports

    def cached_tokens(self, request_id: int) -> int:
        """Prompt tokens that a running request did not have to compute."""
        reuse = self.requests[request_id].reuse
        return 0 if reuse is None else reuse.cached

    def stats(self) -> dict[str, int]:
        """Requests running, waiting and swapped now, and how often one was preempted either way so far."""
        swapped = sum(request.status is Status.SWAPPED for request in self._waiting)
        return {
            "running": len(self._running),
            "waiting": len(self._waiting) - swapped,
            "swapped": swapped,
            "preempted_swap": self._preemptions["swap"],
            "preempted_recompute": self._preemptions["recompute"],
        }

    def check(self) -> None:
        """Raises AssertionError when queues, requests and memory do not agree. Not to be called between
        `schedule` and the plan's launch."""
        self._holdings.check(self.requests.values(), self.prefixes.held())
        self.prefixes.check()
        assert len(self._running) <= self.config.max_running
        assert len(self._running) + len(self._waiting) == len(self.requests)
        for queue, statuses in (
            (self._running, {Status.RUNNING}),
            (self._waiting, {Status.WAITING, Status.SWAPPED}),
        ):
            keys = [request.key for request in queue]
            assert keys == sorted(keys), "a queue has lost its order"
            for request in queue:
                assert self.requests.get(request.id) is request
                assert request.status in statuses, f"{request.id} is {request.status}, in the wrong queue"
                assert request.computed < len(request.tokens)
                assert request.computed == 0 or request.status is not Status.WAITING
                unknown = request.tokens.count(UNKNOWN)
                assert unknown <= len(self._out), f"{request.id} waits for more tokens than there are steps"
                if request.slot >= 0:
                    self._arena.expect(request.state_slot, request.computed)
        unstarted = Counter(request.family for request in self._waiting if request.family is not None)
        for family in {request.family for request in self.requests.values() if request.family is not None}:
            assert family.unstarted == unstarted[family], "a family has lost count of its members"
            leader = family.leader
            assert leader is None or (leader.status is Status.RUNNING and leader.family is family)
