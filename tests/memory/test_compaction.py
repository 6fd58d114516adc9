"""Compaction by example, and among all other operations by a state machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from denim.memory.arena import Arena, Tag
from denim.memory.compaction import Compactor, Move
from denim.memory.layout import PAGE, SLOT
from tests.memory.layouts import make_layout


class Table:
    """A holder of one reference to each of its entries."""

    def __init__(self, name: str, ids: list[int]) -> None:
        self.name = name
        self.ids = ids

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        if name != self.name:
            return 0
        changed = sum(entry in targets for entry in self.ids)
        self.ids = [targets.get(entry, entry) for entry in self.ids]
        return changed


def scattered(pages_held: int, slabs: int = 4) -> tuple[Arena, Compactor, Table]:
    """`slabs` slabs of 4 pages or 1 slot, the first `pages_held` pages of each of which are held."""
    arena = Arena(make_layout(4, 1), slabs)
    pages = arena.alloc_many(PAGE, 4 * slabs)
    gone = [page for page in pages if page % 4 >= pages_held]
    arena.release(PAGE, gone)
    table = Table(PAGE, [page for page in pages if page not in gone])
    compactor = Compactor(arena)
    compactor.watch(table)
    return arena, compactor, table


def test_the_emptiest_slab_moves_into_the_fullest() -> None:
    arena, compactor, table = scattered(2)
    arena.release(PAGE, [5])  # slab 1 has one page left, the others two
    table.ids.remove(5)
    assert arena.alloc(SLOT) is None
    assert compactor.make_room({SLOT: 1})
    assert arena.alloc(SLOT) == 1
    assert table.ids[2] in (2, 3)
    assert compactor.take() == [Move(PAGE, 4, table.ids[2])]
    assert compactor.take() == []
    arena.check()


def test_nothing_moves_to_where_another_class_is_still_read() -> None:
    """A slab is emptied of pages and taken for slots within one step: its pages are read when the step runs,
    so no slot may come there before."""
    arena = Arena(make_layout(4, 2), 3)
    compactor = Compactor(arena)
    slots = arena.alloc_many(SLOT, 2)  # slab 0
    pages = arena.alloc_many(PAGE, 5)  # slabs 1 and 2
    arena.release(SLOT, slots[1:])
    arena.release(PAGE, pages[:1])
    held = {SLOT: Table(SLOT, slots[:1]), PAGE: Table(PAGE, pages[1:])}
    for table in held.values():
        compactor.watch(table)
    assert compactor.make_room({SLOT: 2})
    held[SLOT].ids += arena.alloc_many(SLOT, 2)
    arena.release(SLOT, [held[SLOT].ids.pop(1)])
    assert {slot // 2 for slot in held[SLOT].ids} == {0, 2}
    assert not compactor.make_room({PAGE: 1})  # one of two slabs with a slot each could be emptied
    (move,) = compactor.take()
    assert (move.name, move.source // 4, move.target // 4) == (PAGE, 2, 1)
    assert compactor.make_room({PAGE: 1})
    arena.check()


def test_nothing_moves_when_there_is_room() -> None:
    _, compactor, table = scattered(2)
    before = list(table.ids)
    assert compactor.make_room({PAGE: 8})
    assert table.ids == before and compactor.take() == []


@pytest.mark.parametrize(
    ("slots", "pages", "fits"), [(2, 0, True), (3, 0, False), (1, 4, True), (1, 5, False)]
)
def test_room_is_exact(slots: int, pages: int, fits: bool) -> None:
    """Eight pages held in four slabs: two slabs' worth are free."""
    arena, compactor, table = scattered(2)
    before = list(table.ids)
    assert compactor.make_room({SLOT: slots, PAGE: pages}) is fits
    assert (table.ids == before) is not fits
    if fits:
        assert arena.alloc_many(SLOT, slots) is not None and arena.alloc_many(PAGE, pages) is not None
    arena.check()


