"""Which checkpoint goes next: one queue of all of them, in an order that hears of all that happens to them.

Owns what a checkpoint is worth, and the queue by price; what the price is, `denim.cache.expected` learns. The
worth is the FLOPs that it saves whoever begins from it rather than from the next one above it; the cost the
bytes that come free without it, its slot and the pages that serve no other. Knows the tree; takes nothing
away itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from denim.cache.node import Node
from denim.cache.tree import PrefixTree

BATCH = 16
"""A sixteenth of all checkpoints is taken from one sorting, as long as their prices still hold."""


@dataclass(frozen=True)
class Worth:
    """Prices one tree. `flops(tokens)`: of a prefill from nothing. Bytes are the entries' strides."""

    tree: PrefixTree
    flops: Callable[[int], float]
    page_bytes: int
    slot_bytes: int

    def saved(self, node: Node) -> float:
        """FLOPs."""
        base = self.tree.base(node)
        return self.flops(node.end) - (self.flops(base.end) if base is not None else 0.0)

    def freed(self, node: Node) -> int:
        """Bytes, at least 1."""
        return max(1, self.slot_bytes + self.page_bytes * self.tree.pages_freed_without(node))

    def density(self, node: Node) -> float:
        """FLOPs saved per byte freed."""
        return self.saved(node) / self.freed(node)


class Order(ABC):
    """Told of everything that happens to checkpoints; says which of them goes next.

    `saved`: a node got its checkpoint. `used`: a request began from it, or would have if it had one still.
    """

    @abstractmethod
    def saved(self, node: Node) -> None: ...

    @abstractmethod
    def used(self, node: Node) -> None: ...

    @abstractmethod
    def evicted(self, node: Node) -> None: ...

    @abstractmethod
    def victim(self, keep: Node | None) -> Node | None:
        """The next to go, but for `keep`; None when there is no other. Those of running requests go last."""

    def offered(self, node: Node, kind: str) -> None:  # noqa: B027 (of no account to orders that learn nothing)
        """A checkpoint of this kind is wanted at a node that has none."""

    def refused(self, node: Node) -> None:  # noqa: B027
        """What was offered was not saved."""

    def covered(self, node: Node) -> None:  # noqa: B027
        """A deeper checkpoint stands below this one now."""

    def returned(self, node: Node) -> None:  # noqa: B027
        """A checkpoint that went is about to be saved again, as a waiting request is to begin from it."""

    def forgotten(self, node: Node) -> None:  # noqa: B027
        """A node without checkpoint has left the tree."""

    def pays(self, node: Node, victim: Node) -> bool:
        """Whether `node`, without a checkpoint now, should get one at the price of `victim`'s."""
        return True

    @abstractmethod
    def clear(self) -> None:
        """All checkpoints are gone."""

    @abstractmethod
    def check(self, checkpoints: Iterable[Node]) -> None:
        """Raises AssertionError unless these are the nodes in the queue."""


class Priced(Order):
    """Lowest price first. What the price is, a subclass says.

    Sorting everything for each eviction would cost too much, so the lowest few of a sorting are taken one
    after the other; one whose price has risen above theirs since is left alone.
    """

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self._nodes: dict[Node, None] = {}
        self._batch: list[Node] = []  # the lowest last
        self._highest = 0.0  # price in the batch

    @abstractmethod
    def price(self, node: Node) -> float: ...

    def saved(self, node: Node) -> None:
        self._nodes[node] = None

    def evicted(self, node: Node) -> None:
        del self._nodes[node]

    def victim(self, keep: Node | None) -> Node | None:
        while self._batch:
            node = self._batch[-1]
            free = node in self._nodes and node is not keep and not node.users
            if free and self.price(node) <= self._highest:
                return node
            self._batch.pop()
        candidates = [node for node in self._nodes if not node.users and node is not keep]
        if not candidates:
            return next((node for node in self._nodes if node is not keep), None)
        prices = {node: self.price(node) for node in candidates}
        candidates.sort(key=prices.__getitem__, reverse=True)
        self._batch = candidates[-1 - len(candidates) // BATCH :]
        self._highest = prices[self._batch[0]]
        return self._batch[-1]

    def clear(self) -> None:
        self._nodes.clear()
        self._batch.clear()

    def check(self, checkpoints: Iterable[Node]) -> None:
        assert set(checkpoints) == set(self._nodes)
