"""The buffer's views and moves, on real (small) tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.storage import Storage
from tests.memory.test_layout import TINY


def make_storage(num_slabs: int = 3, **options) -> Storage:
    return Storage(ArenaLayout.of(TINY, page_size=4), num_slabs, **options)


@pytest.mark.parametrize("num_slabs", [1, 2, 3, 4])
def test_views_partition_the_buffer(num_slabs):
    """Every byte belongs to one tensor of one entry; BS-06: a pool of two entries is no special case."""
    storage = make_storage(num_slabs)
    layout = storage.layout
    for name, places, views in [
        (PAGE, layout.page_tensors, [storage.kv(3)]),
        (SLOT, layout.slot_tensors, [storage.state(p.layer, p.role) for p in layout.slot_tensors]),
    ]:
        size = layout.size_class(name)
        storage.buffer.zero_()
        for place, view in zip(places, views, strict=True):
            assert view.shape == (num_slabs * size.count, *place.shape)
            assert view.dtype == getattr(torch, place.dtype)
            view.fill_(1.0)
        ones = (storage.buffer.view(torch.float32) == 1.0).sum().item()
        assert ones * 4 == size.entry_bytes * size.count * num_slabs


def test_entry_is_where_the_layout_says():
    storage = make_storage()
    size = storage.layout.size_class(SLOT)
    place = storage.layout.slot_tensors[3]
    entry = 2 * size.count
    view = storage.state(place.layer, place.role)
    view[entry] = torch.randn(place.shape)
    start = entry * size.stride + place.offset
    seen = storage.buffer[start : start + place.bytes].view(torch.float32).view(place.shape)
    assert torch.equal(seen, view[entry])


def test_page_and_slot_of_other_slabs_do_not_touch():
    storage = make_storage()
    pages = storage.layout.size_class(PAGE).count
    slots = storage.layout.size_class(SLOT).count
    storage.state(2, "conv")[slots : 2 * slots] = 7.0
    storage.kv(3)[:pages] = 1.0
    storage.kv(3)[2 * pages :] = 2.0
    assert (storage.state(2, "conv")[slots : 2 * slots] == 7.0).all()


def test_save_load_and_copy_move_whole_entries():
    """PR-01: recurrent state and convolution window travel with the slot."""
    storage = make_storage(debug_poison=True)
    places = storage.layout.slot_tensors
    for i, place in enumerate(places):
        storage.state(place.layer, place.role)[0] = float(i)
    count = storage.layout.size_class(PAGE).count  # the pages lie in slab 1, the other slots in slab 2
    here, there = [count + 2, count + 1], [count + 3, count]
    storage.kv(3)[here[0]] = 4.0
    storage.kv(3)[here[1]] = 3.0
    slot, pages = storage.save(SLOT, [0]), storage.save(PAGE, here)
    assert slot.wait().shape == (storage.layout.size_class(SLOT).stride,)
    storage.poison(SLOT, [0])
    storage.poison(PAGE, here)
    first = 2 * storage.layout.size_class(SLOT).count
    storage.load(SLOT, [first], slot)
    storage.load(PAGE, there, pages)
    storage.copy(PAGE, [there[0]], [here[1]])
    for i, place in enumerate(places):
        assert (storage.state(place.layer, place.role)[first] == i).all()
    kv = storage.kv(3)
    assert (kv[there[0]] == 4.0).all() and (kv[there[1]] == 3.0).all() and (kv[here[1]] == 4.0).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_poison_is_nan_in_every_dtype(dtype):
    spec = dataclasses.replace(TINY, dtype=dtype)
    storage = Storage(ArenaLayout.of(spec, page_size=4), 2, debug_poison=True)
    assert torch.isnan(storage.kv(3).float()).all()
    assert torch.isnan(storage.state(0, "conv").float()).all()
    assert torch.isnan(storage.state(0, "recurrent").float()).all()


def test_retired_entries_keep_their_bytes_until_the_step_poisons_them():
    """DS-01: a freed slot becomes NaN, but a swap-out planned with the freeing still reads it."""
    storage = make_storage()
    storage.kv(3)[:] = 1.0
    storage.retire(PAGE, [1, 2])
    assert not torch.isnan(storage.kv(3)).any()
    storage.poison_retired()
    assert torch.isnan(storage.kv(3)[1:3]).all()
    assert not torch.isnan(storage.kv(3)[3]).any() and not torch.isnan(storage.kv(3)[0]).any()
    storage.kv(3)[:] = 1.0
    storage.poison_retired()
    assert not torch.isnan(storage.kv(3)).any()


@pytest.mark.slow
def test_entries_beyond_32_bit_offsets():
    """LC-06: the last page and slot of more than 2^31 elements. What is not touched takes no memory."""
    spec = dataclasses.replace(TINY, dtype="bfloat16", state_dtype="bfloat16")
    layout = ArenaLayout.of(spec, page_size=4)
    num_slabs = 2**32 // layout.slab_bytes + 3
    storage = Storage(layout, num_slabs)
    last, last_slot = (layout.size_class(name).count * num_slabs - 1 for name in (PAGE, SLOT))
    storage.kv(3)[last] = 3.0
    slot = last_slot - layout.size_class(SLOT).count  # of the slab before, as the last one has pages
    for i, place in enumerate(layout.slot_tensors):
        storage.state(place.layer, place.role)[slot] = float(i)
    storage.load(SLOT, [0], storage.save(SLOT, [slot]))
    storage.copy(PAGE, [last], [last - 1])
    assert (storage.kv(3)[last - 1] == 3.0).all()
    for i, place in enumerate(layout.slot_tensors):
        view = storage.state(place.layer, place.role)
        assert view[slot].storage_offset() > 2**31
        assert (view[slot] == i).all() and (view[0] == i).all()
    storage.poison(SLOT, [slot])
    assert torch.isnan(storage.state(0, "recurrent")[slot]).all()
    assert (storage.kv(3)[last - 1] == 3.0).all() and (storage.state(2, "conv")[0] == 5.0).all()


@pytest.mark.parametrize("moved_bytes", [1, 2**20])
def test_moved_entries(monkeypatch, moved_bytes):
    """In pieces or at once; what was left is retired, what was retired and holds something again is not."""
    monkeypatch.setattr("denim.memory.storage.MOVED_BYTES", moved_bytes)
    storage = Storage(ArenaLayout.of(TINY, page_size=4), 3, debug_poison=True)
    content = torch.randn(storage.kv(3)[:9].shape)
    storage.kv(3)[:9] = content
    storage.retire(PAGE, [10, 12, 13])
    storage.move(PAGE, [7, 2, 5], [10, 11, 12])
    storage.poison_retired()
    assert torch.equal(storage.kv(3)[[10, 11, 12]], content[[7, 2, 5]])
    assert torch.equal(storage.kv(3)[[0, 1, 3, 4, 6, 8]], content[[0, 1, 3, 4, 6, 8]])
    assert storage.kv(3)[[2, 5, 7, 13]].isnan().all()


def test_what_has_moved_is_not_poisoned_for_another_class_that_was_there() -> None:
    """A slot is freed, its slab is taken for pages, and one moves there, all within a step."""
    storage = make_storage(debug_poison=True)
    count, slots = (storage.layout.size_class(name).count for name in (PAGE, SLOT))
    moved = storage.kv(3)
    moved[0] = 1.0
    storage.retire(SLOT, list(range(slots, 2 * slots)))  # all of slab 1
    storage.move(PAGE, [0], [count])
    storage.poison_retired()
    assert (moved[count] == 1.0).all() and moved[0].isnan().all()
    assert moved[count + 1 : 2 * count].isnan().all()
