"""The arena's buffer on a CUDA device: pinned saves, and views beyond 32-bit offsets."""

from __future__ import annotations

import pytest
import torch

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
    assert saved.is_pinned() and saved.device.type == "cpu"
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
    saved = storage.save(SLOT, [slot]).view(torch.float32)
    assert (saved[0, : storage.state(0, "recurrent")[slot].numel()] == 1.0).all()
