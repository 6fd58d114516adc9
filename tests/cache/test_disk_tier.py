"""The tier of files over host memory whose content is known: bounds, restarts, crashes, damaged files."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.prefix_peers import LeastRecent
from denim.cache.disk_tier import DiskTier
from denim.cache.node import as_tokens
from denim.cache.prefix_cache import Namespace
from denim.cache.tier import Tier
from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass
from denim.memory.prefix_files import PrefixFiles
from tests.memory.layouts import PAGE_SIZE

PAGE_BYTES, SLOT_BYTES = 64, 200
SPACE = Namespace()


def layout_of(slots: bool = True, pages: bool = True, slot_stride: int = SLOT_BYTES) -> ArenaLayout:
    """`slot_stride`: what a slot takes in the blocks of host memory."""
    sizes = {PAGE: (PAGE_BYTES * pages,) * 2, SLOT: (SLOT_BYTES * slots, slot_stride)}
    classes = tuple(SizeClass(name, *both, 1) for name, both in sizes.items() if both[0])
    return ArenaLayout(PAGE_SIZE, 64, classes, (), ())


class World:
    """Host memory, and files below it in `folder`. Content says which tokens it stands for."""

    def __init__(self, folder: Path, limit: int = 10**6, layout: ArenaLayout | None = None) -> None:
        self.layout = layout or layout_of()
        self.content: dict[int, bytearray] = {}
        self.threads = ThreadPoolExecutor(2)
        self.files = PrefixFiles(folder, {"model": "toy"})
        self.host = self.tier("host", 10**6, lambda ids: [self.content.pop(i, None) for i in ids], None)
        self.disk = DiskTier(
            self.files,
            limit,
            lambda on_free, has_room: self.tier("disk", limit, on_free, has_room),
            self.host,
            self,
            self.threads,
        )
        self.folder = folder

    def tier(self, name: str, capacity: int, on_free: Any, has_room: Any) -> Tier:
        return Tier(
            name, self.layout, capacity, 1000, lambda n: n, lambda worth: LeastRecent(), on_free, has_room
        )

    def close(self) -> None:
        self.disk.finish()
        self.threads.shutdown()
        self.files.close()

    # Host memory

    def buffer(self, entry: int, size: int) -> memoryview:
        return memoryview(self.content.setdefault(entry, bytearray(size)))

    def slot_buffers(self, entry: int) -> list[memoryview]:
        whole = self.buffer(entry, SLOT_BYTES)
        return [whole[:7], whole[7:]]

    def page_buffers(self, entry: int) -> list[memoryview]:
        return [self.buffer(entry, PAGE_BYTES)]

    def mark(self) -> None:
        return None

    def put(self, tokens: list[int], space: Namespace = SPACE) -> None:
        """A checkpoint in host memory, as if it had come from the device; and begin to write it."""
        ids = as_tokens(tokens)
        landing = self.host.land(space, ids, "boundary", None)
        assert landing is not None
        for place, entry in enumerate(landing.pages):
            if place >= landing.first:
                self.buffer(entry, PAGE_BYTES)[:] = self.page(tokens, place)
        if landing.slot >= 0:
            self.buffer(landing.slot, SLOT_BYTES)[:] = self.state(tokens)
        node = self.host.settle(landing)
        assert node is not None
        self.disk.write(space, ids, node)
        self.disk.finish()
        self.disk.check()

    @staticmethod
    def page(tokens: list[int], place: int) -> bytes:
        filled = bytes(tokens[place * PAGE_SIZE : (place + 1) * PAGE_SIZE])
        return filled.ljust(PAGE_BYTES, b"\0")

    @staticmethod
    def state(tokens: list[int]) -> bytes:
        return bytes(hash((tuple(tokens), i)) % 256 for i in range(SLOT_BYTES))

    def forget_host(self) -> None:
        for node in list(self.host.nodes()):
            self.host.drop(node)

    def get(self, tokens: list[int], space: Namespace = SPACE) -> int:
        """The position that a request of `tokens` finds in files, read to host memory and looked at."""
        ids = as_tokens(tokens)
        node = self.disk.find(space, ids)
        if node is None:
            return 0
        end = node.end
        assert self.disk.read(space, ids[:end], node)
        self.disk.finish()
        self.disk.check()
        self.host.check()
        there = self.host.at(space, ids[:end])
        if there is None:
            return -1
        for place, entry in enumerate(self.host.tree.pages_to(there)):
            filled = min(PAGE_SIZE, end - place * PAGE_SIZE)
            assert self.content[entry][:filled] == self.page(tokens[:end], place)[:filled]
        if there.checkpoint.slot >= 0:
            assert self.content[there.checkpoint.slot] == self.state(tokens[:end])
        return end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    world = World(folder)
    yield world
    world.close()


def again(world: World, **options: Any) -> World:
    """The same directory in a new process."""
    world.close()
    fresh = World(world.folder, **options)
    fresh.disk.check()
    return fresh


def tokens_of(n: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(n)]


@pytest.mark.parametrize(("slots", "pages"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17])
def test_written_restarted_and_read(folder: Path, length: int, slots: bool, pages: bool) -> None:
    layout = layout_of(slots, pages)
    world = World(folder, layout=layout)
    world.put(tokens_of(length))
    world = again(world, layout=layout)
    assert world.get([*tokens_of(length), 5]) == length
    assert world.get(tokens_of(length)) == 0, "one token is left to compute"
    world.close()


def test_turns_share_their_pages(world: World) -> None:
    """A longer one brings only what is new; a branch only what differs; both live on without the first."""
    base = tokens_of(18)
    long, branch = base + tokens_of(9, 50), base[:10] + tokens_of(9, 90)
    for tokens in (base, long, branch):
        world.put(tokens)
    rows = world.files.scan()[1]
    assert sorted(rows.values()) == [3, 3, 5]
    world.disk.discard(SPACE, as_tokens(base))
    world.disk.check()
    world = again(world)
    for tokens in (long, branch):
        assert world.get([*tokens, 1]) == len(tokens)
    assert world.get([*base, 1]) == 0
    world.close()


def test_namespaces_are_apart_and_come_back(world: World) -> None:
    """LO-06: salts and adapters, also after a restart; an adapter that files cannot name is not written."""
    for space in (Namespace("a"), Namespace(None, "adapter"), Namespace(None, ("no", "name"))):
        world.put(tokens_of(9), space)
    world = again(world)
    assert world.get(tokens_of(10), Namespace("a")) == 9
    assert world.get(tokens_of(10), Namespace(None, "adapter")) == 9
    for space in (Namespace("b"), Namespace(), Namespace("a", "adapter"), Namespace(None, ("no", "name"))):
        assert world.get(tokens_of(10), space) == 0
    world.close()


@pytest.mark.parametrize("slot_stride", [SLOT_BYTES, 8192], ids=["tight", "wide"])
def test_files_stay_within_their_bound(folder: Path, slot_stride: int) -> None:
    """Whole files count, headers too, and not blocks of host memory; the longest unused go, and pages with
    the last that needs them."""
    limit = 40_000
    world = World(folder, limit, layout_of(slot_stride=slot_stride))
    for first in range(30):
        world.put(tokens_of(40, first))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert size == world.disk.stats()["used_bytes"] <= limit
    stats = world.disk.stats()
    assert 4 < stats["checkpoints"] < 30 and stats["evicted"] == 30 - stats["checkpoints"]
    assert world.get([*tokens_of(40, 29), 1]) == 40 and world.get([*tokens_of(40, 0), 1]) == 0
    world = again(world, limit=limit // 2)
    assert 0 < world.disk.stats()["checkpoints"] < stats["checkpoints"]
    assert world.disk.stats()["used_bytes"] <= limit // 2
    world.close()


def test_a_used_file_is_not_written_again(world: World) -> None:
    """OF-17: reading and going on changes no file."""
    world.put(tokens_of(20))
    before = {path.name: path.read_bytes() for path in world.folder.iterdir()}
    for _ in range(3):
        world.forget_host()
        assert world.get([*tokens_of(20), 1]) == 20
    world.put(tokens_of(30))
    after = {path.name: path.read_bytes() for path in world.folder.iterdir()}
    assert before.items() <= after.items()


@pytest.mark.parametrize("lost", ["pages", "state"])
def test_half_of_a_checkpoint_is_none(world: World, lost: str) -> None:
    """OF-01, OF-05: a state without its pages, or pages without a state, are not counted as there; what is
    left of them goes."""
    world.put(tokens_of(10))
    world.put(tokens_of(20))
    world.close()
    (world.folder / f"000000000002-{lost}.safetensors").unlink()
    fresh = World(world.folder)
    fresh.disk.check()
    assert fresh.get([*tokens_of(20), 1]) == 10
    fresh.close()
    assert not list(world.folder.glob("000000000002-*"))


def test_a_damaged_file_takes_its_kin_along(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody fails for it: what stands on its pages is gone, the rest is there, and the log says why."""
    world.put(tokens_of(10))
    world.put(tokens_of(20))
    world.put(tokens_of(20, 77))
    path = world.folder / "000000000001-pages.safetensors"
    content = bytearray(path.read_bytes())
    content[-1 - 2 * PAGE_BYTES] ^= 1  # of the first page
    path.write_bytes(content)
    world = again(world)
    assert world.get([*tokens_of(20), 1]) == -1
    assert "computed instead" in caplog.text and "does not have its checksum" in caplog.text
    assert world.get([*tokens_of(20), 1]) == 0
    assert world.get([*tokens_of(20, 77), 1]) == 20
    assert world.disk.stats()["failed"] == 1
    world.close()