def test_slots_move_with_what_they_stand_for() -> None:
    arena = Arena(make_layout(4, 2), 3)
    slots = arena.alloc_many(SLOT, 6)
    for slot in slots:
        arena.commit(slot, 10 + slot)
    arena.release(SLOT, [slots[1], slots[4]])
    table = Table(SLOT, [slots[0], slots[2], slots[3], slots[5]])
    compactor = Compactor(arena)
    compactor.watch(table)
    assert compactor.make_room({PAGE: 4})
    assert [arena.tag(slot) for slot in table.ids] == [Tag(10), Tag(12), Tag(13), Tag(15)]
    assert arena.alloc_many(PAGE, 4) is not None
    arena.check()


def test_a_shared_entry_is_moved_once_for_all_its_holders() -> None:
    arena, compactor, table = scattered(1, slabs=2)
    arena.share(PAGE, table.ids)
    other = Table(PAGE, list(table.ids))
    compactor.watch(other)
    assert compactor.make_room({SLOT: 1})
    (move,) = compactor.take()
    assert arena.holders(PAGE, move.target) == 2
    assert other.ids == table.ids and move.target in table.ids


def test_a_reference_that_nobody_owns_is_a_bug() -> None:
    arena, compactor, _ = scattered(1, slabs=2)
    arena.share(PAGE, [0, 4])
    with pytest.raises(AssertionError, match="1 reference"):
        compactor.make_room({SLOT: 1})


def test_until_a_step_runs_nothing_moves_twice() -> None:
    """A moved entry stays, and the places that entries come from take nothing."""
    arena, compactor, table = scattered(1)
    assert compactor.make_room({SLOT: 1})
    first = dict(zip(table.ids, compactor.sources(PAGE, table.ids), strict=True))
    assert compactor.make_room({SLOT: 2})
    moves = compactor.take()
    assert len(moves) == 2
    assert not {move.source for move in moves} & {move.target for move in moves}
    assert {move.target for move in moves} >= {new for new, old in first.items() if new != old}
    arena.check()


def test_where_content_lies_until_the_step_runs() -> None:
    _, compactor, table = scattered(1, slabs=2)
    before = list(table.ids)
    assert compactor.make_room({SLOT: 1})
    assert table.ids != before and compactor.sources(PAGE, table.ids) == before
    compactor.take()
    assert compactor.sources(PAGE, table.ids) == table.ids


def test_what_was_released_meanwhile_is_not_moved() -> None:
    arena, compactor, table = scattered(1, slabs=2)
    assert compactor.make_room({SLOT: 1})
    arena.release(PAGE, table.ids)
    assert compactor.take() == []


