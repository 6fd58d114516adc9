"""The arena's buffer on a CUDA device: pinned saves, and views beyond 32-bit offsets."""

from __future__ import annotations

import time

import pytest
import torch

from denim.memory import host_copies
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.storage import Storage
from tests.memory.test_layout import QWEN_08B, TINY

pytestmark = pytest.mark.gpu


def test_save_and_load_through_pinned_memory():
    storage = Storage(ArenaLayout.of(TINY, page_size=4), 3, device="cuda", debug_poison=True)
    count = storage.layout.size_class(PAGE).count
    content = torch.randn(storage.kv(3)[:count].shape, device="cuda")
    storage.kv(3)[:count] = content
    ids = [0, 1, 2, 4, 3]
    saved = storage.save(PAGE, ids)
    assert saved.content.is_pinned() and saved.content.device.type == "cpu"
    storage.poison(PAGE, ids)
    targets = [count + i for i in (3, 0, 1, 2, 4)]
    storage.load(PAGE, targets, saved)
    assert torch.equal(storage.kv(3)[targets], content[ids])
    assert torch.isnan(storage.kv(3)[ids]).all()


def test_last_entries_of_a_buffer_beyond_32_bit_offsets():
    layout = ArenaLayout.of(QWEN_08B, page_size=16)
    num_slabs = 2**33 // layout.slab_bytes + 2  # 2^32 bfloat16 elements and more
    storage = Storage(layout, num_slabs, device="cuda")
    last = layout.size_class(PAGE).count * num_slabs - 1
    for layer in QWEN_08B.attention_layers:
        storage.kv(layer)[last] = float(layer)
    storage.copy(PAGE, [last], [last - 1])
    for layer in QWEN_08B.attention_layers:
        assert (storage.kv(layer)[last - 1] == float(layer)).all()
    end = storage.buffer[-layout.size_class(PAGE).stride :].view(torch.bfloat16)
    assert end[0].item() == QWEN_08B.attention_layers[0] and end[-1].item() == QWEN_08B.attention_layers[-1]
    slot = num_slabs - 2
    storage.state(0, "recurrent")[slot] = 1.0
    saved = storage.save(SLOT, [slot]).wait().view(torch.float32)
    assert (saved[: storage.state(0, "recurrent")[slot].numel()] == 1.0).all()


def test_copies_run_beside_the_device_s_work(monkeypatch):
    """Entries are overwritten right after `save` and used right after `load`; the host waits for neither.
    Buffers of a few bytes cut every entry to pieces."""
    monkeypatch.setattr(host_copies, "STAGING_BYTES", 1000)
    storage = Storage(ArenaLayout.of(TINY, page_size=4), 4, device="cuda")
    size = storage.layout.size_class(PAGE)
    content = torch.randn(storage.kv(3)[: size.count].shape, device="cuda")
    for round_ in range(20):
        storage.kv(3)[: size.count] = content + round_
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(100):
            busy = busy @ busy * 1e-3
        free = torch.cuda.Event()
        free.record()
        ids = torch.randperm(size.count, generator=torch.Generator().manual_seed(round_)).tolist()
        saved = storage.save(PAGE, ids)
        storage.kv(3)[: size.count] = torch.nan
        storage.load(PAGE, [size.count + i for i in ids], saved)
        seen = storage.kv(3)[size.count : 2 * size.count] + 0
        assert round_ < 3 or not free.query(), "the host waited for the device"
        torch.cuda.synchronize()
        assert torch.equal(seen, content + round_)
        rows = storage.buffer.view(-1, size.stride)[size.count : 2 * size.count].cpu()
        assert torch.equal(saved.wait().view(size.count, size.stride), rows[ids])


def test_many_entries_at_full_speed():
    """A slot of Qwen3.5-0.8B and the pages of 1,000 tokens; prints the device's and the host's time."""
    storage = Storage(ArenaLayout.of(QWEN_08B, page_size=16), 20, device="cuda")
    count = storage.layout.size_class(PAGE).count
    ids = list(range(count, count + 63))
    for _ in range(3):
        begin = time.perf_counter()
        payload = [storage.save(SLOT, [0]), storage.save(PAGE, ids)]
        host = time.perf_counter() - begin
        torch.cuda.current_stream().synchronize()
        steps = time.perf_counter() - begin
        payload[1].wait()
        done = time.perf_counter() - begin
    print(
        f"host {host * 1e6:.0f} us, steps held up {steps * 1e6:.0f} us, all there after {done * 1e6:.0f} us"
    )
    assert steps < done
