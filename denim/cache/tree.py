"""The prefix tree: which token sequences are known, and which pages and checkpoints stand for them.

Owns the tree and its share in the arena: one holder of every page of every node, one of every checkpoint's
slot. Knows tokens, positions and entry numbers; does not decide what to save or to evict.

One radix tree per namespace (a cache salt and an adapter: sequences of different namespaces share nothing).
KV behind the deepest checkpoint of a path can never be used, so only token ids stay there. They are how a
junction is recognised; the longest unused go when there are more than `ids_limit` of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from denim.cache.node import Checkpoint, Node, Tokens, split, tokens_of
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT


class Walk(NamedTuple):
    """How far a sequence is known: the nodes passed to their end, and the number of ids that agree."""

    nodes: list[Node]
    seen: int


class PrefixTree:
    def __init__(self, arena: Arena, ids_limit: int) -> None:
        self._arena = arena
        self.layout = arena.layout
        self._page_size = arena.layout.page_size
        self._has_pages = arena.layout.has(PAGE)
        self._ids_limit = ids_limit
        self._roots: dict[Hashable, Node] = {}
        self._spaces: dict[Node, Hashable] = {}  # root -> its namespace
        self._bare: OrderedDict[Node, None] = OrderedDict()  # leaves without checkpoint, longest unused first
        self.bare_ids = 0  # token ids in nodes without pages
        self.checkpoints = 0

    # Lookups

    def walk(self, namespace: Hashable, tokens: Tokens) -> Walk:
        """Follow `tokens` from the root. Changes nothing. O(tokens + nodes passed)."""
        nodes: list[Node] = []
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(tokens):
            node = node.children.get(tokens[at])
            if node is None:
                break
            common = common_length(node.edge, tokens, at)
            at += common
            if common < len(node.edge):
                break
            nodes.append(node)
        return Walk(nodes, at)

    def pages_to(self, node: Node) -> list[int]:
        """The pages of positions 0 .. node.end. Each node's version of a page across its start is the
        fuller one, so it takes the place of its parent's."""
        pages: list[int] = []
        for part in node.path():
            pages[part.start // self._page_size :] = part.pages
        return pages

    def sequence(self, node: Node) -> tuple[Hashable, Tokens]:
        """Namespace and tokens of a node of this tree. O(tokens)."""
        *_, root = node.ancestors()
        return self._spaces[root], tokens_of(node)

    def base(self, node: Node) -> Node | None:
        """The nearest ancestor with a checkpoint; None when there is none."""
        return next((above for above in node.ancestors() if above.checkpoint is not None), None)

    def pages_freed_without(self, node: Node) -> int:
        """Pages that only this node's checkpoint keeps; those that a running request holds do not count."""
        freed = 0
        part: Node | None = node
        while part is not None and part.below == 1 and not part.users and part.parent is not None:
            freed += len(part.pages)
            part = part.parent
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def roots(self) -> dict[Hashable, Node]:
        """Namespace -> root."""
        return self._roots

    # Changes

    def extend(self, namespace: Hashable, tokens: Tokens) -> Node:
        """The node that ends with exactly `tokens` (at least one), made or cut out of an edge if need be."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, 0, Tokens("i"))
            self._spaces[root] = namespace
        nodes, seen = self.walk(namespace, tokens)
        node = nodes[-1] if nodes else root
        if seen > node.end:
            node = self._split(node.children[tokens[node.end]], seen)
        if seen < len(tokens):
            if not node.below and not node.children and node.parent is not None:
                del self._bare[node]
            child = Node(node, seen, tokens[seen:])
            node.children[child.edge[0]] = child
            self._bare[child] = None
            self.bare_ids += len(child.edge)
            node = child
        return node

    def place(self, node: Node, checkpoint: Checkpoint, pages: Sequence[int]) -> None:
        """Put a checkpoint at a node that has none. Its slot becomes the tree's; of `pages`, which hold
        positions 0 .. node.end, the tree takes a share of those that it lacks."""
        assert node.checkpoint is None and node.parent is not None
        node.checkpoint = checkpoint
        node.lost = None
        self.checkpoints += 1
        for part in [node, *node.ancestors()]:
            part.below += 1
            if part.below > 1 or part.parent is None:
                continue
            self._bare.pop(part, None)
            self.bare_ids -= len(part.edge)
            if self._has_pages:
                first, end = part.start // self._page_size, -(-part.end // self._page_size)
                part.pages = list(pages[first:end])
                self._arena.share(PAGE, part.pages)

    def remove(self, node: Node, lost: str) -> None:
        """Take a node's checkpoint away, and the pages that served no other one. Token ids stay."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        node.checkpoint = None
        node.lost = lost
        self.checkpoints -= 1
        if checkpoint.slot >= 0:
            self._arena.release(SLOT, [checkpoint.slot])
        for part in [node, *node.ancestors()]:
            part.below -= 1
            if part.below or part.parent is None:
                continue
            if part.pages:
                self._arena.release(PAGE, part.pages)
                part.pages = []
            self.bare_ids += len(part.edge)
            if not part.children:
                self._bare[part] = None

    def touch(self, nodes: Sequence[Node]) -> None:
        """Note that a path was used: its ids are the last to go."""
        if nodes and nodes[-1] in self._bare:
            self._bare.move_to_end(nodes[-1])

    def forget_ids(self) -> list[Node]:
        """Drop the longest unused ids until there are no more than `ids_limit`; returns the dropped nodes."""
        dropped = []
        while self.bare_ids > self._ids_limit:
            node, _ = self._bare.popitem(last=False)
            dropped.append(node)
            parent = node.parent
            assert parent is not None
            self.bare_ids -= len(node.edge)
            del parent.children[node.edge[0]]
            if parent.parent is not None and not parent.below and not parent.children:
                self._bare[parent] = None
                self._bare.move_to_end(parent, last=False)
        for namespace in [name for name, root in self._roots.items() if not root.children]:
            del self._spaces[self._roots.pop(namespace)]
        return dropped

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        """Entries of class `name` have new ids, old -> new; returns how many references to them changed
        (`denim.memory.compaction.Holder`). O(entries held)."""
        changed = 0
        for node in self.nodes():
            if name == PAGE and not targets.keys().isdisjoint(node.pages):
                changed += sum(page in targets for page in node.pages)
                node.pages = [targets.get(page, page) for page in node.pages]
            elif name == SLOT and node.checkpoint is not None and node.checkpoint.slot in targets:
                changed += 1
                node.checkpoint.slot = targets[node.checkpoint.slot]
        return changed

    def clear(self) -> None:
        """Drop everything. Nodes that somebody still knows own nothing then."""
        for node in self.nodes():
            if node.pages:
                self._arena.release(PAGE, node.pages)
                node.pages = []
            if node.checkpoint is not None and node.checkpoint.slot >= 0:
                self._arena.release(SLOT, [node.checkpoint.slot])
            node.checkpoint = None
        self._roots.clear()
        self._spaces.clear()
        self._bare.clear()
        self.bare_ids = self.checkpoints = 0

    def _split(self, node: Node, at: int) -> Node:
        upper = split(node, at, self._page_size)
        if node.pages and at % self._page_size:
            self._arena.share(PAGE, [node.pages[0]])
        return upper

    # Reports

    def held(self) -> dict[str, Counter[int]]:
        """{"page", "slot"}: entry -> number of times that the tree holds it. O(entries)."""
        pages: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for node in self.nodes():
            pages.update(node.pages)
            if node.checkpoint is not None and node.checkpoint.slot >= 0:
                slots[node.checkpoint.slot] += 1
        return {PAGE: pages, SLOT: slots}

    def check(self) -> None:
        """Raises AssertionError when an invariant of the tree, or of its share in the arena, is broken."""
        bare = set()
        bare_ids = checkpoints = 0
        for root in self._roots.values():
            assert root.parent is None and not root.edge and not root.pages and root.checkpoint is None
            assert root.children, "an empty namespace was kept"
            assert root.below == sum(child.below for child in root.children.values())
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and parent.children[node.edge[0]] is node and parent.end == node.start
            own = node.checkpoint is not None
            checkpoints += own
            assert node.below == own + sum(child.below for child in node.children.values()), "below is wrong"
            assert node.users >= sum(child.users for child in node.children.values()), "users got lost"
            assert not own or node.lost is None
            expected = -(-node.end // self._page_size) - node.start // self._page_size if node.below else 0
            assert len(node.pages) == (expected if self._has_pages else 0), "pages do not cover the edge"
            if not node.below:
                bare_ids += len(node.edge)
                if not node.children:
                    bare.add(node)
        assert self._spaces == {root: name for name, root in self._roots.items()}
        assert bare == set(self._bare) and bare_ids == self.bare_ids and checkpoints == self.checkpoints
        for name, entries in self.held().items():
            for entry, times in entries.items():
                assert self._arena.holders(name, entry) >= times, f"{name} {entry} has too few holders"
                assert name == PAGE or times == 1, "two checkpoints in one slot"
        for node in self.nodes():
            if node.checkpoint is not None and node.checkpoint.slot >= 0:
                self._arena.expect(node.checkpoint.slot, node.end)


def common_length(edge: Tokens | list[int] | str, tokens: Tokens | list[int] | str, at: int) -> int:
    """How many tokens (characters) of `edge` agree with `tokens`, of the same type, from position `at`.
    O(length) by slices."""
    high = min(len(edge), len(tokens) - at)
    if edge[:high] == tokens[at : at + high]:
        return high
    low = 0  # the first `low` agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
