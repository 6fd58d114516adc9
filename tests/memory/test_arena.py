"""The arena's bookkeeping: single operations by example, all of them together by a state machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from denim.errors import CheckpointError
from denim.memory.arena import Arena, Tag
from denim.memory.layout import PAGE, SLOT
from tests.memory.layouts import make_layout


def test_ids_name_their_slab():
    arena = Arena(make_layout(4, 1), 3)
    assert arena.alloc_many(PAGE, 6) == [0, 1, 2, 3, 4, 5]
    assert arena.alloc(SLOT) == 2
    assert arena.alloc(SLOT) is None
    assert arena.alloc_many(PAGE, 3) is None
    assert arena.alloc_many(PAGE, 2) == [6, 7]
    arena.check()


def test_slab_changes_class_when_empty():
    arena = Arena(make_layout(4, 2), 1)
    pages = arena.alloc_many(PAGE, 3)
    assert not arena.can_alloc({SLOT: 1})
    arena.release(PAGE, pages[:2])
    assert arena.alloc(SLOT) is None
    arena.release(PAGE, pages[2:])
    assert arena.alloc_many(SLOT, 2) == [0, 1]
    arena.check()


def test_slabs_are_reported_in_their_order():
    arena = Arena(make_layout(pages=4, slots=2), 3)
    assert arena.slabs() == [(None, 0, 0)] * 3
    pages = arena.alloc_many(PAGE, 3)
    arena.alloc(SLOT)
    assert arena.slabs() == [(PAGE, 3, 4), (SLOT, 1, 2), (None, 0, 0)]
    arena.release(PAGE, pages)
    assert arena.slabs() == [(None, 0, 0), (SLOT, 1, 2), (None, 0, 0)]


def test_use_gathers_in_partly_used_slabs():
    arena = Arena(make_layout(4, 1), 4)
    pages = arena.alloc_many(PAGE, 12)
    arena.release(PAGE, [pages[1], pages[6]])
    assert [arena.alloc(PAGE) for _ in range(3)] == [1, 6, 12]
    arena.release(PAGE, [12])
    assert arena.alloc(SLOT) == 3
    arena.check()


def test_shared_entry_is_free_after_its_last_holder():
    freed = []
    arena = Arena(make_layout(4, 1), 1, on_free=lambda name, ids: freed.append((name, ids)))
    pages = arena.alloc_many(PAGE, 2)
    arena.share(PAGE, pages)
    arena.release(PAGE, pages)
    assert freed == [] and arena.holders(PAGE, pages[0]) == 1
    arena.release(PAGE, pages)
    assert freed == [(PAGE, pages)] and arena.holders(PAGE, pages[0]) == 0
    with pytest.raises(KeyError):
        arena.release(PAGE, pages)


def test_can_alloc_answers_for_several_classes_at_once():
    """BS-06: right at pools of 1, 2, 3 and 4 slabs."""
    for slabs in (1, 2, 3, 4):
        arena = Arena(make_layout(4, 2), slabs)
        assert arena.can_alloc({SLOT: 1, PAGE: 4 * (slabs - 1)})
        assert not arena.can_alloc({SLOT: 1, PAGE: 4 * (slabs - 1) + 1})
        assert arena.can_alloc({SLOT: 2 * slabs}) and not arena.can_alloc({SLOT: 2 * slabs + 1})


def test_tags_name_both_numbers():
    arena = Arena(make_layout(4, 2), 1)
    slot = arena.alloc(SLOT)
    assert arena.tag(slot) == Tag(0, 0)
    arena.commit(slot, 1024)
    arena.expect(slot, 1024)
    with pytest.raises(CheckpointError, match=r"1024 tokens .* 1000 tokens"):
        arena.expect(slot, 1000)
    arena.advance_all([slot, -1, slot], records=3)
    with pytest.raises(CheckpointError, match="2 pending"):
        arena.expect(slot, 1024)
    arena.expect(slot, 1026)
    arena.release(SLOT, [slot])
    with pytest.raises(CheckpointError, match="free"):
        arena.expect(slot, 1024)
    with pytest.raises(CheckpointError, match="free"):
        arena.commit(slot, 1025)
    assert arena.alloc(SLOT) == slot and arena.tag(slot) == Tag(0, 0)


def test_records_are_written_when_the_ring_is_full():
    arena = Arena(make_layout(4, 2), 1)
    slot = arena.alloc(SLOT)
    arena.commit(slot, 10)
    tags = []
    for _ in range(4):
        arena.advance_all([slot], 3)
        tags.append(arena.tag(slot))
    assert tags == [Tag(10, 1), Tag(10, 2), Tag(13), Tag(13, 1)]
    arena.flushed(slot)
    assert arena.tag(slot) == Tag(14)


def test_stats_count_what_can_be_had():
    """ME-13: separate numbers for pages and slots, both linear in load."""
    arena = Arena(make_layout(10, 2), 5)
    for n in range(1, 4):
        arena.alloc_many(PAGE, 7)
        arena.alloc(SLOT)
        stats = arena.stats()
        assert stats["pages"]["used"] == 7 * n and stats["slots"]["used"] == n
    assert stats["slabs"] == {"total": 5, "used": 5, "cached": 0, "free": 0}
    assert stats["pages"] == {"total": 50, "used": 21, "cached": 0, "free": 9}
    assert stats["slots"] == {"total": 10, "used": 3, "cached": 0, "free": 1}
    assert arena.stats(cached={SLOT: 1})["slots"] == {"total": 10, "used": 2, "cached": 1, "free": 1}


@pytest.mark.parametrize("fault", ["double", "lost", "tag", "class"])
def test_check_finds_faults(fault):
    arena = Arena(make_layout(4, 2), 3)
    arena.alloc_many(PAGE, 3)
    slot = arena.alloc(SLOT)
    arena.check()
    if fault == "double":
        arena._free[0].append(0)
    elif fault == "lost":
        del arena._pools[PAGE].refs[1]
    elif fault == "tag":
        del arena._tags[slot]
    else:
        arena._owner[2] = arena._pools[PAGE]
    with pytest.raises(AssertionError):
        arena.check()


class ArenaMachine(RuleBasedStateMachine):
    """Random allocation, sharing and release against a plain model: a multiset of held ids per class."""

    @initialize(pages=st.integers(0, 5), slots=st.integers(0, 3), slabs=st.integers(1, 6))
    def start(self, pages, slots, slabs):
        if not pages and not slots:
            pages = 1
        self.counts = {name: n for name, n in ((PAGE, pages), (SLOT, slots)) if n}
        self.slabs = slabs
        self.freed: list[tuple[str, int]] = []
        self.arena = Arena(
            make_layout(pages, slots),
            slabs,
            on_free=lambda name, ids: self.freed.extend((name, i) for i in ids),
        )
        self.held = {name: Counter() for name in self.counts}

    def owner_of(self, slab):
        names = {n for n in self.counts for i in self.held[n] if i // self.counts[n] == slab}
        assert len(names) <= 1, f"slab {slab} serves {names}"
        return names.pop() if names else None

    def available(self, name):
        usable = sum(self.owner_of(slab) in (None, name) for slab in range(self.slabs))
        return usable * self.counts[name] - len(self.held[name])

    @rule(data=st.data(), n=st.integers(0, 12))
    def alloc(self, data, n):
        name = data.draw(st.sampled_from(sorted(self.counts)))
        available = self.available(name)
        assert self.arena.can_alloc({name: n}) == (n <= available)
        ids = self.arena.alloc_many(name, n)
        if n > available:
            assert ids is None
            return
        assert len(set(ids)) == n and not set(ids) & self.held[name].keys()
        self.held[name].update(ids)

    @rule(data=st.data())
    def can_alloc_tells_the_truth(self, data):
        need = {name: data.draw(st.integers(0, 8)) for name in self.counts}
        answer = self.arena.can_alloc(need)
        got = {name: self.arena.alloc_many(name, n) for name, n in need.items()}
        assert answer == all(ids is not None for ids in got.values())
        for name, ids in got.items():
            if ids:
                self.arena.release(name, ids)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), share=st.booleans())
    def share_or_release(self, data, share):
        name = data.draw(st.sampled_from([n for n in sorted(self.counts) if self.held[n]]))
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held[name])), unique=True, min_size=1))
        self.freed.clear()
        if share:
            self.arena.share(name, ids)
            self.held[name].update(ids)
        else:
            self.arena.release(name, ids)
            self.held[name] -= Counter(ids)
            assert self.freed == [(name, i) for i in ids if i not in self.held[name]]

    @invariant()
    def books_agree(self):
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        stats = self.arena.stats()
        for name, held in self.held.items():
            assert all(self.arena.holders(name, i) == n for i, n in held.items())
            assert stats[name + "s"]["used"] == len(held)
            assert stats[name + "s"]["free"] == self.available(name)

    def teardown(self):
        if hasattr(self, "arena"):
            for name, held in self.held.items():
                self.arena.release(name, list(held.elements()))
            self.arena.check()
            assert self.arena.stats()["slabs"]["free"] == self.slabs


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
