"""What stands in the prefix tree at this moment, as plain JSON values for whoever shows it.

Owns the form of a snapshot, which `denim cache inspect` and the dashboard draw. Changes nothing. Holds no
token ids, which are users' texts, and no salts, which keep users apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from denim.cache.node import Node
from denim.cache.prefix_cache import Namespace, PrefixCache
from denim.memory.layout import PAGE, SLOT

FORM = 1
"""Number of the form; it grows when a key changes its meaning."""

MOST_NODES = 2000
"""Nodes that are listed: a tree of 10,000 makes megabytes of JSON."""


def snapshot(cache: PrefixCache) -> dict[str, Any]:
    """The tree of `cache`; to be called between two steps. O(nodes).

    form, policy, page_size (tokens), page_bytes, slot_bytes; account: as `PrefixCache.stats`; by_kind:
    checkpoints by why they were saved; namespaces: {salted, adapter} of each; nodes: at most `MOST_NODES`,
    the shallow ones first, parents before children; left_out: how many more there are.

    A node: parent (its place in `nodes`; None below a root), namespace (its place in `namespaces`), start and
    end (tokens), pages, checkpoint ({kind, hits}, hits being the requests that began from it; None: there is
    none), bytes (of checkpoint and pages), below (checkpoints here and deeper), running (requests that began
    here or deeper), lost (why a checkpoint that stood or was wanted here does not; None).
    """
    layout = cache.tree.layout
    page, slot = layout.stride(PAGE), layout.stride(SLOT)
    roots = cache.tree.roots()
    waiting: deque[tuple[Node, int | None, int]] = deque(
        (child, None, place) for place, root in enumerate(roots.values()) for child in root.children.values()
    )
    nodes: list[dict[str, Any]] = []
    by_kind: Counter[str] = Counter()
    seen = 0
    while waiting:
        node, parent, namespace = waiting.popleft()
        seen += 1
        checkpoint = node.checkpoint
        if checkpoint is not None:
            by_kind[checkpoint.kind] += 1
        own = len(nodes)
        if own < MOST_NODES:
            nodes.append(
                {
                    "parent": parent,
                    "namespace": namespace,
                    "start": node.start,
                    "end": node.end,
                    "pages": len(node.pages),
                    "checkpoint": None
                    if checkpoint is None
                    else {"kind": checkpoint.kind, "hits": checkpoint.hits},
                    "bytes": len(node.pages) * page + (checkpoint is not None) * slot,
                    "below": node.below,
                    "running": node.users,
                    "lost": node.lost,
                }
            )
        waiting.extend((child, own, namespace) for child in node.children.values())
    return {
        "form": FORM,
        "policy": cache.policy.name,
        "page_size": layout.page_size,
        "page_bytes": page,
        "slot_bytes": slot,
        "account": cache.stats(),
        "by_kind": dict(by_kind),
        "namespaces": [_shown(name) for name in roots],
        "nodes": nodes,
        "left_out": seen - len(nodes),
    }


def children_by_node(nodes: Sequence[Mapping[str, Any]]) -> dict[int | None, list[int]]:
    """Places of a snapshot's `nodes` by that of their parent (None: below a root), the busiest first."""
    children: dict[int | None, list[int]] = {}
    for place, node in enumerate(nodes):
        children.setdefault(node["parent"], []).append(place)
    for siblings in children.values():
        siblings.sort(key=lambda n: (-nodes[n]["running"], -nodes[n]["below"], -nodes[n]["end"]))
    return children


def _shown(namespace: Hashable) -> dict[str, Any]:
    assert isinstance(namespace, Namespace)
    adapter = namespace.adapter
    return {"salted": namespace.salt is not None, "adapter": None if adapter is None else str(adapter)}
