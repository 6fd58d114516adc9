from __future__ import annotations

import random

import pytest

from denim.cache.node import Checkpoint, as_tokens
from denim.cache.tree import PrefixTree, common_length
from denim.memory.arena import Arena
from denim.memory.layout import PAGE, SLOT
from tests.memory.layouts import PAGE_SIZE, make_layout


@pytest.fixture
def arena() -> Arena:
    return Arena(make_layout(), 40)


def put(tree: PrefixTree, arena: Arena, tokens: list[int], namespace: object = None) -> list[int]:
    """A checkpoint after `tokens`, in memory of its own; returns the pages."""
    pages = arena.alloc_many(PAGE, -(-len(tokens) // PAGE_SIZE))
    slot = arena.alloc(SLOT)
    arena.commit(slot, len(tokens))
    tree.place(tree.extend(namespace, as_tokens(tokens)), Checkpoint(slot, "mark"), pages)
    arena.release(PAGE, pages)
    tree.check()
    return pages


def test_common_length() -> None:
    chance = random.Random(0)
    for _ in range(300):
        edge = [chance.randrange(2) for _ in range(chance.randrange(1, 9))]
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 12))]
        at = chance.randrange(len(tokens))
        expected = 0
        while expected < min(len(edge), len(tokens) - at) and edge[expected] == tokens[at + expected]:
            expected += 1
        assert common_length(as_tokens(edge), as_tokens(tokens), at) == expected


def test_one_page_across_a_junction_has_a_version_for_each_branch(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    a = put(tree, arena, [1, 2, 3, 4, 5, 6, 7, 8])
    b = put(tree, arena, [1, 2, 3, 4, 5, 6, 9, 9, 9])
    ends = {len(n.path()): n for n in tree.nodes()}
    assert ends[1].end == 6 and ends[1].checkpoint is None
    for tokens, pages in (([1, 2, 3, 4, 5, 6, 7, 8], a), ([1, 2, 3, 4, 5, 6, 9, 9, 9], b)):
        walk = tree.walk(None, as_tokens(tokens))
        # The shared full page is the first one's; from the page of the junction on each has its own.
        assert tree.pages_to(walk.nodes[-1]) == a[:1] + pages[1:]


def test_kv_behind_the_deepest_checkpoint_is_not_kept(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    put(tree, arena, [1, 2, 3, 4, 5])
    tree.extend(None, as_tokens(range(1, 30)))
    tree.check()
    assert tree.bare_ids == 24
    assert tree.walk(None, as_tokens(range(1, 30))).seen == 29
    assert arena.stats()["pages"]["used"] == 2


def test_removing_a_checkpoint_frees_what_no_other_needs(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    put(tree, arena, list(range(8)))
    put(tree, arena, list(range(20)))
    upper, lower = (tree.walk(None, as_tokens(range(n))).nodes[-1] for n in (8, 20))
    assert tree.pages_freed_without(upper) == 0 and tree.pages_freed_without(lower) == 3
    assert tree.base(lower) is upper and tree.base(upper) is None
    tree.remove(upper, "evicted")
    tree.check()
    assert arena.stats()["pages"]["used"] == 5 and tree.pages_freed_without(lower) == 5
    tree.remove(lower, "evicted")
    tree.check()
    assert [arena.stats()[k]["used"] for k in ("pages", "slots", "slabs")] == [0, 0, 0]
    assert tree.bare_ids == 20 and tree.walk(None, as_tokens(range(20))).seen == 20


def test_pages_of_a_running_request_are_not_counted_as_freed(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    put(tree, arena, list(range(8)))
    (node,) = tree.nodes()
    node.users += 1
    assert tree.pages_freed_without(node) == 0


def test_a_path_that_lost_its_pages_gets_them_back(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    put(tree, arena, list(range(10)))
    (node,) = tree.nodes()
    tree.remove(node, "evicted")
    pages = put(tree, arena, list(range(14)))
    walk = tree.walk(None, as_tokens(range(14)))
    assert tree.pages_to(walk.nodes[-1]) == pages


def test_the_longest_unused_ids_go(arena: Arena) -> None:
    tree = PrefixTree(arena, 25)
    for first in (1, 2, 3):
        tree.extend(None, as_tokens([0, 0] + [first] * 10))
        if first == 2:
            tree.touch(tree.walk(None, as_tokens([0, 0] + [1] * 10)).nodes)
    assert tree.bare_ids == 32
    (dropped,) = tree.forget_ids()
    assert dropped.edge[0] == 2 and tree.bare_ids == 22
    tree.check()


def test_namespaces_share_nothing_and_leave_nothing(arena: Arena) -> None:
    tree = PrefixTree(arena, 0)
    put(tree, arena, [1, 2, 3], namespace="a")
    assert tree.walk("b", as_tokens([1, 2, 3])).seen == 0
    tree.extend("b", as_tokens([1, 2, 3]))
    tree.forget_ids()
    assert set(tree.roots()) == {"a"}


def test_moved_entries_are_found_under_their_new_ids(arena: Arena) -> None:
    tree = PrefixTree(arena, 100)
    put(tree, arena, list(range(6)))
    put(tree, arena, list(range(6)) + [9] * 6)
    held = tree.held()
    pages = {page: page + 1000 for page in held[PAGE]}
    slots = {slot: slot + 1000 for slot in held[SLOT]}
    assert tree.moved(PAGE, pages) == sum(held[PAGE].values())
    assert tree.moved(SLOT, slots) == 2
    assert tree.moved(PAGE, pages) == 0
    after = tree.held()
    assert after[PAGE].keys() == set(pages.values()) and after[SLOT].keys() == set(slots.values())
