"""The rules of the cache by example. Names of cases refer to the list of hybrid-model cases."""

from __future__ import annotations

import pytest

from denim.cache.account import EVICTED, NO_CHECKPOINT, NO_MEMORY, ONE_TOKEN, REASONS
from denim.cache.node import as_tokens
from denim.cache.positions import JUNCTION, PROMPT_END
from denim.cache.prefix_cache import Namespace
from denim.memory.layout import SLOT
from tests.cache.memory import World
from tests.memory.layouts import make_layout


def test_the_same_prompt_again_computes_one_token() -> None:
    """PN-07, PH-02: no length is special, and no token is applied to a state twice."""
    for length in (2, 3, 4, 5, 8, 9, 16, 17):
        world = World(num_slabs=30)
        prompt = list(range(length))
        assert world.run(prompt, saves=(length - 1,)) == 0
        assert world.run(prompt, saves=(length - 1,)) == length - 1
        world.check()


def test_a_prompt_that_ends_at_a_checkpoint_does_not_use_it() -> None:
    world = World()
    world.run([1, 2, 3, 4, 5])
    assert world.run([1, 2, 3, 4, 5]) == 0
    assert world.cache.stats()["lost"] == {**dict.fromkeys(REASONS, 0), NO_CHECKPOINT: 4, ONE_TOKEN: 1}


def test_the_next_turn_begins_where_the_last_one_ended() -> None:
    """PN-04, OF-10: states of generated tokens are kept, at their exact position."""
    world = World(num_slabs=30)
    history: list[int] = []
    for turn in range(6):
        request = world.begin([*history, *[turn] * 5, 90 + turn])
        assert request.hit.position == len(history)
        world.compute(request, len(request.tokens))
        world.finish(request, donate=True)
        history = list(request.tokens)
    world.check()


def test_a_fork_leaves_the_other_branch_whole() -> None:
    """PN-16: H, H+X, H+Y, H+X+Z; H is hit from the second fork on, X's branch is still there."""
    world = World(num_slabs=40)
    head, x, y = list(range(10)), [70] * 7, [80] * 7
    assert world.run(head, saves=(9,)) == 0
    assert world.run(head + x) == 10
    assert world.run(head + y) == 10
    assert world.run(head + x + [5]) == 17
    world.check()


def test_a_shared_part_hits_on_its_third_sighting() -> None:
    """The second request leaves the first one's path, and saves a checkpoint at the junction."""
    world = World(num_slabs=40)
    shared = list(range(11))
    world.run(shared + [50] * 5)
    second = world.begin(shared + [60] * 5)
    assert (second.hit.position, second.hit.seen) == (0, 11)
    world.compute(second, second.hit.seen)
    assert world.save(second, JUNCTION)
    world.compute(second, 16)
    world.finish(second, donate=True)
    assert world.run(shared + [70] * 5) == 11
    world.check()


def test_siblings_hit_one_checkpoint_while_its_owner_runs_on() -> None:
    """PN-10, PH-05: none of them writes to it, whatever they write themselves."""
    world = World(num_slabs=40)
    shared = list(range(10))
    owner = world.begin(shared + [1] * 9)
    world.compute(owner, 10)
    assert world.save(owner)
    siblings = [world.begin(shared + [2 + i] * 3) for i in range(3)]
    assert [sibling.hit.position for sibling in siblings] == [10, 10, 10]
    world.check([owner, *siblings])
    for request in (owner, *siblings):
        world.compute(request, len(request.tokens))
    world.check_hit(
        world.cache.find(Namespace(), as_tokens([*shared, 99])), Namespace(), as_tokens([*shared, 99])
    )
    for request in (owner, *siblings):
        world.finish(request, donate=True)
    world.check()


def test_short_prompts_leave_nothing_that_others_could_match() -> None:
    """PH-08: no node of length 0, no state found at position 0."""
    world = World(num_slabs=40)
    for token in range(10):
        request = world.begin([token] * 2)
        if token % 2:
            world.compute(request, 1)
        world.finish(request, donate=bool(token % 2))
    assert world.run([50] * 12) == 0
    assert all(node.edge for node in world.cache.tree.nodes())


