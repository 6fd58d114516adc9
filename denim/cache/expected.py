"""The default order of eviction: FLOPs saved per byte freed, times the expected rate of use.

Owns what is learned about each checkpoint's use, also after it went: its token ids are still in the tree, so
a use that it would have had is seen, and what is evicted does not bias what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from denim.cache.eviction import Priced, Worth
from denim.cache.node import Node
from denim.cache.positions import GENERATION_END
from denim.cache.reuse import ReuseRates, Wait

COUNTED_AT_ONCE = 4
"""Waits of checkpoints that are gone, brought up to date whenever one is saved: in turn, so that all are."""


class Expected(Priced):
    """`now`: seconds of a clock."""

    def __init__(self, worth: Worth, now: Callable[[], float]) -> None:
        super().__init__(worth)
        self._now = now
        self._rates = ReuseRates()
        self._gone: dict[Node, None] = {}  # with a wait, but no checkpoint (perhaps one again since)
        self._heirs: dict[Node, Wait] = {}  # of the likeliest that went and would now be served by this one

    def price(self, node: Node) -> float:
        assert node.wait is not None
        now = self._now()
        self._rates.grow(node.wait, now)
        rate = self._rates.rate(node.wait, now)
        heir = self._heirs.get(node)
        if heir is not None:
            rate += self._rates.rate(heir, now)
        return self._worth.density(node) * rate

    def offered(self, node: Node, kind: str) -> None:
        if node.wait is not None:
            return
        base = self._worth.tree.base(node)
        above = base.checkpoint.kind if base is not None and base.checkpoint is not None else None
        # Whoever saves inside its prompt goes on from there, and leaves a deeper one at its end.
        covered = kind != GENERATION_END or node.below > (node.checkpoint is not None)
        node.wait = self._rates.begin(kind, above, covered, self._now())

    def pays(self, node: Node, victim: Node) -> bool:
        return self.price(node) > self.price(victim)

    def refused(self, node: Node) -> None:
        self._gone[node] = None

    def saved(self, node: Node) -> None:
        super().saved(node)
        assert node.checkpoint is not None
        self.offered(node, node.checkpoint.kind)
        for gone in list(islice(self._gone, COUNTED_AT_ONCE)):
            del self._gone[gone]
            if gone.checkpoint is None and gone.wait is not None:
                self._rates.grow(gone.wait, self._now())
                self._gone[gone] = None

    def used(self, node: Node) -> None:
        if node.wait is None:  # it went with a reset, or was never offered
            return
        self._heirs.pop(node, None)
        node.wait = self._rates.use(node.wait, self._now())
        if node.below > (node.checkpoint is not None):
            self.covered(node)

    def covered(self, node: Node) -> None:
        if node.wait is not None and not node.wait.klass.covered:
            self._rates.cover(node.wait, True, self._now())

    def evicted(self, node: Node) -> None:
        super().evicted(node)
        assert node.wait is not None
        self._gone[node] = None
        waits = [node.wait]
        if node in self._heirs:
            waits.append(self._heirs.pop(node))
        base = self._worth.tree.base(node)
        if base is None:
            return
        if base in self._heirs:
            waits.append(self._heirs[base])
        now = self._now()
        self._heirs[base] = max(waits, key=lambda wait: self._rates.rate(wait, now))
        if base.below == 2 and base.wait is not None:  # itself and the one that goes
            self._rates.cover(base.wait, False, now)

    def returned(self, node: Node) -> None:
        """Its wait is over, or others would evict it, long unused as it is, before the request begins."""
        if node.wait is not None:
            self._rates.grow(node.wait, self._now())
            node.wait = Wait(node.wait.klass, self._now())

    def forgotten(self, node: Node) -> None:
        self._gone.pop(node, None)
        if node.wait is not None:
            self._rates.grow(node.wait, self._now())
            node.wait = None

    def clear(self) -> None:
        super().clear()
        self._gone.clear()
        self._heirs.clear()