def test_a_full_disk_is_no_error(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixFiles, "_put", full)
        for first in range(3):
            world.put(tokens_of(10, first))
    assert world.disk.stats()["failed"] == 3
    assert caplog.text.count("could not be written") == 1, "said once"
    world.put(tokens_of(10, 9))
    assert world.get([*tokens_of(10, 9), 1]) == 10


def test_what_is_wrong_goes_from_files_too(world: World) -> None:
    world.put(tokens_of(10))
    world.disk.discard(SPACE, as_tokens(tokens_of(10)))
    assert world.get(tokens_of(11)) == 0
    world = again(world)
    assert world.get(tokens_of(11)) == 0
    world.close()


def test_what_turns_out_wrong_while_it_is_read_is_not_kept(world: World) -> None:
    world.put(tokens_of(10))
    world.forget_host()
    ids = as_tokens(tokens_of(10))
    node = world.disk.find(SPACE, as_tokens(tokens_of(11)))
    assert world.disk.read(SPACE, ids, node)
    world.disk._reading[0].job.finish()
    world.disk.discard(SPACE, ids)
    world.disk.finish()
    assert world.host.at(SPACE, ids) is None and world.get(tokens_of(11)) == 0
    world.host.check()


@pytest.mark.parametrize("how", ["discarded", "reset"])
def test_a_file_that_is_removed_while_it_is_read_is_not_damaged(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The thread that reads it comes last: nothing failed, and what shares its pages stands."""
    begun, longer = tokens_of(10), tokens_of(20)
    world.put(begun)
    world.put(longer)
    world.forget_host()
    removed, read_state = threading.Event(), world.files.read_state

    def comes_last(*given: Any) -> None:
        assert removed.wait(60)
        read_state(*given)

    monkeypatch.setattr(world.files, "read_state", comes_last)
    node = world.disk.find(SPACE, as_tokens([*longer, 1]))
    assert world.disk.read(SPACE, as_tokens(longer), node)
    if how == "discarded":
        world.disk.discard(SPACE, as_tokens(longer))
    else:
        world.disk.reset(files=True)
    world.disk._space.finish()
    removed.set()
    world.disk.finish()
    world.disk.check()
    assert world.disk.stats()["failed"] == 0
    assert world.get([*begun, 1]) == (10 if how == "discarded" else 0)


@pytest.mark.parametrize("files", [True, False])
def test_reset(world: World, files: bool) -> None:
    """A step that failed leaves files alone; who asks to forget everything gets just that."""
    world.put(tokens_of(10))
    world.disk.reset(files)
    world.disk.finish()
    world.disk.check()
    assert world.get(tokens_of(11)) == (0 if files else 10)
    assert bool(list(world.folder.glob("*.safetensors"))) == (not files)


def test_writes_that_a_reset_overtakes_leave_nothing(world: World) -> None:
    ids = as_tokens(tokens_of(10))
    landing = world.host.land(SPACE, ids, "boundary", None)
    node = world.host.settle(landing)
    world.disk.write(SPACE, ids, node)
    world.disk.reset(files=True)
    world.disk.finish()
    world.disk.check()
    assert world.get(tokens_of(11)) == 0 and not list(world.folder.glob("*.safetensors"))


@pytest.mark.parametrize("seed", range(8))
def test_conversations_at_random(folder: Path, seed: int) -> None:
    """They grow, branch, are asked for, called wrong, and met again by new processes, some of them after a
    crash or a loss of files; within little space."""
    chance = random.Random(seed)
    limit = chance.choice([20_000, 60_000, 10**6])
    layout = layout_of(*chance.choice([(True, True), (True, True), (True, False), (False, True)]))
    world = World(folder, limit, layout)
    known = [tokens_of(chance.randint(1, 12), first) for first in range(3)]
    found = 0
    for _ in range(70):
        base = chance.choice(known)
        turn = base[: chance.choice([len(base), chance.randint(1, len(base))])]
        turn = turn + tokens_of(chance.randint(1, 9), chance.randrange(200))
        what = chance.random()
        if what < 0.5:
            if world.host.at(SPACE, as_tokens(turn)) is None:
                world.put(turn)
                known.append(turn)
        elif what < 0.8:
            world.forget_host()
            found += world.get([*base, 1]) > 0
        elif what < 0.9:
            world.disk.discard(SPACE, as_tokens(base))
        else:
            world.close()
            files = sorted(folder.glob("*.safetensors"))
            for lost in chance.sample(files, min(len(files), chance.choice([0, 0, 1]))):
                lost.unlink()
            (folder / "000000999999-state.safetensors.tmp").write_bytes(b"half")
            world = World(folder, limit, layout)
        world.disk.check()
        assert world.disk.stats()["used_bytes"] <= limit
    assert found > 3
    world.close()
