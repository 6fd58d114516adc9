from __future__ import annotations

from dataclasses import fields

import pytest

from denim.cache.node import SPLIT, Checkpoint, Node, as_tokens, split

PAGE = 4


def chain(*edges: list[int]) -> list[Node]:
    """A root and a path of nodes below it, each holding pages numbered from 100 times its place."""
    nodes = [Node(None, 0, as_tokens([]))]
    for place, edge in enumerate(edges, 1):
        parent = nodes[-1]
        first, end = parent.end // PAGE, -(-(parent.end + len(edge)) // PAGE)
        node = Node(parent, parent.end, as_tokens(edge), [100 * place + i for i in range(first, end)])
        parent.children[edge[0]] = node
        nodes.append(node)
    return nodes


def test_every_field_has_a_rule() -> None:
    assert SPLIT.keys() == {field.name for field in fields(Node)}


def test_the_new_parent_gets_only_what_is_true_of_it() -> None:
    """What is said of a node's end stays there; counts over the subtree hold for both."""
    _, node = chain(list(range(10)))
    child = Node(node, 10, as_tokens([99]))
    node.children[99] = child
    checkpoint = Checkpoint(5, "mark")
    node.checkpoint, node.below, node.users, node.lost = checkpoint, 2, 1, "evicted"
    root = node.parent
    upper = split(node, 6, PAGE)
    assert (upper.start, upper.end, node.start, node.end) == (0, 6, 6, 10)
    assert upper.checkpoint is None and upper.lost is None and upper.wait is None
    assert node.checkpoint is checkpoint and node.lost == "evicted"
    assert (upper.below, upper.users, node.below, node.users) == (2, 1, 2, 1)
    assert node.children == {99: child} and upper.children == {6: node}
    assert root.children == {0: upper} and upper.parent is root and node.parent is upper


@pytest.mark.parametrize("at", range(1, 12))
def test_pages_cover_both_parts_and_meet_in_the_one_across_the_cut(at: int) -> None:
    _, node = chain(list(range(12)))
    upper = split(node, at, PAGE)
    assert upper.pages == [100 + i for i in range(-(-at // PAGE))]
    assert node.pages == [100 + i for i in range(at // PAGE, 3)]


@pytest.mark.parametrize("at", [6, 7, 8, 9, 12])
def test_an_edge_that_begins_inside_a_page(at: int) -> None:
    _, _, node = chain([1] * 5, [2] * 8)
    assert node.pages == [201, 202, 203]
    upper = split(node, at, PAGE)
    assert upper.pages == [200 + i for i in range(1, -(-at // PAGE))]
    assert node.pages == [200 + i for i in range(at // PAGE, 4)]


def test_path_and_ancestors() -> None:
    root, a, b = chain([1, 2], [3])
    assert b.path() == [a, b] and root.path() == [] and list(b.ancestors()) == [a, root]
