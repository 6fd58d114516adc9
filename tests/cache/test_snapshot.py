"""A snapshot says what stands in the tree, and can be sent as JSON."""

from __future__ import annotations

import json

import pytest

from denim.cache.account import EVICTED
from denim.cache.prefix_cache import Namespace
from denim.cache.snapshot import snapshot
from denim.memory.layout import PAGE, SLOT
from tests.cache.memory import World


def grown() -> World:
    """Ten tokens with a checkpoint, two branches behind them, and another user's prompt."""
    world = World(num_slabs=60)
    head = list(range(10))
    world.run([*head, 50])
    world.run([*head, 60, 61], saves=(10,))
    world.run([*head, 70, 71])
    world.run([1, 2, 3], namespace=Namespace("a secret"))
    return world


def test_every_node_is_named_with_its_parent_and_what_it_holds() -> None:
    world = grown()
    shown = snapshot(world.cache)
    assert json.loads(json.dumps(shown)) == shown
    for node in shown["nodes"]:
        above = 0 if node["parent"] is None else shown["nodes"][node["parent"]]["end"]
        assert node["start"] == above < node["end"]
    ends = {(node["namespace"], node["end"]): node for node in shown["nodes"]}
    assert ends[0, 10]["checkpoint"] == {"kind": "prompt end", "hits": 1} and ends[0, 10]["below"] == 4
    assert ends[0, 10]["pages"] == 3
    page, slot = (world.layout.size_class(name).stride for name in (PAGE, SLOT))
    assert ends[0, 10]["bytes"] == 3 * page + slot
    held = {name: sum(entries.values()) for name, entries in world.cache.tree.held().items()}
    assert sum(node["bytes"] for node in shown["nodes"]) == held[PAGE] * page + held[SLOT] * slot
    assert shown["by_kind"] == {"prompt end": 1, "generation end": 4}
    assert shown["account"] == world.cache.stats() and shown["left_out"] == 0


def test_no_salt_and_no_token_leaves_the_cache() -> None:
    shown = snapshot(grown().cache)
    assert shown["namespaces"] == [{"salted": False, "adapter": None}, {"salted": True, "adapter": None}]
    assert "secret" not in json.dumps(shown)
    assert not any("ids" in key or "tokens" in key for node in shown["nodes"] for key in node)


def test_what_was_lost_and_who_runs_is_shown() -> None:
    world = grown()
    request = world.begin([*range(10), 80])
    node = request.hit.node
    assert snapshot(world.cache)["nodes"][0]["running"] == 1
    world.cache.evict(node)
    shown = snapshot(world.cache)["nodes"][0]
    assert (shown["checkpoint"], shown["lost"]) == (None, EVICTED)
    world.finish(request, donate=False)


def test_a_large_tree_is_cut_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    world = grown()
    whole = snapshot(world.cache)
    monkeypatch.setattr("denim.cache.snapshot.MOST_NODES", 2)
    cut = snapshot(world.cache)
    assert cut["nodes"] == whole["nodes"][:2]
    assert cut["left_out"] == len(whole["nodes"]) - 2 and cut["by_kind"] == whole["by_kind"]