class CompactionMachine(RuleBasedStateMachine):
    """All operations at random against a plain model: who holds which value. Values are written, and moves
    carried out, when a step runs, as the runner does; until then they are read where they lay before."""

    @initialize(
        pages=st.integers(1, 6),
        slots=st.integers(1, 4),
        slabs=st.integers(2, 7),
        name=st.sampled_from([PAGE, SLOT]),
        data=st.data(),
    )
    def start(self, pages: int, slots: int, slabs: int, name: str, data: st.DataObject) -> None:
        """Begins with one class all over the arena, and holes."""
        self.counts = {PAGE: pages, SLOT: slots}
        self.slabs = slabs
        self.arena = Arena(make_layout(pages, slots), slabs)
        self.compactor = Compactor(self.arena)
        self.held: dict[str, list[tuple[int, int]]] = {PAGE: [], SLOT: []}  # references: (entry, value)
        self.bytes: dict[tuple[str, int], int] = {}
        self.written: dict[tuple[str, int], int] = {}  # by the step that comes next
        self.values = itertools.count()
        self.compactor.watch(self)
        total = slabs * self.counts[name]
        self.alloc(name, total)
        stay = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
        kept = [entry for entry in range(total) if stay[entry]]
        self.arena.release(name, [entry for entry in range(total) if entry not in kept])
        self.held[name] = [pair for pair in self.held[name] if pair[0] in kept]
        self.written = {place: value for place, value in self.written.items() if place[1] in kept}

    def moved(self, name: str, targets: Mapping[int, int]) -> int:
        before = self.held[name]
        self.held[name] = [(targets.get(entry, entry), value) for entry, value in before]
        for entry in targets:
            if (name, entry) in self.written:
                self.written[name, targets[entry]] = self.written.pop((name, entry))
        return sum(entry in targets for entry, _ in before)

    @rule(name=st.sampled_from([PAGE, SLOT]), n=st.integers(1, 9))
    def some_more(self, name: str, n: int) -> None:
        self.alloc(name, n)

    def alloc(self, name: str, n: int) -> None:
        for entry in self.arena.alloc_many(name, n) or ():
            value = next(self.values)
            self.written[name, entry] = value
            self.held[name].append((entry, value))
            if name == SLOT:
                self.arena.commit(entry, value)

    @rule(data=st.data(), name=st.sampled_from([PAGE, SLOT]), share=st.booleans())
    def share_or_release(self, data: st.DataObject, name: str, share: bool) -> None:
        if not self.held[name]:
            return
        for at in sorted(data.draw(st.sets(st.integers(0, len(self.held[name]) - 1))), reverse=True):
            entry, value = self.held[name][at]
            if share:
                self.arena.share(name, [entry])
                self.held[name].append((entry, value))
                continue
            self.arena.release(name, [entry])
            del self.held[name][at]
            if not self.arena.holders(name, entry):
                self.written.pop((name, entry), None)

    @rule(more=st.integers(1, 3), take=st.booleans())
    def squeeze(self, more: int, take: bool) -> None:
        """Ask for more of a class than there is without moves, where the other has a slab's worth free."""
        for name, other in ((PAGE, SLOT), (SLOT, PAGE)):
            if self.arena.free_entries(other) >= self.counts[other]:
                more += self.arena.stats()[f"{name}s"]["free"]
                self.make_room(*((more, 0) if name == PAGE else (0, more)))
                if take:
                    self.alloc(name, more)
                return

    @rule(pages=st.integers(0, 12), slots=st.integers(0, 6))
    def some_room(self, pages: int, slots: int) -> None:
        self.make_room(pages, slots)

    def make_room(self, pages: int, slots: int) -> None:
        need = {PAGE: pages, SLOT: slots}
        used = {name: len({entry for entry, _ in held}) for name, held in self.held.items()}
        packed = sum(-(-(used[name] + n) // self.counts[name]) for name, n in need.items())
        before = {name: list(held) for name, held in self.held.items()}
        fresh = not self.compactor._pending
        done = self.compactor.make_room(need)
        assert done == self.arena.can_alloc(need)
        assert not done or packed <= self.slabs
        if fresh:
            assert done == (packed <= self.slabs), "there would have been room"
        if not done:
            assert self.held == before

    @rule(backwards=st.booleans())
    def step(self, backwards: bool) -> None:
        moves = self.compactor.take()
        assert not {move[:2] for move in moves} & {(move.name, move.target) for move in moves}
        for move in reversed(moves) if backwards else moves:
            if (move.name, move.source) in self.bytes:
                self.bytes[move.name, move.target] = self.bytes[move.name, move.source]
        self.bytes |= self.written
        self.written.clear()

    @invariant()
    def every_reference_leads_to_its_value(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        for name, held in self.held.items():
            for entry, value in held:
                (source,) = self.compactor.sources(name, [entry])
                assert self.written.get((name, entry), self.bytes.get((name, source))) == value
                if name == SLOT:
                    self.arena.expect(entry, value)


TestCompactionMachine = CompactionMachine.TestCase
TestCompactionMachine.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
