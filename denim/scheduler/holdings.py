"""What a request holds: its slot and pages in the arena, its place in swap space.

Owns the moves between request, arena and swap space. Decides nothing: who gets memory, and when, is the
scheduler's business. A model without attention has no pages, one without linear layers no slots.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from denim.errors import RequestError
from denim.ledger.units import plural
from denim.memory.arena import Arena
from denim.memory.compaction import Compactor
from denim.memory.layout import PAGE, SLOT
from denim.memory.swap import SwapSpace
from denim.runner.plan import Swap
from denim.scheduler.request import Request, Status

MakeRoom = Callable[[Mapping[str, int]], bool]
"""Whether so many entries of each class can be allocated now, after whatever it takes."""


class Holdings:
    def __init__(self, arena: Arena, swap: SwapSpace) -> None:
        self.arena = arena
        self.compactor = Compactor(arena)
        self.swap = swap
        self.page_size = arena.layout.page_size
        self.has_pages = arena.layout.has(PAGE)
        self.has_slots = arena.layout.has(SLOT)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size) if self.has_pages else 0

    def require_fit(self, tokens: int, asked: str) -> None:
        """Raises RequestError, beginning with `asked`, when `tokens` tokens do not fit an empty arena."""
        layout, num_slabs = self.arena.layout, self.arena.num_slabs
        need = layout.need(tokens)
        slabs = layout.slabs_for(need)
        if slabs > num_slabs:
            entries = " and ".join(f"{n} {plural(name, n)}" for name, n in need.items())
            raise RequestError(
                f"{asked} need {entries}, which is {slabs} slabs; the arena has {num_slabs}, enough for "
                f"{layout.longest_request(num_slabs)} tokens; shorten the prompt, lower max_tokens or raise "
                "memory"
            )

    def has_room(self, tokens: int, shared: int, headroom: int, make_room: MakeRoom) -> bool:
        """Whether `make_room` finds room for a request of so many known tokens, `shared` of its pages
        existing already, with `headroom` pages still free then."""
        need = {SLOT: 1} if self.has_slots else {}
        if self.has_pages:
            need[PAGE] = self.pages_for(tokens) - shared + headroom
        return make_room(need)

    def shareable(self, leader: Request | None) -> Sequence[int]:
        """The leader's pages that are full at the fork point: nobody writes to them any more."""
        return leader.pages[: leader.computed // self.page_size] if leader is not None else []

    def take(self, request: Request, shared: Sequence[int]) -> None:
        """Give the request a slot and the pages of its known tokens, the first of them shared ones."""
        own = self.arena.alloc_many(PAGE, self.pages_for(len(request.tokens)) - len(shared))
        slot = self.arena.alloc(SLOT) if self.has_slots else -1
        assert own is not None and slot is not None, "taken without room"
        if shared:
            self.arena.share(PAGE, shared)
        request.pages = array("i", [*shared, *own])
        request.slot = slot

    def short_of_pages(self, requests: Iterable[Request]) -> list[Request]:
        """Those whose next token has no page yet: one in `page_size` decode rows a step."""
        size = self.page_size
        if not self.has_pages:
            return []
        return [r for r in requests if len(r.pages) * size < len(r.tokens) and not r.exhausted]

    def grow(self, request: Request, make_room: MakeRoom) -> bool:
        """Add the pages that the known tokens lack; False when `make_room` finds none."""
        while len(request.pages) < self.pages_for(len(request.tokens)):
            if not make_room({PAGE: 1}):
                return False
            request.pages.extend(self.arena.alloc_many(PAGE, 1) or ())
        return True

    def release(self, request: Request) -> None:
        """Give back slot and pages; shared pages live on with their other holders."""
        if request.pages:
            self.arena.release(PAGE, request.pages)
            request.pages = array("i")
        if request.slot >= 0:
            self.arena.release(SLOT, [request.slot])
            request.slot = -1

    def reserve_swap(self, request: Request) -> bool:
        """Set aside host memory for all that the request has computed, shared pages included."""
        return self.swap.reserve(request.id, self.arena.layout.request_bytes(request.computed))

    def swap_in_of(self, request: Request) -> Swap:
        """The way back of what is computed; pages beyond that hold nothing."""
        pages = request.pages[: self.pages_for(request.computed)]
        return Swap(request.id, request.slot, pages, request.computed)

    def swap_out_of(self, request: Request) -> Swap:
        """The way to the host, from where everything lies before this step's moves."""
        swap = self.swap_in_of(request)
        pending, slot = 0, request.state_slot
        if slot >= 0:
            pending = self.arena.tag(slot).pending
            self.arena.flushed(slot)
            slot = self.compactor.sources(SLOT, [slot])[0]
        return swap._replace(slot=slot, pages=self.compactor.sources(PAGE, swap.pages), pending=pending)

    def check(self, requests: Iterable[Request], cached: Mapping[str, Counter[int]]) -> None:
        """Raises AssertionError unless exactly these requests and a cache that holds `cached` account for all
        that is held."""
        self.arena.check()
        self.swap.check()
        pages, slots = Counter(cached[PAGE]), Counter(cached[SLOT])
        swapped_bytes = 0
        for request in requests:
            pages.update(request.pages)
            if request.slot >= 0:
                slots[request.slot] += 1
            if request.reuse is not None:
                assert request.reuse.source < 0, f"{request.id} copies a page outside of a step"
                slots.update(slot for slot in (request.reuse.state, *request.reuse.reserved) if slot >= 0)
            if self.swap.holds(request.id):
                swapped_bytes += self.arena.layout.request_bytes(request.computed)
            if request.status is Status.RUNNING:
                assert len(request.pages) >= self.pages_for(request.computed), f"{request.id} lacks pages"
                assert (request.slot >= 0) == self.has_slots, f"{request.id} runs without a slot"
            elif request.status is not Status.FINISHED:
                assert not request.pages and request.slot < 0, f"{request.id} waits with memory"
                assert self.swap.holds(request.id) == (request.status is Status.SWAPPED)
        assert self.swap.used_bytes == swapped_bytes, "swap space is held by nobody"
        stats = self.arena.stats()
        for name, held in ((PAGE, pages), (SLOT, slots)):
            for entry, holders in held.items():
                assert self.arena.holders(name, entry) == holders, f"{name} {entry}: wrong number of holders"
            if self.arena.layout.has(name):
                assert stats[name + "s"]["used"] == len(held), f"a {name} is held by nobody"
