"""Between scheduler and prefix cache: what a request begins from, and what it leaves behind.

Owns the moves of entries between requests and the cache. Decides nothing about order or admission; which
positions are wanted, and what is worth keeping, the cache says. Without a cache every question has the answer
of an empty one.

Checkpoints inside a prompt cost no copy: kernels write them in the middle of a segment (`Span.saves`); where
the plain forms run, the segment ends at a wanted position and writes its state to the checkpoint's slot, and
the next span reads it there (`denim.scheduler.reuse.Reuse.state`).
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from typing import Any

from denim.cache.account import Account
from denim.cache.landing import MakeRoom
from denim.cache.lower_tiers import LowerTiers
from denim.cache.node import Node, tokens_of
from denim.cache.positions import GENERATION_END, JUNCTION, Sighting, Wanted
from denim.cache.prefix_cache import Hit, Lease, Namespace, PrefixCache
from denim.cache.tree import common_length
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT
from denim.runner.plan import PageCopy, Span
from denim.scheduler.request import Request
from denim.scheduler.reuse import Reuse

MOST_LOADS = 4
"""How often something may come up from a lower tier for one request before it begins from what is there:
where memory is so short that others take the place again each time, it must not wait for ever."""


class Prefixes:
    """`chunk_size`: a shared part must save at least so many tokens for a request to wait for it.
    `saves_inside`: the runner can write states in the middle of a segment (`Span.saves`). `tiers`: those
    below `cache`; None: there are none."""

    def __init__(
        self,
        arena: Arena,
        cache: PrefixCache | None,
        chunk_size: int,
        saves_inside: bool,
        tiers: LowerTiers | None,
    ) -> None:
        self.cache = cache
        self.tiers = tiers
        self._arena = arena
        self._chunk_size = chunk_size
        self._saves_inside = saves_inside
        self._has_slots = arena.layout.has(SLOT)
        # What ended requests saved whose last steps are still out.
        self._left: dict[int, tuple[Namespace, list[Node]]] = {}

    def arrive(self) -> None:
        """Note what has come up from lower tiers since the last call."""
        if self.tiers is not None:
            self.tiers.arrive()

    @property
    def awaited(self) -> bool:
        """Whether anything is on its way up."""
        return self.tiers is not None and self.tiers.awaited

    @property
    def unsettled(self) -> bool:
        """Whether anything is on its way between tiers."""
        return self.tiers is not None and self.tiers.unsettled

    def write_out(self) -> None:
        """Wait until everything in host memory is in files, where there are any."""
        if self.tiers is not None:
            self.tiers.write_out()

    # A request begins

    def reset(self, files: bool = True) -> None:
        """Forget all prefixes; those in files only with `files`."""
        if self.cache is not None:
            self.cache.reset()
        if self.tiers is not None:
            self.tiers.reset(files)

    def find(self, request: Request) -> Hit | None:
        """What a waiting request would begin from; None where it has to compute all of its tokens."""
        reuse = request.reuse
        if self.cache is None or reuse is None or request.prompt_logprobs is not None:
            return None
        return self.cache.find(reuse.namespace, request.known)

    def comes(self, request: Request, hit: Hit, make_room: MakeRoom) -> bool:
        """Whether more than `hit` is on its way up for a waiting request; if there is more in a lower tier,
        and `make_room` finds room for it, it is from now on. Others pass the request meanwhile."""
        reuse = request.reuse
        if self.tiers is None or reuse is None:
            return False
        reuse.sought = True
        ids = request.known
        if self.tiers.is_coming(reuse.namespace, ids, hit.position):
            return True
        if reuse.loads == MOST_LOADS or not self.tiers.bring(reuse.namespace, ids, hit.position, make_room):
            return False
        reuse.loads += 1
        return True

    def awaits(self, request: Request, hit: Hit | None, running: Iterable[Request]) -> bool:
        """Whether a running request is about to compute what this one shares with it: then this one waits,
        and the other saves a checkpoint where their ways part."""
        reuse = request.reuse
        if hit is None or reuse is None or self.cache is None or not self.cache.policy.generation_end:
            return False
        ids = request.known
        for other in running:
            theirs = other.reuse
            if theirs is None or not theirs.store or theirs.namespace != reuse.namespace:
                continue
            if other.key > request.key or other.computed >= other.num_prompt - 1 or theirs.lease is None:
                continue
            known = other.known
            near = slice(hit.position, max(hit.position + self._chunk_size, other.computed + 1))
            if known[near] != ids[near]:
                continue  # nearly always, and at once, where many requests part at the same place
            shared = common_length(known, ids, 0)
            shared = min(shared, len(ids) - 1, other.num_prompt - 1)
            if shared - hit.position < self._chunk_size or shared <= other.computed:
                continue
            if not any(shared - self._chunk_size < wanted.position <= shared for wanted in theirs.wanted):
                new = Wanted(shared, JUNCTION)
                place = bisect(theirs.wanted, new)
                theirs.wanted.insert(place, new)
                self._give_back(theirs, place)
            return True
        return False

    def begin(self, request: Request, hit: Hit | None) -> PageCopy | None:
        """A waiting request has its memory and begins from `hit`, whose full pages it shares. Returns the
        copy of the page that is filled in part."""
        reuse = request.reuse
        if self.cache is None or reuse is None:
            return None
        first = reuse.lease is None
        ids = request.known
        if hit is None:
            reuse.lease = self.cache.lease()
            position, seen = 0, 0
        else:
            stored = self.tiers.reach(reuse.namespace, ids) if first and self.tiers is not None else 0
            reuse.lease = self.cache.begin(hit, ids, counted=first, stored=stored)
            position, seen = hit.position, hit.seen
        if first:
            reuse.cached = min(position, request.num_prompt)
        if reuse.store:
            sighting = Sighting(request.num_prompt, position, seen, reuse.boundaries, reuse.marks)
            reuse.wanted = self.cache.wanted(sighting)
        if hit is None or not position:
            return None
        request.computed = position
        if hit.slot >= 0:
            self._arena.share(SLOT, [hit.slot])
            reuse.state = hit.slot
        if not hit.partial:
            return None
        reuse.source = hit.pages[-1]
        self._arena.share(PAGE, [reuse.source])
        return PageCopy(reuse.source, request.pages[len(hit.pages) - 1])

    def begin_as_member(self, request: Request, leader: Request) -> None:
        """A request begins from the state of its family's leader."""
        if self.cache is not None and request.reuse is not None and leader.reuse is not None:
            request.reuse.lease = self.cache.lease()
            request.reuse.cached = leader.reuse.cached

    # A step

    def reserve(self, running: Iterable[Request], tokens: int) -> None:
        """Take slots for the next wanted checkpoints that are reached within `tokens` tokens. Positions that
        find no memory are wanted no longer."""
        if self.cache is None or not self._has_slots:
            return
        for request in running:
            reuse = request.reuse
            if reuse is not None and len(reuse.reserved) < len(reuse.wanted):
                self._reserve_for(request, reuse, tokens)

    def _reserve_for(self, request: Request, reuse: Reuse, tokens: int) -> None:
        assert self.cache is not None
        while len(reuse.reserved) < (len(reuse.wanted) if self._saves_inside else min(1, len(reuse.wanted))):
            position, kind = reuse.wanted[len(reuse.reserved)]
            if position > request.computed + tokens:
                return
            slot = None
            if position > request.computed:
                slot = self.cache.reserve(reuse.namespace, request.known[:position], kind)
            if slot is None:
                del reuse.wanted[len(reuse.reserved)]
            else:
                reuse.reserved.append(slot)

    def drop_reserved(self, running: Iterable[Request]) -> bool:
        """Give up all slots that were reserved; False when there were none."""
        dropped = False
        for request in running:
            if request.reuse is not None and request.reuse.reserved:
                del request.reuse.wanted[: len(request.reuse.reserved)]
                self._give_back(request.reuse)
                dropped = True
        return dropped

    def copied(self, started: Iterable[Request]) -> None:
        """The page copies of these requests are on their way."""
        for request in started:
            if request.reuse is not None:
                self._release(PAGE, request.reuse, "source")

    def launched(self, request: Request, span: Span) -> None:
        """The request's span is on its way; `computed` is its end already."""
        reuse = request.reuse
        assert self.cache is not None and reuse is not None
        self._release(SLOT, reuse, "state")
        if not self._has_slots:
            while reuse.wanted and reuse.wanted[0].position <= span.end:
                self._save(request, reuse, *reuse.wanted.pop(0), slot=-1)
            return
        for tokens, slot in span.saves:
            self._arena.commit(slot, span.start + tokens)
            if not self._save(request, reuse, *reuse.wanted.pop(0), slot=reuse.reserved.pop(0)):
                self._arena.release(SLOT, [slot])
        if span.slot_out != request.slot:
            reuse.state = reuse.reserved.pop(0)
            if self._save(request, reuse, *reuse.wanted.pop(0), slot=reuse.state):
                self._arena.share(SLOT, [reuse.state])

    def settled(self, out: Iterable[int]) -> None:
        """A step's outcome is known; `out`: the requests of those that are still on their way."""
        if self._left:
            still = set(out)
            self._left = {id_: left for id_, left in self._left.items() if id_ in still}

    # A request ends

    def finish(self, request: Request, reason: str) -> None:
        """Before its memory is given back: what it has computed is kept, its slot as a checkpoint.

        Of a request that failed nothing is kept, nor the checkpoint that it began from: should that be what
        is wrong, nobody else is to fail for it.
        """
        reuse = request.reuse
        if reuse is None or self.cache is None:
            return
        if reason == "error":
            began = reuse.lease.node if reuse.lease is not None else None
            self._discard(reuse.namespace, [*reuse.saved, *([] if began is None else [began])])
        elif reuse.store and reuse.lease is not None and request.computed and self._runs(request):
            self._donate(request, reuse)
            self._left[request.id] = (reuse.namespace, reuse.saved)
        self.release(request)

    def release(self, request: Request) -> None:
        """The request runs no longer, for good or for a while."""
        reuse = request.reuse
        if reuse is None or self.cache is None or reuse.lease is None:
            return
        self._release(PAGE, reuse, "source")
        self._release(SLOT, reuse, "state")
        self._give_back(reuse)
        reuse.wanted = []
        self.cache.end(reuse.lease)
        reuse.lease = Lease(None, reuse.lease.epoch)

    def discard(self, request_id: int) -> None:
        """A request that has ended turns out to have computed nonsense in its last step."""
        if request_id in self._left:
            self._discard(*self._left.pop(request_id))

    def _discard(self, namespace: Namespace, nodes: Iterable[Node]) -> None:
        assert self.cache is not None
        for node in nodes:
            if node.checkpoint is not None:
                self.cache.discard(node)
            if self.tiers is not None:  # it may have gone there already
                self.tiers.discard(namespace, tokens_of(node))

    def _donate(self, request: Request, reuse: Reuse) -> None:
        assert self.cache is not None and reuse.lease is not None
        ids = request.known
        head = ids[: request.computed]
        whole = head and len(head) == request.computed and reuse.state < 0
        if whole and self.cache.policy.generation_end:
            node = self.cache.save(
                reuse.namespace, head, request.pages, request.slot, GENERATION_END, reuse.lease
            )
            if node is not None:
                reuse.saved.append(node)
                request.slot = -1
        self.cache.remember(reuse.namespace, ids, reuse.lease)

    def _runs(self, request: Request) -> bool:
        """Whether the request has its memory; one that waits or is swapped out has none."""
        return bool(request.pages) or request.slot >= 0

    # Reports

    def held(self) -> dict[str, Counter[int]]:
        """{"page", "slot"}: entry -> number of times that the cache holds it, and what comes up for it."""
        if self.cache is None:
            return {PAGE: Counter(), SLOT: Counter()}
        held = self.cache.tree.held()
        if self.tiers is not None:
            for name, entries in self.tiers.held().items():
                held[name].update(entries)
        return held

    def only_cached(self) -> dict[str, int]:
        """Numbers of pages, slots and slabs that only the cache holds. O(entries held)."""
        return {} if self.cache is None else self.cache.only_cached()

    def stats(self) -> dict[str, Any]:
        """See `denim.cache.account.Account.stats`."""
        return Account(float).stats() if self.cache is None else self.cache.stats()

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """{"host", "disk"}, as far as they are there: see `denim.cache.tier.Tier.stats`."""
        return {} if self.tiers is None else self.tiers.stats()

    def check(self) -> None:
        """Raises AssertionError when an invariant of the cache is broken."""
        if self.cache is not None:
            self.cache.check()
        if self.tiers is not None:
            self.tiers.check()

    def _save(self, request: Request, reuse: Reuse, position: int, kind: str, slot: int) -> bool:
        assert self.cache is not None and reuse.lease is not None
        if slot >= 0:
            self._arena.expect(slot, position)
        head = request.known[:position]
        node = self.cache.save(reuse.namespace, head, request.pages, slot, kind, reuse.lease)
        if node is not None:
            reuse.saved.append(node)
        return node is not None

    def _give_back(self, reuse: Reuse, first: int = 0) -> None:
        """Release reserved slots from the `first`-th on."""
        for slot in reuse.reserved[first:]:
            self._arena.release(SLOT, [slot])
        del reuse.reserved[first:]

    def _release(self, name: str, reuse: Reuse, held: str) -> None:
        entry = getattr(reuse, held)
        if entry >= 0:
            self._arena.release(name, [entry])
            setattr(reuse, held, -1)
