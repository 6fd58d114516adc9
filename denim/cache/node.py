"""A node of the prefix tree: what it holds, and what becomes of each field when it is split.

Owns the record and the table of splits. Holds entries by number only; who counts their holders is the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from denim.cache.reuse import Wait

Tokens = array
"""Token ids as `array("i")`: slices are copies of bytes and compare at the speed of memcmp."""


def as_tokens(ids: Any) -> Tokens:
    """Token ids in the tree's form. Costs more than a lookup: do it once a request."""
    return ids if isinstance(ids, array) else array("i", ids)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A state that stands for exactly the tokens up to its node's end.

    `slot` is -1 for a model without states. `kind` says why it was saved (`denim.cache.positions`). `hits`
    counts the requests that began from it.
    """

    slot: int
    kind: str
    hits: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """Token ids `edge` behind `parent`, and what is known of the sequence that ends with them.

    `pages` are the KV pages that hold positions start .. end, the one with `start` in its middle too: it
    repeats the filled part of the parent's last page, or is that page. They are there as long as `below`,
    the number of checkpoints in this subtree, is not 0; otherwise only ids are known.
    `users` counts the running requests that began in this subtree: they hold these pages as well.
    `lost` says why no checkpoint stands here although one stood or was wanted; None where none ever was.
    """

    parent: Node | None = field(repr=False)
    start: int
    edge: Tokens
    pages: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict, repr=False)
    checkpoint: Checkpoint | None = None
    below: int = 0
    users: int = 0
    lost: str | None = None
    wait: Wait | None = None  # for the next use; some eviction orders keep it (`denim.cache.expected`)

    @property
    def end(self) -> int:
        return self.start + len(self.edge)

    def ancestors(self) -> Iterator[Node]:
        """Parent first, root last."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def path(self) -> list[Node]:
        """From the root's child to this node; empty for the root."""
        return [node for node in [self, *self.ancestors()] if node.parent is not None][::-1]


def tokens_of(node: Node) -> Tokens:
    """The sequence that ends with `node`, whether or not it is still in a tree. O(tokens)."""
    tokens = Tokens("i")
    for part in node.path():
        tokens.extend(part.edge)
    return tokens


class SplitRule(NamedTuple):
    """What a field becomes when `node` is cut behind position `at` (of `page_size` tokens a page): in the
    new parent, and in the node itself, which keeps its end and all that is said of its end."""

    upper: Callable[[Node, int, int], Any]
    lower: Callable[[Node, int, int], Any]


def _keep(name: str) -> Callable[[Node, int, int], Any]:
    return lambda node, at, page_size: getattr(node, name)


def _always(make: Callable[[], Any]) -> Callable[[Node, int, int], Any]:
    return lambda node, at, page_size: make()


def _upper_pages(node: Node, at: int, page_size: int) -> list[int]:
    return node.pages[: -(-at // page_size) - node.start // page_size]


def _lower_pages(node: Node, at: int, page_size: int) -> list[int]:
    return node.pages[at // page_size - node.start // page_size :]


# Nothing that is true of the node's end may reach the new parent, whose end is another: no checkpoint, no
# reason why there is none, no note on its use. The page across the cut belongs to both.
SPLIT: dict[str, SplitRule] = {
    "parent": SplitRule(_keep("parent"), _keep("parent")),  # the lower one's is set by `split`
    "start": SplitRule(_keep("start"), lambda node, at, page_size: at),
    "edge": SplitRule(
        lambda node, at, page_size: node.edge[: at - node.start],
        lambda node, at, page_size: node.edge[at - node.start :],
    ),
    "pages": SplitRule(_upper_pages, _lower_pages),
    "children": SplitRule(_always(dict), _keep("children")),  # the upper one's only child is the lower one
    "checkpoint": SplitRule(_always(lambda: None), _keep("checkpoint")),
    "below": SplitRule(_keep("below"), _keep("below")),
    "users": SplitRule(_keep("users"), _keep("users")),
    "lost": SplitRule(_always(lambda: None), _keep("lost")),
    "wait": SplitRule(_always(lambda: None), _keep("wait")),
}


def split(node: Node, at: int, page_size: int) -> Node:
    """Cut `node` behind position `at`, inside its edge; returns the new parent, hung in its old place.

    The page that holds `at` in its middle is in both afterwards; counting its second holder is up to the
    caller.
    """
    assert node.start < at < node.end and node.parent is not None
    upper = Node(**{name: rule.upper(node, at, page_size) for name, rule in SPLIT.items()})
    for name, value in {name: rule.lower(node, at, page_size) for name, rule in SPLIT.items()}.items():
        setattr(node, name, value)
    node.parent = upper
    upper.children[node.edge[0]] = node
    assert upper.parent is not None
    upper.parent.children[upper.edge[0]] = upper
    return upper
