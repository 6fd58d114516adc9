"""A runner without a model: it carries out step plans on memory whose content shows every mistake.

A slot holds the hash chain of the tokens applied to it, a page the (position, token) pairs written to it.
A token is drawn by hashing the state that a span has read together with all positions that its pages
show, and what nobody may read is poisoned. So any wrong slot, page, order or length changes the tokens,
and the right ones follow from the request alone (`expected_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy as copied
from functools import partial
from itertools import count
from typing import Any

from denim.cache.eviction import Worth
from denim.cache.lower_tiers import LowerTiers, Sources
from denim.cache.positions import POLICIES, Grid
from denim.cache.prefix_cache import HasRoom, Namespace, PrefixCache
from denim.cache.spacing import OverlapDepths
from denim.cache.tier import Tier
from denim.cache.tree import PrefixTree
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.swap import SwapSpace
from denim.memory.transfer import Transfer
from denim.runner.plan import Span, StepPlan
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.request import UNKNOWN, Family, Request, Status
from denim.scheduler.reuse import Reuse
from denim.scheduler.scheduler import Scheduler
from tests.cache.orders import ORDERS
from tests.memory.layouts import PAGE_SIZE, make_layout

VOCABULARY = 97


def chain(state: int, token: int) -> int:
    return hash((state, token))


def draw(state: int, written: tuple[tuple[int, int], ...], seed: int) -> int:
    return hash((state, written, seed)) % VOCABULARY


def expected_tokens(prompt: list[int], n: int, seed: int) -> list[int]:
    """The first n tokens after `prompt`, computed directly."""
    tokens, state = list(prompt), 0
    for token in prompt:
        state = chain(state, token)
    for _ in range(n):
        tokens.append(draw(state, tuple(enumerate(tokens)), seed))
        state = chain(state, tokens[-1])
    return tokens[len(prompt) :]


def output_of(request: Request) -> list[int]:
    """The tokens that were drawn for it, or are still to be."""
    return request.tokens[request.num_prompt :].tolist()


def open_toy_cache(
    arena: Arena, has_room: HasRoom, policy: str, order: str, now: Callable[[], float]
) -> PrefixCache:
    """A cache with small grids."""
    page, slot = arena.layout.stride(PAGE), arena.layout.stride(SLOT)
    tree = PrefixTree(arena, ids_limit=500)
    worth = Worth(tree, lambda tokens: tokens + tokens**2 / 100, page, slot)
    chosen = ORDERS[order](worth, now)
    grid = Grid(8, 32, 1, OverlapDepths(20))
    return PrefixCache(arena, tree, chosen, POLICIES[policy], grid, worth.flops, has_room)


class ToyHost:
    """Host memory of such content. What is loaded arrives `delay` steps after the step that begins it, and
    whatever reads its entries before that finds nothing there."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.content: dict[int, Any] = {}
        self.landing: list[tuple[int, int, Callable[[], None]]] = []  # steps to go, key, what then happens
        self.there: set[int] = set()

    def free(self, ids: list[int]) -> None:
        for entry in ids:
            self.content.pop(entry, None)

    def step(self) -> None:
        due = [one for one in self.landing if one[0] <= 0]
        self.landing = [(left - 1, key, land) for left, key, land in self.landing if left > 0]
        for _, key, land in due:
            land()
            self.there.add(key)

    def arrived(self, key: int) -> bool:
        if key not in self.there:
            return False
        self.there.remove(key)
        return True

    def join(self) -> None:
        for _, key, land in self.landing:
            land()
            self.there.add(key)
        self.landing.clear()


def open_toy_tiers(
    cache: PrefixCache,
    sources: Sources,
    host: ToyHost,
    host_bytes: int,
    order: str,
    now: Callable[[], float],
) -> LowerTiers:
    """A host tier for which everything pays."""
    tier = Tier(
        "host",
        cache.arena.layout,
        host_bytes,
        500,
        lambda tokens: tokens + tokens**2 / 100,
        lambda worth: ORDERS[order](worth, now),
        host.free,
    )
    return LowerTiers(cache, tier, host, lambda start, end, nbytes, tier: True, sources)


