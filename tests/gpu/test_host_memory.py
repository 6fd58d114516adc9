"""Checkpoints between a CUDA device and pinned host memory: every byte comes back, in the order of the steps,
and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from denim.memory import host_copies
from denim.memory.checkpoint_form import CHECKPOINT_DTYPES, CheckpointForm
from denim.memory.host_memory import HostMemory
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.storage import Storage
from denim.memory.transfer import Transfer
from tests.memory.test_layout import QWEN_08B, TINY

pytestmark = pytest.mark.gpu


def make(spec=TINY, dtype: str = "auto", blocks: int = 400, slabs: int = 8) -> tuple[Storage, HostMemory]:
    storage = Storage(ArenaLayout.of(spec, page_size=4), slabs, device="cuda")
    form = CheckpointForm.of(storage.layout, dtype)
    return storage, HostMemory(form, blocks * form.block_bytes, storage, debug_poison=True)


def busy() -> torch.cuda.Event:
    """Work for the device for a while; the event says when it is done."""
    product = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        product = product @ product * 1e-3
    event = torch.cuda.Event()
    event.record()
    return event


def fill(storage: Storage, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for place in (*storage.layout.page_tensors, *storage.layout.slot_tensors):
        view = storage.kv(place.layer) if place.role == "kv" else storage.state(place.layer, place.role)
        view.copy_(torch.randn(view.shape, device="cuda", generator=generator))


@pytest.mark.parametrize("staging", [1000, 32 * 2**20])
@pytest.mark.parametrize("dtype", CHECKPOINT_DTYPES)
def test_out_and_in_beside_the_device_s_work(
    monkeypatch: pytest.MonkeyPatch, dtype: str, staging: int
) -> None:
    """Entries are overwritten right after a store, blocks are used again right after they are freed, and what
    is still on its way out is loaded already."""
    monkeypatch.setattr(host_copies, "STAGING_BYTES", staging)
    storage, host = make(dtype=dtype)
    pages = storage.layout.size_class(PAGE).count
    slots = storage.layout.size_class(SLOT).count
    ids = iter(range(10**6))
    for round_ in range(10):
        fill(storage, round_)
        out = torch.randperm(pages, generator=torch.Generator().manual_seed(round_)).tolist()
        kv = storage.kv(3)[out].clone()
        states = {
            (place.layer, place.role): storage.state(place.layer, place.role)[slots].clone()
            for place in storage.layout.slot_tensors
        }
        free = busy()
        store = Transfer(next(ids), slots, out, next(ids), [next(ids) for _ in out])
        host.store(store)
        fill(storage, 1000 + round_)
        back = [2 * pages + page for page in reversed(out)]
        key = next(ids)
        host.load(store._replace(key=key, slot=3 * slots, pages=back))
        waits = staging < 2**20  # so many small copies fill the driver's queue
        assert waits or round_ < 3 or not (host.arrived(key) or free.query()), (
            "the host waited for the device"
        )
        host.join()
        seen = storage.kv(3)[back] + 0
        torch.cuda.synchronize()
        assert waits or host.arrived(key)
        assert torch.equal(seen, kv)
        for (layer, role), before in states.items():
            after = storage.state(layer, role)[3 * slots]
            if dtype == "auto" or role != "recurrent":
                assert torch.equal(after, before)
            else:
                assert (after - before).abs().max() <= before.abs().max() * (0.51 / 127)
        host.free([store.host_slot, *store.host_pages])


def test_memory_is_pinned_where_it_lies_and_let_go() -> None:
    storage, host = make()
    assert host._blocks.is_pinned()
    host.store(Transfer(0, 0, [1, 2], 1, [2, 3]))
    torch.cuda.synchronize()
    assert torch.equal(host.page_bytes([2])[0], storage.parts(PAGE, [1])[0].cpu())
    del host
    again = HostMemory(CheckpointForm.of(storage.layout), 2**26, storage)
    assert again._blocks.is_pinned()


def test_speed() -> None:
    """A checkpoint of Qwen3.5-0.8B after 16k tokens; prints what each side waits for."""
    storage = Storage(ArenaLayout.of(QWEN_08B, page_size=16), 30, device="cuda")
    form = CheckpointForm.of(storage.layout)
    host = HostMemory(form, 2**30, storage)
    out = list(range(100, 1124))
    transfer = Transfer(0, 0, out, 0, list(range(1, 1025)))
    nbytes = form.slot_bytes + len(out) * form.page_bytes
    for _ in range(3):
        times = {}
        for way in (host.store, host.load):
            torch.cuda.synchronize()
            begin, after, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            begin.record()
            way(transfer)
            after.record()
            host.join()
            end.record()
            torch.cuda.synchronize()
            times[way.__name__] = (begin.elapsed_time(after), begin.elapsed_time(end))
        host._arrivals.clear()
    for name, (steps, whole) in times.items():
        print(
            f"{name}: {nbytes / 2**20:.0f} MiB, steps held up {steps:.2f} ms, all there after {whole:.2f} ms"
        )
    assert times["load"][0] < times["load"][1] / 2
