"""Checkpoints in host memory: every byte comes back, whatever blocks it lay in; on a CPU. For CUDA see
`tests/gpu/test_host_memory.py`."""

from __future__ import annotations

import random

import pytest
import torch

from denim.errors import CapacityError
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.host_memory import HostMemory
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.storage import Storage
from denim.memory.transfer import Transfer
from tests.memory.test_layout import TINY


def make(blocks: int = 400, dtype: str = "auto", **options) -> tuple[Storage, HostMemory]:
    storage = Storage(ArenaLayout.of(TINY, page_size=4), 6)
    storage.buffer.random_(0, 256)
    form = CheckpointForm.of(storage.layout, dtype)
    return storage, HostMemory(form, blocks * form.block_bytes, storage, **options)


def content(storage: Storage, slot: int, pages: list[int], slot_bytes: int) -> list[torch.Tensor]:
    """What a checkpoint there consists of, as copies."""
    parts = [torch.cat(storage.parts(PAGE, pages))] if pages else []
    return parts + ([storage.parts(SLOT, [slot])[0][:slot_bytes].clone()] if slot >= 0 else [])


def test_what_goes_out_comes_back() -> None:
    """Many, in any order, in scattered blocks of memory that others have left."""
    storage, host = make(debug_poison=True)
    chance = random.Random(0)
    pages, slots = (6 * storage.layout.size_class(name).count for name in (PAGE, SLOT))
    ids, stored = iter(range(10**6)), {}
    for round_ in range(60):
        slot = chance.choice([-1, chance.randrange(slots // 2)])
        out = chance.sample(range(pages // 2), chance.randint(slot < 0, 7))
        key = Transfer(round_, slot, out, next(ids) if slot >= 0 else -1, [next(ids) for _ in out])
        stored[round_] = (key, content(storage, slot, out, host.form.slot_bytes))
        host.store(key)
        storage.buffer[: storage.buffer.numel() // 2].random_(0, 256)
        if len(stored) > 8:
            key, before = stored.pop(chance.choice(list(stored)))
            back = key._replace(
                slot=-1 if key.slot < 0 else slots // 2 + chance.randrange(slots // 2),
                pages=chance.sample(range(pages // 2, pages), len(key.pages)),
            )
            if back.slot >= 0:  # a slot and pages lie in one buffer
                host.load(back._replace(pages=[], host_pages=[], key=-1))
                after = content(storage, back.slot, [], host.form.slot_bytes)
                assert torch.equal(before[-1], after[-1]) and host.arrived(-1)
            host.load(back._replace(slot=-1, host_slot=-1))
            assert host.arrived(round_ if back.key == round_ else back.key)
            if key.pages:
                assert torch.equal(before[0], content(storage, -1, list(back.pages), 0)[0])
            host.free([*key.host_pages, *([key.host_slot] if key.host_slot >= 0 else [])])
    for key, _ in stored.values():
        host.free([*key.host_pages, *([key.host_slot] if key.host_slot >= 0 else [])])
    assert sorted(host._free) == list(range(host.num_blocks))


def test_freed_blocks_are_poisoned() -> None:
    _, host = make(debug_poison=True)
    host.store(Transfer(0, 0, [5], 1, [2]))
    blocks = [*host._of[1], *host._of[2]]
    host.free([1, 2])
    assert (host._blocks[blocks] == 0xFF).all()


def test_a_load_is_reported_once() -> None:
    _, host = make()
    host.store(Transfer(0, 0, [], 1, []))
    assert not host.arrived(0)
    host.load(Transfer(7, 3, [], 1, []))
    assert host.arrived(7) and not host.arrived(7)


def test_reset_frees_all() -> None:
    _, host = make(blocks=40)
    host.store(Transfer(0, 0, [5], 1, [2]))
    host.reset()
    assert len(host._free) == 40 and not host.arrived(0)


@pytest.mark.parametrize("limit", [1 << 62, 1 << 100])
def test_more_than_there_is(limit: int) -> None:
    storage = Storage(ArenaLayout.of(TINY, page_size=4), 1)
    with pytest.raises(CapacityError, match="host_memory=.* cannot be had from this machine.*lower it"):
        HostMemory(CheckpointForm.of(storage.layout), limit, storage)