class ToyEngine:
    """Scheduler and toy runner together, with the checks that every step must pass."""

    def __init__(
        self,
        num_slabs: int = 8,
        swap_bytes: int = 10**9,
        recompute_below: int = 0,
        layout: ArenaLayout | None = None,
        chunk_size: int = 4,
        max_num_seqs: int = 100,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 10_000,
        max_prefill_spans: int | None = None,
        policy: str | None = None,
        order: str = "expected",
        saves_inside: bool = False,
        host_bytes: int = 0,
        delay: int = 0,
    ) -> None:
        """`policy` and `order`: of the prefix cache; None: there is none. `host_bytes`, `delay`: of its host
        tier; 0 bytes: there is none."""
        self.config = SchedulerConfig(
            chunk_size, max_num_seqs, max_num_batched_tokens, max_model_len, max_prefill_spans
        )
        self.retired: list[tuple[str, int]] = []
        self.arena = Arena(
            layout or make_layout(5), num_slabs, lambda name, ids: self.retired.extend((name, i) for i in ids)
        )
        self.swap = SwapSpace(swap_bytes)
        self.host = ToyHost(delay)
        ticks = count()

        def now() -> float:  # the time advances by a second at every look
            return float(next(ticks))

        self.scheduler = Scheduler(
            self.config,
            self.arena,
            self.swap,
            lambda tokens: tokens < recompute_below,
            (lambda has_room: open_toy_cache(self.arena, has_room, policy, order, now)) if policy else None,
            saves_inside,
            (lambda cache, sources: open_toy_tiers(cache, sources, self.host, host_bytes, order, now))
            if host_bytes
            else None,
        )
        self.slots: dict[int, int] = {}  # written ones only
        self.pages: dict[int, dict[int, tuple[int, int]]] = {}  # page -> offset -> (position, token)
        self.requests: dict[int, Request] = {}  # all that were ever accepted
        self.next_id = 0
        self.scored: dict[int, list[int]] = {}  # request -> prompt positions reported, in order
        self.plans: list[StepPlan] = []
        self.drawn: dict[int, int] = {}  # by the last plan that ran
        self.outcomes: list[dict[int, int]] = []  # of plans that are out

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int = 0,
        priority: int = 0,
        family: Family | None = None,
        prompt_logprobs: int | None = None,
        **reuse: Any,
    ) -> Request:
        request = Request(self.next_id, prompt, max_tokens, ("seed", seed), priority, prompt_logprobs, family)
        if self.scheduler.prefixes.cache is not None:
            asked = {"namespace": Namespace(), "store": True, "boundaries": (), "marks": ()}
            request.reuse = Reuse(**asked | reuse)
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.next_id += 1
        self.scheduler.check()
        return request

    def begin(self) -> StepPlan | None:
        """Plan a step and run it. Its outcome is noted by `complete`; one more step may begin before that."""
        before = {id: (request.status, request.remaining) for id, request in self.scheduler.requests.items()}
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.check_plan(plan)
            self.check_order(plan, before)
            self.drawn = self.run(plan)
            self.outcomes.append(self.drawn)
            self.scheduler.launched(plan)
            self.scheduler.check()
        else:
            self.host.step()
        return plan

    def complete(self, plan: StepPlan) -> None:
        """Note what the oldest plan that is out has drawn, and finish who has all its tokens."""
        drawn = self.outcomes.pop(0)
        self.scheduler.update(plan, drawn)
        self.scheduler.check()
        for span in plan.spans:
            request = self.requests[span.request_id]
            last = span.end + 1 == request.num_prompt + request.max_tokens
            if span.sampling is not None and last and self.scheduler.finish(request.id, "length"):
                self.scheduler.check()

    def fail(self, plan: StepPlan) -> None:
        """What an engine does about a step of which no outcome comes back."""
        self.outcomes.pop(0)
        self.scheduler.prefixes.reset()
        for part in (plan.spans, plan.swap_out, plan.swap_in):
            for item in part:
                self.scheduler.finish(item.request_id, "error")
        self.scheduler.update(plan, {})
        self.scheduler.check()

    def shake(self, name: str) -> bool:
        """Have a slab of another class emptied for one of class `name`, whether or not anybody needs it."""
        free = self.arena.stats()[name + "s"]["free"]
        return self.scheduler._holdings.compactor.make_room({name: free + 1})

    def longest_request(self) -> int:
        longest = self.arena.layout.longest_request(self.arena.num_slabs)
        return self.config.max_model_len if longest is None else longest

    def step(self) -> bool:
        plan = self.begin()
        if plan is not None:
            self.complete(plan)
        return plan is not None

    def drain(self, limit: int = 10_000) -> int:
        """Steps until nothing is left to run."""
        for steps in range(limit):
            if not self.step():
                if self.scheduler.requests and self.scheduler.prefixes.awaited:
                    continue
                assert not self.scheduler.requests
                return steps
        raise AssertionError(f"not done after {limit} steps")

    def run(self, plan: StepPlan) -> dict[int, int]:
        for move in plan.swap_out:
            self.swap.put(
                move.request_id, (self.slots.get(move.slot), [dict(self.pages[p]) for p in move.pages])
            )
        for store in plan.stores:
            if store.slot >= 0:
                self.host.content[store.host_slot] = self.slots[store.slot]
            for page, host_page in zip(store.pages, store.host_pages, strict=True):
                self.host.content[host_page] = dict(self.pages[page])
        if plan.moves:
            self.host.join()
        live = {(name, target) for name, _, target in plan.moves}
        self.retired = [entry for entry in self.retired if entry not in live]
        for name, source, target in plan.moves:
            content = self.slots if name == SLOT else self.pages
            content.pop(target, None)
            if source in content:
                content[target] = copied(content[source])  # a page may go to two places, and live on in both
            self.retired.append((name, source))
        for name, entry in self.retired:
            (self.slots if name == SLOT else self.pages).pop(entry, None)
        self.retired.clear()
        for move in plan.swap_in:
            slot, pages = self.swap.take(move.request_id)
            if move.slot >= 0:
                self.slots[move.slot] = slot
            self.pages.update(zip(move.pages, (dict(page) for page in pages), strict=True))
        for copy in plan.page_copies:
            self.pages[copy.target] = dict(self.pages[copy.source])
        self.host.step()
        for load in plan.loads:
            self.host.landing.append((self.host.delay, load.key, partial(self.land, load)))
        if not self.host.delay:
            self.host.step()
        states = [self.read_state(span) for span in plan.spans]  # all are read before any is written
        drawn = {}
        for span, before in zip(plan.spans, states, strict=True):
            state = before
            saves = dict(span.saves)
            assert not saves or span.length > 1 or span.slot_in != span.slot_out, "a decode row saves nothing"
            for position, token in enumerate(self.known(span, span.tokens), span.start):
                state = chain(state, token)
                if position + 1 - span.start in saves:
                    self.slots[saves[position + 1 - span.start]] = state
                if span.pages:
                    page = self.pages.setdefault(span.pages[position // PAGE_SIZE], {})
                    page[position % PAGE_SIZE] = (position, token)
            if span.slot_out >= 0:
                self.slots[span.slot_out] = state
            if span.all_logits:
                self.report(span)
            if span.sampling is not None:
                seen = self.written(span)
                if span.slot_out < 0:  # a model without state: the pages are all there is
                    state = 0
                    for _, token in seen:
                        state = chain(state, token)
                drawn[span.request_id] = draw(state, seen, span.sampling[1])
        return drawn

    def land(self, load: Transfer) -> None:
        if load.slot >= 0:
            self.slots[load.slot] = self.host.content[load.host_slot]
        for page, host_page in zip(load.pages, load.host_pages, strict=True):
            self.pages[page] = dict(self.host.content[host_page])

    def read_state(self, span: Span) -> int:
        if span.slot_in < 0:
            assert span.start == 0 or span.slot_out < 0
            return 0
        return self.slots[span.slot_in]  # KeyError: never written, or poisoned

    def written(self, span: Span) -> tuple[tuple[int, int], ...]:
        if not span.pages:  # a model without attention: take the tokens' word for it
            return tuple(enumerate(self.known(span, self.requests[span.request_id].tokens[: span.end])))
        return tuple(self.pages[span.pages[p // PAGE_SIZE]][p % PAGE_SIZE] for p in range(span.end))

    def known(self, span: Span, tokens: list[int]) -> list[int]:
        """`tokens` of the span's request, with what the last step drew where that is not known yet."""
        return [token if token != UNKNOWN else self.drawn[span.request_id] for token in tokens]

    def report(self, span: Span) -> None:
        """Prompt positions whose following prompt token this span can score."""
        request = self.requests[span.request_id]
        following = [*span.tokens[1:], span.follows]
        for position, token in enumerate(following, span.start):
            if token >= 0:
                assert token == request.tokens[position + 1] and position + 1 < request.num_prompt
                self.scored.setdefault(span.request_id, []).append(position)

    def check_plan(self, plan: StepPlan) -> None:
        """What every plan promises, whatever it is for."""
        config = self.config
        tokens = sum(span.length for span in plan.spans)
        assert 0 < tokens <= config.max_num_batched_tokens or plan.swap_out or plan.loads
        assert len({span.request_id for span in plan.spans}) == len(plan.spans)
        decode = [span.length == 1 and span.start > 0 and span.sampling is not None for span in plan.spans]
        assert decode == sorted(decode, reverse=True), "a decode span behind a prefill segment"
        rows = sum(decode)
        writes = [page for span in plan.spans for page in span.pages[span.start // PAGE_SIZE :]]
        assert len(writes) == len(set(writes)), "two spans write to one page"
        slots = [span.slot_out for span in plan.spans if span.slot_out >= 0]
        slots += [slot for span in plan.spans for _, slot in span.saves]
        assert len(slots) == len(set(slots)), "two spans write to one slot"
        for span in plan.spans:
            request = self.requests[span.request_id]
            assert span.length > 0 and span.start == request.computed
            assert [*span.tokens] == [*request.tokens[span.start : span.end]]
            assert (span.sampling is not None) == (span.end == len(request.tokens))
            if self.arena.layout.has(PAGE):
                assert len(span.pages) == -(-span.end // PAGE_SIZE)
            for place, page in enumerate(span.pages[span.start // PAGE_SIZE :]):
                # Of a page whose first tokens stand before the span others may read those: the cache, and
                # who begins from it in this step, before the span writes.
                readers = self.readers(page) if span.start % PAGE_SIZE and place == 0 else 0
                assert self.arena.holders(PAGE, page) == 1 + readers, "a span writes to a shared page"
            if span.slot_in != span.slot_out and span.slot_in >= 0:
                assert span.slot_in not in slots, "a slot is read by one span and written by another"
            on_grid = (
                span.end % config.chunk_size == 0
                or span.end in (request.num_prompt - 1, request.scored)
                or span.slot_out != request.slot  # a checkpoint's
            )
            if span.end < len(request.tokens) and not on_grid:
                assert config.max_num_batched_tokens - rows < config.chunk_size, "cut off the grid"

    def check_order(self, plan: StepPlan, before: dict[int, tuple[Status, int]]) -> None:
        """Nobody is overtaken, nobody starves."""
        alive = self.scheduler.requests
        running = sorted((r for r in alive.values() if r.status is Status.RUNNING), key=lambda r: r.key)
        waiting = sorted((r for r in alive.values() if r.status is not Status.RUNNING), key=lambda r: r.key)
        admitted = [r for r in running if before[r.id][0] is not Status.RUNNING]
        waiting = [r for r in waiting if not self.waits_for_a_tier(r)]  # the others let everybody pass
        preempted = [r for r in waiting if before[r.id][0] is Status.RUNNING]
        if admitted and waiting:
            assert admitted[-1].key < waiting[0].key, "a waiting request was overtaken"
        if preempted and running:
            assert running[-1].key < preempted[0].key, "another than the last in the order gave way"
        forked = {a.computed for a in admitted if a.computed == a.fork_point > 0}
        serviced = {span.request_id for span in plan.spans}
        for place, request in enumerate(running):
            decoding = before[request.id][1] == 1 and request.computed > 0
            held = request.family is not None and request.computed in forked
            if (decoding or place == 0) and not held and not request.exhausted:
                assert request.id in serviced, f"request {request.id} was passed over"

    def waits_for_a_tier(self, request: Request) -> bool:
        tiers, reuse = self.scheduler.prefixes.tiers, request.reuse
        if tiers is None or reuse is None or request.status is not Status.WAITING:
            return False
        hit = self.scheduler.prefixes.find(request)
        return hit is not None and tiers.is_coming(reuse.namespace, request.known, hit.position)

    def readers(self, page: int) -> int:
        begin = sum(r.reuse is not None and r.reuse.source == page for r in self.scheduler.requests.values())
        return begin + self.scheduler.prefixes.held()[PAGE][page]

    def check_empty(self) -> None:
        """Nothing is left allocated anywhere, once the cache is emptied."""
        self.host.join()
        self.scheduler.prefixes.arrive()
        self.scheduler.check()
        self.scheduler.prefixes.reset()
        self.scheduler.check()
        assert not self.host.content, "host memory is held by nobody"
        stats = self.arena.stats()
        assert all(counts["used"] == 0 for counts in stats.values()), stats
        assert self.swap.used_bytes == 0

    def check_exact(self) -> None:
        """Every request has just the tokens that it has alone, however far it came."""
        for request in self.requests.values():
            seed = request.sampling[1]
            output = [token for token in output_of(request) if token != UNKNOWN]
            assert output == expected_tokens(request.prompt_ids, len(output), seed)
            done = request.finish_reason == "length"
            assert not done or request.num_output == request.max_tokens
            scored = self.scored.get(request.id, [])
            if request.prompt_logprobs is None:
                assert not scored
            else:
                assert scored == list(range(len(scored)))
                assert not done or len(scored) == request.num_prompt - 1