def test_namespaces_do_not_meet() -> None:
    world = World(num_slabs=40)
    world.run([1] * 8, namespace=Namespace("a"))
    assert world.run([1] * 9, namespace=Namespace("b")) == 0
    assert world.run([1] * 9, namespace=Namespace("a", adapter=1)) == 0
    assert world.run([1] * 9, namespace=Namespace("a")) == 8


def test_what_is_saved_after_a_reset_is_not_kept() -> None:
    """DS-11: states of old weights must not come back through a request that ran meanwhile."""
    world = World()
    request = world.begin([1] * 8)
    world.compute(request, 8)
    world.cache.reset()
    assert not world.finish(request, donate=True)
    assert world.cache.find(Namespace(), as_tokens([1] * 9)).seen == 0
    world.check()


def test_a_checkpoint_that_finds_no_memory_is_skipped_and_counted() -> None:
    """ME-07: an optimisation never fails a request."""
    world = World(num_slabs=2)  # the request's slot, and its pages
    request = world.begin([1] * 8)
    world.compute(request, 4)
    assert not world.save(request)
    assert world.cache.stats()["refused"] == 1
    world.compute(request, 8)
    world.finish(request, donate=False)
    again = world.begin([1] * 8)
    assert again is not None and again.hit.position == 0
    assert world.cache.stats()["lost"][NO_MEMORY] == 4
    world.finish(again, donate=False)
    world.check()


def test_memory_for_a_request_comes_before_any_checkpoint() -> None:
    world = World(num_slabs=3)  # a slot and three pages take two of them
    world.run([1] * 12)
    assert world.cache.tree.checkpoints == 1
    assert world.run([2] * 12) == 0
    assert world.cache.tree.checkpoints == 1 and world.cache.stats()["evicted"] == 1
    assert world.run([1] * 13) == 0
    assert world.cache.stats()["lost"][EVICTED] == 12
    world.check()


def test_evicted_and_saved_again() -> None:
    world = World(num_slabs=20)
    world.run([1] * 8)
    (node,) = world.cache.tree.nodes()
    world.cache.evict(node)
    assert world.run([1] * 8) == 0
    assert world.run([1] * 9) == 8
    world.check()


def test_evicting_under_a_running_request_leaves_its_pages() -> None:
    world = World(num_slabs=20)
    world.run([1] * 8)
    request = world.begin([1] * 12)
    world.cache.evict(next(iter(world.cache.tree.nodes())))
    world.compute(request, 12)
    assert world.finish(request, donate=True)
    assert world.run([1] * 13) == 12
    world.check()


def test_every_known_token_is_reused_or_has_one_reason() -> None:
    world = World(num_slabs=6)
    known = 0
    for round_ in range(30):
        tokens = [round_ % 3] * (6 + round_ % 5)
        hit = world.cache.find(Namespace(), as_tokens(tokens))
        known += hit.seen
        world.run(tokens)
    stats = world.cache.stats()
    assert stats["hit_tokens"] + sum(stats["lost"].values()) == known
    assert stats["evicted"] > 0 and stats["lost"][EVICTED] > 0


@pytest.mark.parametrize(("pages", "slots"), [(0, 1), (4, 0)])
def test_models_with_one_kind_of_memory(pages: int, slots: int) -> None:
    world = World(num_slabs=30, layout=make_layout(pages, slots))
    world.run([1] * 6)
    assert world.run([1] * 8) == 6
    assert world.run([1] * 10) == 8
    world.check()


def test_a_slot_that_stands_for_other_tokens_is_refused() -> None:
    from denim.errors import CheckpointError

    world = World()
    request = world.begin([1] * 8)
    world.compute(request, 8)
    with pytest.raises(CheckpointError):
        world.cache.save(
            Namespace(), as_tokens([1] * 7), request.pages, request.slot, PROMPT_END, request.lease
        )
    assert world.arena.holders(SLOT, request.slot) == 1
