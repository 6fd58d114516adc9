from __future__ import annotations

import pytest

from denim.cache.expected import Expected
from denim.cache.node import as_tokens
from denim.cache.prefix_cache import Namespace
from tests.cache.memory import World
from tests.cache.orders import ORDERS


def at(world: World, tokens: list[int]):
    """The node that ends with these tokens."""
    (node,) = world.cache.tree.walk(Namespace(), as_tokens(tokens)).nodes[-1:]
    assert node.end == len(tokens)
    return node


def victims(world: World) -> list[int]:
    """First tokens of the checkpoints in the order in which they go."""
    gone = []
    while (victim := world.order.victim(None)) is not None:
        gone.append(victim.path()[0].edge[0])
        world.cache.evict(victim)
        world.check()
    return gone


def test_all_leave_at_once_in_their_order() -> None:
    """Each is offered to a lower tier, as one alone is."""
    ways = []
    for leave in (victims, lambda world: world.cache.evict_all()):
        world = World(num_slabs=60, order="lru")
        for first in (2, 1, 3):
            world.run([first] * 8)
        offered: list[int] = []
        world.cache.leaving = lambda node, offered=offered: offered.append(node.path()[0].edge[0])
        leave(world)
        world.check()
        assert world.cache.tree.checkpoints == 0
        ways.append(offered)
    assert ways == [[2, 1, 3]] * 2


def test_lru_goes_by_last_use() -> None:
    world = World(num_slabs=60, order="lru")
    for first in (1, 2, 3):
        world.run([first] * 8)
    world.cache.begin(
        world.cache.find(Namespace(), as_tokens([1] * 9)), as_tokens([1] * 9)
    )  # a use, and a user
    assert victims(world) == [2, 3, 1]


@pytest.mark.parametrize("order", ["greedy dual", "expected"])
def test_what_saves_more_per_byte_stays_longer(order: str) -> None:
    """A long prefix saves more for each byte of its slot and pages, as FLOPs grow faster than tokens."""
    world = World(num_slabs=200, order=order)
    for first, length in ((1, 60), (2, 8), (3, 30)):
        world.run([first] * length)
    assert victims(world) == [2, 3, 1]


@pytest.mark.parametrize("order", ORDERS)
def test_those_of_running_requests_go_last_and_keep_is_kept(order: str) -> None:
    world = World(num_slabs=60, order=order)
    world.run([1] * 8)
    request = world.begin([1] * 9)
    world.run([2] * 40)
    assert world.order.victim(None) is at(world, [2] * 40)
    assert world.order.victim(keep=at(world, [2] * 40)) is at(world, [1] * 8)
    world.cache.evict(at(world, [2] * 40))
    assert world.order.victim(None) is at(world, [1] * 8)
    assert world.order.victim(keep=at(world, [1] * 8)) is None
    world.finish(request, donate=False)


def test_greedy_dual_ages() -> None:
    """A small one that is used now outlives a large one that was worth more long ago."""
    world = World(num_slabs=400, order="greedy dual")
    world.run([1] * 40)
    for first in range(100, 130):
        world.run([first] * 60)
        world.cache.evict(at(world, [first] * 60))
    world.run([2] * 20)
    assert victims(world) == [1, 2]


def test_one_behind_which_a_deeper_one_stands_goes_first() -> None:
    world = World(num_slabs=60)
    world.run([1] * 8)
    world.run([1] * 16)
    assert world.order.victim(None) is at(world, [1] * 8)


def test_expected_learns_which_kind_is_used() -> None:
    """Marks are used every time, prompt ends never: soon the one of a mark outlives the larger prompt end."""
    world = World(num_slabs=400)
    for round_ in range(30):
        base = 3 * round_
        request = world.begin([base] * 8)
        world.compute(request, 6)
        world.save(request, "mark")
        world.finish(request, donate=False)
        world.clock.now += 20
        world.finish(world.begin([base] * 6 + [1000]), donate=False)
        other = world.begin([base + 1] * 16)
        world.compute(other, 15)
        world.save(other, "prompt end")
        world.finish(other, donate=False)
        world.clock.now += 300
    marked, end = world.begin([9001] * 8), world.begin([9002] * 16)
    world.compute(marked, 6)
    world.save(marked, "mark")
    world.compute(end, 15)
    world.save(end, "prompt end")
    for request in (marked, end):
        world.finish(request, donate=False)
    assert isinstance(world.order, Expected)
    assert world.order.price(at(world, [9001] * 6)) > world.order.price(at(world, [9002] * 15))


def test_a_use_that_an_evicted_one_would_have_had_is_learned() -> None:
    world = World(num_slabs=400)
    for round_ in range(20):
        world.run([round_] * 8)
        world.cache.evict(at(world, [round_] * 8))
        world.clock.now += 5
        assert world.run([round_] * 8 + [99]) == 0
    fresh = World(num_slabs=400)
    for one in (world, fresh):
        one.run([500] * 8)
    rates = [one.order.price(at(one, [500] * 8)) for one in (world, fresh)]
    assert rates[0] > 1.3 * rates[1]


def test_what_would_not_pay_is_not_saved() -> None:
    """A refused checkpoint leaves all others alone."""
    world = World(num_slabs=5)  # two checkpoints, a running slot, and two slabs of pages
    for first in (1, 2):
        world.run([first] * 8)
    before = world.cache.tree.checkpoints
    request = world.begin([3] * 8)
    world.compute(request, 1)
    assert not world.save(request)
    assert world.cache.tree.checkpoints == before and world.cache.stats()["refused"] == 1
    world.finish(request, donate=False)


def test_no_ids_no_notes() -> None:
    """What left the tree is not kept alive by the order."""
    world = World(num_slabs=200, ids_limit=0)
    for first in range(50):
        world.run([first] * 8)
        world.cache.evict(at(world, [first] * 8))
    world.run([99] * 4)
    assert len(world.order._gone) <= 8
