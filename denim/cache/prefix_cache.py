"""The prefix cache: what of a new request is known already, and what of it is kept for later ones.

Owns tree, eviction order and account, and the rules that join them. Knows tokens, positions and entries of
the arena; nothing of queues, steps or tensors: whoever calls it copies pages and states.

The rules:

* A request begins from the deepest checkpoint on its path that leaves it at least one token to compute. It
  reads that slot and writes its own; where the position lies inside a page it copies the page first.
* A checkpoint is never written after it was saved.
* Memory that a request needs comes before any checkpoint: `make_room` evicts until it is there.
* A checkpoint is optional: `reserve` evicts only what is worth less, and otherwise says no.
* Who runs holds its pages itself, so that nothing it needs can be evicted under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from denim.cache.account import EVICTED, NO_MEMORY, Account
from denim.cache.eviction import Order
from denim.cache.node import Checkpoint, Node, Tokens
from denim.cache.positions import Grid, Policy, Sighting, Wanted
from denim.cache.tree import PrefixTree, Walk
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT

HasRoom = Callable[[Mapping[str, int]], bool]
"""Whether so many entries of each class can be allocated now."""


class Namespace(NamedTuple):
    """Sequences of different namespaces share nothing, equal tokens or not."""

    salt: str | None = None
    adapter: Hashable = None


class Hit(NamedTuple):
    """What a request of these tokens can begin from.

    position: tokens that need no computing; 0: none. slot: the checkpoint's (-1: none, or no states).
    pages: those of positions 0 .. position. `partial`: the last one is filled in part, to be copied.
    seen: how many of the tokens are known, with or without memory.
    """

    position: int
    slot: int
    pages: list[int]
    partial: bool
    seen: int
    node: Node | None
    walk: Walk


class Lease(NamedTuple):
    """A running request's mark on the path that it began from; to be given back with `end`."""

    node: Node | None
    epoch: int


