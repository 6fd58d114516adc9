"""Entries of one tier that wait for the content of a checkpoint which comes from another tier.

Owns the record and how its entries are taken: what the tier has of the path already is shared, and only the
rest is new. Knows trees and arenas; not which tier it is, nor how bytes travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from denim.cache.node import Node, Tokens
from denim.cache.tree import PrefixTree
from denim.memory.layout import PAGE, SLOT

MakeRoom = Callable[[Mapping[str, int]], bool]
"""Whether so many entries of each class can be allocated now, after whatever it takes."""


@dataclass(eq=False, slots=True)
class Landing:
    """A checkpoint after `tokens`, saved as `kind`. `pages` hold positions 0 .. len(tokens); from the `first`
    on they are new and wait for their content, as `slot` does (-1: a model without states). All are held
    once.
    """

    namespace: Hashable
    tokens: Tokens
    kind: str
    pages: list[int]
    first: int
    slot: int

    @property
    def new_pages(self) -> list[int]:
        return self.pages[self.first :]

    def is_after(self, namespace: Hashable, tokens: Tokens) -> bool:
        """Whether it is the checkpoint after just these tokens."""
        return self.namespace == namespace and self.tokens == tokens

    def held(self) -> dict[str, Counter[int]]:
        """{"page", "slot"}: entry -> 1."""
        return {PAGE: Counter(self.pages), SLOT: Counter([self.slot] if self.slot >= 0 else [])}

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """Entries have new ids, old -> new. Returns how many of its own were among them."""
        if name == SLOT:
            changed = int(self.slot in targets)
            self.slot = targets.get(self.slot, self.slot)
            return changed
        changed = sum(page in targets for page in self.pages)
        self.pages = [targets.get(page, page) for page in self.pages]
        return changed

    def give_up(self, arena: Any, slot_taken: bool = False) -> None:
        """Release its entries; the slot too unless somebody has taken it over."""
        if self.pages:
            arena.release(PAGE, self.pages)
        if self.slot >= 0 and not slot_taken:
            arena.release(SLOT, [self.slot])


def land(
    tree: PrefixTree, arena: Any, namespace: Hashable, tokens: Tokens, kind: str, make_room: MakeRoom
) -> Landing | None:
    """Take entries of `arena` (an `Arena` or a `ByteArena`), which is `tree`'s; None when `make_room` finds
    no room for them. There must be no checkpoint after `tokens` in the tree."""
    node = tree.extend(namespace, tokens)
    shared = _shared(tree, arena, node)
    while True:
        need = arena.layout.need(len(tokens))
        if shared:
            need[PAGE] -= len(shared)
        if not make_room(need):
            return None
        before, shared = len(shared), _shared(tree, arena, node)  # entries may have moved, and others left
        if len(shared) == before:
            break
    if shared:
        arena.share(PAGE, shared)
    new = arena.alloc_many(PAGE, need[PAGE]) if PAGE in need else []
    slot = arena.alloc(SLOT) if SLOT in need else -1
    assert new is not None and slot is not None, "taken without room"
    return Landing(namespace, tokens, kind, shared + new, len(shared), slot)


def _shared(tree: PrefixTree, arena: Any, node: Node) -> list[int]:
    """The pages that the tree has of the path to `node`, and that hold all of it as far as they go."""
    path = node.path()
    covered = [part for part in path if part.below]
    if not covered or not arena.layout.has(PAGE):
        return []
    pages = tree.pages_to(covered[-1])
    # Behind what is covered the path will have a version of its own of the page that lies across.
    return pages if len(covered) == len(path) else pages[: covered[-1].end // arena.layout.page_size]
