"""The peers' rules for a prefix cache of hybrid models, from their published descriptions, and plain orders.

The tree rules run on Denim's own tree, which keeps no KV that cannot be used, so they do a little better here
than at home. Where a rule has a parameter that its authors tune, it is tuned in hindsight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from denim.cache.eviction import Order, Priced, Worth
from denim.cache.node import Node
from denim.cache.positions import JUNCTION, Grid, Policy, Sighting, Wanted
from denim.cache.replay import TraceRequest


def _junction(sighting: Sighting, grid: Grid) -> list[Wanted]:
    return [Wanted(sighting.seen, JUNCTION)] if sighting.seen > sighting.start else []


JUDICIOUS = Policy("judicious", _junction, generation_end=True)
"""Marconi's admission: the junction with an earlier sequence, and the last decoded token."""

GRID = 32
"""Tokens between two states in the vLLM+ column of the Marconi paper."""


def grid_lru(
    trace: Iterable[TraceRequest], memory: int, state_bytes: int, token_bytes: int
) -> tuple[int, int]:
    """vLLM+: a block of `GRID` tokens and the state at its end, LRU over blocks. (hit, query) tokens."""
    capacity = memory // (state_bytes + GRID * token_bytes)
    blocks: OrderedDict[int, None] = OrderedDict()
    hits = queries = 0
    for request in trace:
        keys, chained = [], 0
        for at in range(GRID, len(request.tokens) + 1, GRID):
            chained = hash((chained, request.tokens[at - GRID : at].tobytes()))
            keys.append(chained)
        usable = (request.prompt - 1) // GRID
        known = 0
        while known < usable and keys[known] in blocks:
            known += 1
        hits += known * GRID
        queries += request.prompt
        for key in reversed(keys):  # a chain's end goes before its beginning
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > capacity:
            blocks.popitem(last=False)
    return hits, queries


class LeastRecent(Order):
    """Longest unused first, whatever it is worth."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def saved(self, node: Node) -> None:
        self._nodes[node] = None

    def used(self, node: Node) -> None:
        if node in self._nodes:
            self._nodes.move_to_end(node)

    def evicted(self, node: Node) -> None:
        del self._nodes[node]

    def victim(self, keep: Node | None) -> Node | None:
        last = None
        for node in self._nodes:
            if node is keep:
                continue
            if not node.users:
                return node
            last = last or node
        return last

    def clear(self) -> None:
        self._nodes.clear()

    def check(self, checkpoints: Iterable[Node]) -> None:
        assert set(checkpoints) == set(self._nodes)


class GreedyDual(Priced):
    """FLOPs saved per byte freed, plus an age that rises to the price of whatever goes (Cao and Irani,
    1997, with bytes that come free in place of an object's size)."""

    def __init__(self, worth: Worth) -> None:
        super().__init__(worth)
        self._age = 0.0
        self._at: dict[Node, float] = {}  # the age at the last use

    def price(self, node: Node) -> float:
        return self._at.get(node, self._age) + self._worth.density(node)

    def saved(self, node: Node) -> None:
        super().saved(node)
        self._at[node] = self._age

    def used(self, node: Node) -> None:
        if node in self._at:
            self._at[node] = self._age

    def evicted(self, node: Node) -> None:
        self._age = max(self._age, self.price(node))
        super().evicted(node)
        del self._at[node]

    def clear(self) -> None:
        super().clear()
        self._at.clear()


class Stamped(Order):
    """Checkpoints with the time of their last use; which of them may go, and the key, a subclass says."""

    def __init__(self) -> None:
        self._at: dict[Node, int] = {}
        self._now = 0

    def saved(self, node: Node) -> None:
        self._now += 1
        self._at[node] = self._now

    def used(self, node: Node) -> None:
        self._now += 1
        if node in self._at:
            self._at[node] = self._now

    def evicted(self, node: Node) -> None:
        del self._at[node]

    def clear(self) -> None:
        self._at.clear()

    def check(self, checkpoints: Iterable[Node]) -> None:
        assert set(checkpoints) == set(self._at)


class LeafLru(Stamped):
    """SGLang+: the leaf whose path was used longest ago; a use refreshes the whole path."""

    def used(self, node: Node) -> None:
        super().used(node)
        for above in node.ancestors():
            if above in self._at:
                self._at[above] = self._now

    def victim(self, keep: Node | None) -> Node | None:
        leaves = [node for node in self._at if node.below == 1 and node is not keep]
        return min(leaves, key=self._at.__getitem__, default=None)


class AnyLru(LeastRecent):
    """LRU over all nodes with at most one child; only the deepest node that served is refreshed."""

    def victim(self, keep: Node | None) -> Node | None:
        few = (node for node in self._nodes if len(node.children) <= 1 and node is not keep)
        return next(few, None)


class Marconi(Stamped):
    """Recency plus `alpha` times FLOPs saved per byte, both scaled to [0, 1] over the candidates."""

    def __init__(self, worth: Worth, alpha: float) -> None:
        super().__init__()
        self._worth = worth
        self._alpha = alpha

    def victim(self, keep: Node | None) -> Node | None:
        nodes = [node for node in self._at if len(node.children) <= 1 and node is not keep]
        if not nodes:
            return None
        recency = _scaled([float(self._at[node]) for node in nodes])
        efficiency = _scaled([self._worth.density(node) for node in nodes]) if self._alpha else recency
        scores = [r + self._alpha * e for r, e in zip(recency, efficiency, strict=True)]
        return nodes[scores.index(min(scores))]


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low or 1.0) for value in values]