class PrefixCache:
    """`order` must price the same `tree`. `flops(tokens)`: of a prefill from nothing. `has_room` may
    join scattered free memory.
    """

    def __init__(
        self,
        arena: Arena,
        tree: PrefixTree,
        order: Order,
        policy: Policy,
        grid: Grid,
        flops: Callable[[int], float],
        has_room: HasRoom,
    ) -> None:
        self.tree = tree
        self.order = order
        self.policy = policy
        self.grid = grid
        self.account = Account(flops)
        self.arena = arena
        self.leaving: Callable[[Node], None] | None = None  # told before a checkpoint is evicted
        self._has_room = has_room
        self._page_size = arena.layout.page_size
        self._has_slots = arena.layout.has(SLOT)
        self._has_pages = arena.layout.has(PAGE)
        self._epoch = 0

    # A request begins

    def find(self, namespace: Namespace, tokens: Tokens) -> Hit:
        """The best beginning for a request of `tokens`. Changes and counts nothing."""
        walk = self.tree.walk(namespace, tokens)
        for node in reversed(walk.nodes):
            if node.checkpoint is not None and node.end < len(tokens):
                partial = self._has_pages and node.end % self._page_size != 0
                pages = self.tree.pages_to(node)
                return Hit(node.end, node.checkpoint.slot, pages, partial, walk.seen, node, walk)
        return Hit(0, -1, [], False, walk.seen, None, walk)

    def lease(self) -> Lease:
        """For a request that does not begin from the cache, but may leave something behind."""
        return Lease(None, self._epoch)

    def begin(self, hit: Hit, tokens: Tokens, counted: bool = True, stored: int = 0) -> Lease:
        """A request begins from `hit`, found just now; its path is marked as in use.

        `counted`: whether it is part of the account; a request that begins once more is not. `stored`: the
        position that a lower tier has.
        """
        if counted:
            self.account.note_request(hit.walk.nodes, hit.seen, hit.position, len(tokens), stored)
        if hit.seen and counted:
            self.grid.depths.note(hit.seen)
        self.tree.touch(hit.walk.nodes)
        for node in reversed(hit.walk.nodes):  # the deepest that served, or would have served
            if node.end < len(tokens) and (node is hit.node or node.lost is not None):
                self.order.used(node)
                if node is not hit.node and hit.node is not None:
                    self.order.used(hit.node)
                break
        if hit.node is not None:
            assert hit.node.checkpoint is not None
            hit.node.checkpoint.hits += counted
            for node in (hit.node, *hit.node.ancestors()):
                node.users += 1
        return Lease(hit.node, self._epoch)

    def end(self, lease: Lease) -> None:
        """The request that began with `lease` runs no longer."""
        if lease.node is not None:
            for node in (lease.node, *lease.node.ancestors()):
                node.users -= 1

    def wanted(self, sighting: Sighting) -> list[Wanted]:
        """Positions inside the prompt at which checkpoints should be saved, in order."""
        return self.policy.positions(sighting, self.grid)

    # A request leaves something behind

    def reserve(self, namespace: Namespace, tokens: Tokens, kind: str) -> int | None:
        """A slot for the checkpoint after `tokens`, held once, to be written and then given to `save`.

        None when one stands there already, when there is no memory, or when all that would have to go for
        it is worth more, and nobody takes what goes. Never asked for by models without states.
        """
        node = self.tree.extend(namespace, tokens)
        if node.checkpoint is not None:
            return None
        self.order.offered(node, kind)
        while not self._has_room({SLOT: 1}):
            victim = self.order.victim(keep=None)
            pays = victim is not None and (self.leaving is not None or self.order.pays(node, victim))
            if victim is None or victim.users or not pays:
                node.lost = node.lost or NO_MEMORY
                self.order.refused(node)
                self.account.refused += 1
                return None
            self.evict(victim)
        return self.arena.alloc(SLOT)

    def save(
        self, namespace: Namespace, tokens: Tokens, pages: Sequence[int], slot: int, kind: str, lease: Lease
    ) -> Node | None:
        """Keep a checkpoint after `tokens` (at least one): `slot` stands for just them, `pages` hold them.

        Takes over the caller's hold of the slot and shares the pages. None, and nothing taken, when one
        stands there already or the cache was reset since `lease`. The caller may go on writing to the
        positions of the last page behind the tokens.
        """
        if lease.epoch != self._epoch:
            return None
        node = self.tree.extend(namespace, tokens)
        if node.checkpoint is not None:
            return None
        if self._has_slots:
            self.arena.expect(slot, len(tokens))
        self.tree.place(node, Checkpoint(slot, kind), pages)
        self.order.saved(node)
        base = self.tree.base(node)
        if base is not None:
            self.order.covered(base)
        self.account.saved += 1
        self._forget_ids()
        return node

    def returned(self, namespace: Hashable, tokens: Tokens) -> None:
        """The checkpoint after `tokens`, which is about to be saved, comes back from a lower tier."""
        self.order.returned(self.tree.extend(namespace, tokens))

    def remember(self, namespace: Namespace, tokens: Tokens, lease: Lease) -> None:
        """Know these tokens without keeping anything for them, so that a junction with them is seen."""
        if tokens and lease.epoch == self._epoch and self.tree.walk(namespace, tokens).seen < len(tokens):
            self.tree.extend(namespace, tokens)
            self._forget_ids()

    # Memory

    def make_room(self, need: Mapping[str, int], keep: Node | None = None) -> bool:
        """Evict, cheapest first, until `need` can be allocated; False when it cannot without `keep`."""
        while not self._has_room(need):
            victim = self.order.victim(keep)
            if victim is None:
                return False
            self.evict(victim)
        return True

    def evict(self, node: Node) -> None:
        """The checkpoint at `node` leaves; a lower tier may take it."""
        if self.leaving is not None:
            self.leaving(node)
        self.discard(node)

    def evict_all(self) -> None:
        """Every checkpoint leaves, those of running requests last; what such requests hold stays theirs."""
        while (victim := self.order.victim(None)) is not None:
            self.evict(victim)

    def discard(self, node: Node) -> None:
        """The checkpoint at `node` goes, and nobody takes it."""
        self.order.evicted(node)
        self.tree.remove(node, EVICTED)
        self.account.evicted += 1

    def reset(self) -> None:
        """Forget everything. What running requests hold stays theirs, and is not kept when they end."""
        self._epoch += 1
        self.tree.clear()
        self.order.clear()

    def _forget_ids(self) -> None:
        for node in self.tree.forget_ids():
            self.order.forgotten(node)

    # Reports

    def only_cached(self) -> dict[str, int]:
        """Numbers of pages, slots and slabs that only the cache holds: what could be evicted. O(entries)."""
        counts = {"slab": 0}
        for name, entries in self.tree.held().items():
            only = [entry for entry, times in entries.items() if self.arena.holders(name, entry) == times]
            counts[name] = len(only)
            if only:
                per_slab = self.arena.layout.size_class(name).count
                in_slab = Counter(entry // per_slab for entry in only)
                counts["slab"] += sum(len(self.arena.held_in(slab)) == n for slab, n in in_slab.items())
        return counts

    def stats(self) -> dict[str, Any]:
        """The account, and what stands in the tree now."""
        return self.account.stats() | {"checkpoints": self.tree.checkpoints, "bare_ids": self.tree.bare_ids}

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.tree.check()
        self.order.check(node for node in self.tree.nodes() if node.checkpoint is not None)
