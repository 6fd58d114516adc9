"""Who of the waiting begins in this step, and from what.

Owns the judgement of the first in the order: a seat, memory, tokens left in the step, a prefix that is worth
waiting for. Making room may evict checkpoints, and prefixes are had brought up from lower tiers; queues and
requests are changed by who carries the decisions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

from denim.cache.node import Node
from denim.cache.prefix_cache import Hit
from denim.memory.layout import PAGE, SLOT
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.holdings import Holdings
from denim.scheduler.prefixes import Prefixes
from denim.scheduler.queue import RequestQueue
from denim.scheduler.request import Request, Status
from denim.scheduler.room import Room

LOOK_AHEAD = 16
"""Waiting requests whose prefixes are brought up from lower tiers while they wait."""


class Entry(NamedTuple):
    """A request for which there is room now. It begins from the state of its family's `leader`, from `hit`,
    or, where both are None, from nothing or from what was swapped out."""

    request: Request
    leader: Request | None
    hit: Hit | None


class Admission:
    """Reads the queues `waiting` and `running` as they are whenever it is asked."""

    def __init__(
        self,
        config: SchedulerConfig,
        holdings: Holdings,
        room: Room,
        prefixes: Prefixes,
        waiting: RequestQueue,
        running: RequestQueue,
    ) -> None:
        self._config = config
        self._holdings = holdings
        self._room = room
        self._prefixes = prefixes
        self._waiting = waiting
        self._running = running

    def decide(self, started: Collection[int]) -> Iterator[Entry | None]:
        """What happens in this step, one after the other: an `Entry` starts or resumes, None: the last
        running request gives way. Each is carried out before the next is asked for. `started`: the requests
        that began in this step so far."""
        passed = 0  # waiting requests, the first in the order, whose prefix is on its way
        while passed < len(self._waiting):
            head = self._waiting[passed]
            leader = head.family.leader if head.family else None
            if leader is not None and (leader.computed < leader.fork_point or leader.id in started):
                return
            seat = len(self._running) < self._config.max_running or self._better_than_last(head)
            if leader is None and seat and self._comes(head):  # without a seat it was looked for once
                passed += 1
                continue
            hit = self._prefixes.find(head) if leader is None and head.status is Status.WAITING else None
            if self._prefixes.awaits(head, hit, self._running):
                return
            room, hit = self._has_room(head, leader, hit)
            if not room and not self._better_than_last(head):
                return
            if self._tokens_before(head, room) >= self._config.max_num_batched_tokens:
                return
            yield Entry(head, leader, hit) if room else None

    def look_ahead(self) -> None:
        """Have what the next requests could begin from brought up while they wait."""
        if self._prefixes.tiers is None:
            return
        for request in islice(self._waiting, LOOK_AHEAD):
            reuse, family = request.reuse, request.family
            if reuse is not None and not reuse.sought and (family is None or family.leader is None):
                self._comes(request)

    def _better_than_last(self, head: Request) -> bool:
        """Whether the last running request gives way to `head` where it must."""
        return len(self._running) > 0 and self._running[-1].priority > head.priority

    def _comes(self, request: Request) -> bool:
        """Whether more of a waiting request's prefix is on its way up than it could begin from now."""
        if self._prefixes.tiers is None or request.status is not Status.WAITING:
            return False
        hit = self._prefixes.find(request)
        return hit is not None and self._prefixes.comes(
            request, hit, lambda need: self._room_to_land(request, hit, need)
        )

    def _room_to_land(self, request: Request, hit: Hit, need: Mapping[str, int]) -> bool:
        """Room for what `request` waits for: beside it the request itself must fit, or others would have left
        for nothing, and a page for each that runs."""
        layout = self._holdings.arena.layout
        ahead, whole = Counter(need), Counter(layout.need(len(request.tokens)))
        if self._holdings.has_pages:
            ahead[PAGE] += len(self._running)
            whole[PAGE] += len(self._running)
        if self._holdings.has_slots:
            whole[SLOT] += 1
        return self._room.is_enough(whole, self._running) and self._make_room(ahead, keep=hit.node)

    def _has_room(self, head: Request, leader: Request | None, hit: Hit | None) -> tuple[bool, Hit | None]:
        """Whether a seat and memory are free for `head`, which shares a leader's full pages or those of
        `hit`; and what it can begin from now: making room may move the hit, or take it if nothing else helps.
        """
        running = len(self._running)
        if running >= self._config.max_running:
            return False, hit
        tokens = len(head.tokens)
        while hit is not None and hit.position:
            shared = len(hit.pages) - hit.partial
            beside_hit = partial(self._make_room, keep=hit.node)
            if self._holdings.has_room(tokens, shared, running, beside_hit):
                return True, self._prefixes.find(head)
            without = partial(self._room.is_enough, running=self._running)
            if not self._holdings.has_room(tokens, 0, running, without) or not self._room.give_up(hit):
                return False, hit
            hit = self._prefixes.find(head)
        shared = len(self._holdings.shareable(leader))
        room = self._holdings.has_room(tokens, shared, running, self._make_room)
        return room, self._prefixes.find(head) if hit is not None else None

    def _make_room(self, need: Mapping[str, int], keep: Node | None = None) -> bool:
        return self._room.make(need, self._running, keep)

    def _tokens_before(self, head: Request, room: bool) -> int:
        """Tokens that this step owes to others before `head`: decode rows, and prefill ahead of it. Without
        `room` the last running request gives way to it, and is owed nothing."""
        stay = islice(self._running, len(self._running) - (not room))
        return sum(r.remaining for r in stay if not r.exhausted and (r.key < head.key or r.remaining == 1))
