"""Memory whose content shows every mistake, for tests of the prefix cache.

A slot holds the tokens that were applied to it, a page the (position, token) pairs written to it; freed
entries hold nothing. So whatever a hit hands out can be compared with what it stands for.
"""

from __future__ import annotations

from collections.abc import Hashable

from denim.cache.eviction import Worth
from denim.cache.node import Tokens, as_tokens
from denim.cache.positions import POLICIES, PROMPT_END, Grid
from denim.cache.prefix_cache import Hit, Lease, Namespace, PrefixCache
from denim.cache.spacing import OverlapDepths
from denim.cache.tree import PrefixTree
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from tests.cache.orders import ORDERS
from tests.memory.layouts import PAGE_SIZE, make_layout


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Running:
    """A request: what it began from and what it has computed."""

    def __init__(self, namespace: Namespace, tokens: Tokens, hit: Hit, lease: Lease) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.hit = hit
        self.lease = lease
        self.computed = hit.position
        self.pages: list[int] = []
        self.slot = -1


class World:
    """A cache over such memory, and requests that use it as the engine does."""

    def __init__(
        self,
        num_slabs: int = 12,
        policy: str = "auto",
        order: str = "expected",
        layout: ArenaLayout | None = None,
        ids_limit: int = 1000,
    ) -> None:
        self.layout = layout or make_layout()
        self.clock = Clock()
        self.arena = Arena(self.layout, num_slabs, self._freed)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.pages: dict[int, dict[int, tuple[int, int]]] = {}
        self.saved: dict[int, tuple[Hashable, tuple[int, ...]]] = {}  # the oracle: slot -> what it stands for
        tree = PrefixTree(self.arena, ids_limit)
        page, slot = self.layout.stride(PAGE), self.layout.stride(SLOT)
        worth = Worth(tree, lambda tokens: tokens + tokens**2 / 100, page, slot)
        self.order = ORDERS[order](worth, self.clock)
        self.cache = PrefixCache(
            self.arena,
            tree,
            self.order,
            POLICIES[policy],
            Grid(8, 64, 1, OverlapDepths(64)),
            worth.flops,
            self.arena.can_alloc,
        )

    def _freed(self, name: str, ids: list[int]) -> None:
        for entry in ids:
            (self.slots if name == SLOT else self.pages).pop(entry, None)
            if name == SLOT:
                self.saved.pop(entry, None)

    # A request's life

    def begin(self, tokens: list[int], namespace: Namespace = Namespace()) -> Running | None:  # noqa: B008
        """Find, check what was found, and take memory; None when there is not enough of it."""
        ids = as_tokens(tokens)
        cache, arena = self.cache, self.arena
        hit = cache.find(namespace, ids)
        self.check_hit(hit, namespace, ids)
        full = len(hit.pages) - hit.partial
        need = {SLOT: 1} if self.layout.has(SLOT) else {}
        if self.layout.has(PAGE):
            need[PAGE] = -(-len(tokens) // PAGE_SIZE) - full
        arena.share(PAGE, hit.pages) if hit.pages else None
        if not cache.make_room(need, keep=hit.node):
            arena.release(PAGE, hit.pages) if hit.pages else None
            return None
        request = Running(namespace, ids, hit, cache.begin(hit, ids))
        own = arena.alloc_many(PAGE, need[PAGE]) if PAGE in need else []
        assert own is not None
        if hit.partial:
            self.pages[own[0]] = dict(self.pages[hit.pages[-1]])
            arena.release(PAGE, hit.pages[-1:])
        request.pages = hit.pages[:full] + own
        if SLOT in need:
            slot = arena.alloc(SLOT)
            assert slot is not None
            request.slot = slot
            if hit.position:
                self.slots[slot] = self.slots[hit.slot]
                arena.commit(slot, hit.position)
        return request

    def compute(self, request: Running, end: int) -> None:
        """Apply tokens up to `end`."""
        for position in range(request.computed, end):
            token = request.tokens[position]
            if request.pages:
                page = request.pages[position // PAGE_SIZE]
                self.pages.setdefault(page, {})[position % PAGE_SIZE] = (position, token)
            if request.slot >= 0:
                self.slots[request.slot] = (*self.slots.get(request.slot, ()), token)
        request.computed = end
        if request.slot >= 0:
            self.arena.commit(request.slot, end)

    def save(self, request: Running, kind: str = PROMPT_END) -> bool:
        """A copy of the state as it is now becomes a checkpoint, if there is room."""
        head = request.tokens[: request.computed]
        slot = self.cache.reserve(request.namespace, head, kind)
        if slot is None:
            return False
        self.slots[slot] = self.slots[request.slot]
        self.arena.commit(slot, request.computed)
        self.saved[slot] = (request.namespace, tuple(head))
        kept = self.cache.save(request.namespace, head, request.pages, slot, kind, request.lease)
        if kept is None:
            self.arena.release(SLOT, [slot])
        return kept is not None

    def finish(self, request: Running, donate: bool) -> bool:
        """The end; the slot becomes a checkpoint if `donate` and none stands there."""
        head = request.tokens[: request.computed]
        kept = None
        if donate and request.computed:
            kept = self.cache.save(
                request.namespace, head, request.pages, request.slot, "generation end", request.lease
            )
            if kept is not None and request.slot >= 0:
                self.saved[request.slot] = (request.namespace, tuple(head))
        self.cache.remember(request.namespace, request.tokens, request.lease)
        if request.slot >= 0 and kept is None:
            self.arena.release(SLOT, [request.slot])
        if request.pages:
            self.arena.release(PAGE, request.pages)
        self.cache.end(request.lease)
        return kept is not None

    def run(self, tokens: list[int], saves: tuple[int, ...] = (), namespace: Namespace = Namespace()) -> int:  # noqa: B008
        """One request from begin to end; returns the position that it began from."""
        request = self.begin(tokens, namespace)
        assert request is not None
        for position in saves:
            if position > request.computed:
                self.compute(request, position)
                self.save(request)
        self.compute(request, len(tokens))
        self.finish(request, donate=True)
        return request.hit.position

    # What must be true

    def check_hit(self, hit: Hit, namespace: Namespace, tokens: Tokens) -> None:
        """The hit is the longest proper prefix among all checkpoints that stand, and its memory holds it."""
        heads = [
            saved for space, saved in self.saved.values() if space == namespace and len(saved) < len(tokens)
        ]
        fitting = [len(saved) for saved in heads if tuple(tokens[: len(saved)]) == saved]
        if self.layout.has(SLOT):
            assert hit.position == max(fitting, default=0)
        if hit.position and self.layout.has(SLOT):
            assert self.slots[hit.slot] == tuple(tokens[: hit.position])
            self.arena.expect(hit.slot, hit.position)
        if self.layout.has(PAGE):
            assert len(hit.pages) == -(-hit.position // PAGE_SIZE)
            for position in range(hit.position):
                content = self.pages[hit.pages[position // PAGE_SIZE]]
                assert content[position % PAGE_SIZE] == (position, tokens[position])

    def check(self, running: list[Running] = []) -> None:  # noqa: B006
        """The cache's invariants, and that tree and requests account for everything that is held."""
        self.cache.check()
        self.arena.check()
        held = self.cache.tree.held()
        for request in running:
            held[PAGE].update(request.pages)
            if request.slot >= 0:
                held[SLOT][request.slot] += 1
        for name, entries in held.items():
            if self.layout.has(name):
                for entry, times in entries.items():
                    assert self.arena.holders(name, entry) == times
                assert self.arena.stats()[name + "s"]["used"] == len(entries), f"a {name} is held by nobody"
        standing = {
            node.checkpoint.slot for node in self.cache.tree.nodes() if node.checkpoint is not None
        } - {-1}
        assert standing == set(self.saved)
