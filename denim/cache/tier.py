"""The books of one lower tier of the prefix cache: which checkpoints lie there, and which goes next.

Owns a tree, an order of eviction and an arena that counts bytes: the same radix tree, exact positions and
shared pages as on the device. Knows tokens and entry numbers; not where bytes lie, nor when they arrive.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from denim.cache.byte_arena import ByteArena
from denim.cache.eviction import Order, Worth
from denim.cache.landing import Landing, land
from denim.cache.node import Checkpoint, Node, Tokens
from denim.cache.tree import PrefixTree
from denim.memory.layout import PAGE, SLOT, ArenaLayout

LEFT = "left the tier"
"""Why a node of a lower tier has no checkpoint any more; nobody counts these."""

UNBOUNDED = sys.maxsize
"""Bytes of an arena that turns nobody down."""


class Tier:
    """`make_order(worth)`: the order of eviction. `flops(tokens)`: of a prefill from nothing.

    `has_room(need)`: whether so many entries may be taken now, whatever `capacity` is; None: whether their
    bytes are free of `capacity`.
    """

    def __init__(
        self,
        name: str,
        layout: ArenaLayout,
        capacity: int,
        ids_limit: int,
        flops: Callable[[int], float],
        make_order: Callable[[Worth], Order],
        on_free: Callable[[list[int]], None],
        has_room: Callable[[Mapping[str, int]], bool] | None = None,
    ) -> None:
        self.name = name
        # Who says what room there is bounds other bytes than these: of whole files, not of blocks.
        self.arena = ByteArena(layout, capacity if has_room is None else UNBOUNDED, on_free)
        arena: Any = self.arena
        self.tree = PrefixTree(arena, ids_limit)
        worth = Worth(self.tree, flops, layout.stride(PAGE), layout.stride(SLOT))
        self.order = make_order(worth)
        self.counts: Counter[str] = Counter()
        self.backed = False  # whether what leaves lies in a tier below, so that nobody need be turned down
        self.on_drop: Callable[[Node], None] | None = None  # told of each checkpoint that leaves
        self._has_room = has_room or self.arena.can_alloc

    # Lookups

    def at(self, namespace: Hashable, tokens: Tokens) -> Node | None:
        """The node of the checkpoint after exactly `tokens`."""
        nodes = self.tree.walk(namespace, tokens).nodes
        last = nodes[-1] if nodes else None
        stands = last is not None and last.end == len(tokens) and last.checkpoint is not None
        return last if stands else None

    def find(self, namespace: Hashable, tokens: Tokens) -> Node | None:
        """The node of the deepest checkpoint that leaves at least one of `tokens` to compute."""
        nodes = self.tree.walk(namespace, tokens).nodes
        fitting = (node for node in reversed(nodes) if node.checkpoint is not None and node.end < len(tokens))
        return next(fitting, None)

    def nodes(self) -> Iterator[Node]:
        """Those with a checkpoint."""
        return (node for node in self.tree.nodes() if node.checkpoint is not None)

    # Changes

    def land(self, namespace: Hashable, tokens: Tokens, kind: str, like: Node | None) -> Landing | None:
        """Entries for a checkpoint that comes in, after less valuable ones have left; None where there is no
        room, or all that would have to leave is worth more. `like`: its node in the tier that it comes from,
        whose wait for the next use goes on here."""
        node = self.tree.extend(namespace, tokens)
        if like is not None and like.wait is not None:
            node.wait = replace(like.wait)
        self.order.offered(node, kind)
        landing = land(
            self.tree, self.arena, namespace, tokens, kind, lambda need: self._make_room(need, node)
        )
        if landing is None:
            self.order.refused(node)
            self.counts["refused"] += 1
        return landing

    def settle(self, landing: Landing) -> Node | None:
        """What came in is there, or will be before anybody reads it: it stands from now on. None, and nothing
        kept, where one stands there already. Takes over the landing's entries."""
        node = self.tree.extend(landing.namespace, landing.tokens)
        kept = node.checkpoint is None
        if kept:
            if landing.slot >= 0:
                self.arena.commit(landing.slot, len(landing.tokens))
            self.tree.place(node, Checkpoint(landing.slot, landing.kind), landing.pages)
            self.order.saved(node)
            base = self.tree.base(node)
            if base is not None:
                self.order.covered(base)
            self.counts["stored"] += 1
        landing.give_up(self.arena, slot_taken=kept)
        for forgotten in self.tree.forget_ids():
            self.order.forgotten(forgotten)
        return node if kept else None

    def drop(self, node: Node) -> None:
        """The checkpoint at `node` leaves."""
        if self.on_drop is not None:
            self.on_drop(node)
        self.order.evicted(node)
        self.tree.remove(node, LEFT)
        self.counts["evicted"] += 1

    def hold(self, node: Node, first: int) -> tuple[list[int], int]:
        """The pages from the `first` on and the slot of the checkpoint at `node`, held once more, and its
        path as in use, until `let_go`."""
        pages = self.tree.pages_to(node)[first:]
        slot = node.checkpoint.slot if node.checkpoint is not None else -1
        if pages:
            self.arena.share(PAGE, pages)
        if slot >= 0:
            self.arena.share(SLOT, [slot])
        for part in (node, *node.ancestors()):
            part.users += 1
        return pages, slot

    def let_go(self, node: Node, pages: Sequence[int], slot: int) -> None:
        """The other end of `hold`."""
        if pages:
            self.arena.release(PAGE, pages)
        if slot >= 0:
            self.arena.release(SLOT, [slot])
        for part in (node, *node.ancestors()):
            part.users -= 1

    def clear(self) -> None:
        """Forget everything. What is on its way keeps its entries until it lets go of them."""
        self.tree.clear()
        self.order.clear()

    def _make_room(self, need: Mapping[str, int], node: Node) -> bool:
        while not self._has_room(need):
            victim = self.order.victim(keep=None)
            if victim is None or victim.users or not (self.backed or self.order.pays(node, victim)):
                return False
            self.drop(victim)
        return True

    # Reports

    def stats(self) -> dict[str, int]:
        """checkpoints, used_bytes, total_bytes now; stored, loaded, loaded_tokens, evicted, refused, failed
        so far."""
        so_far = ("stored", "loaded", "loaded_tokens", "evicted", "refused", "failed")
        return {
            "checkpoints": self.tree.checkpoints,
            "used_bytes": self.arena.capacity - self.arena.free,
            "total_bytes": self.arena.capacity,
        } | {name: self.counts[name] for name in so_far}

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.tree.check()
        self.order.check(self.nodes())
