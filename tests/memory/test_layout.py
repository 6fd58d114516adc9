"""Sizes and offsets of pages and slots, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from denim.errors import CapacityError
from denim.memory.layout import MAX_WASTE, PAGE, SLOT, STRIDE_ALIGN, ArenaLayout, smallest_slab
from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.linear import GatedDeltaNet
from denim.spec.model import Layer, ModelSpec, Rope

KIB, MIB = 2**10, 2**20


def make_spec(pattern: str, linear: GatedDeltaNet, full: FullAttention, dtype: str = "bfloat16") -> ModelSpec:
    ffn = DenseFFN(64)
    layers = tuple(Layer(full if letter == "F" else linear, ffn) for letter in pattern)
    return ModelSpec(
        "test", 1024, 1000, layers, Rope(1e4), 1e-6, True, 4096, dtype=dtype, mtp_layers=(Layer(full, ffn),)
    )


QWEN_08B = make_spec(
    "LLLF" * 6, GatedDeltaNet(16, 16, 128, 128, 4), FullAttention(8, 2, 256, 64, gated=True, qk_norm=True)
)
TINY = make_spec("LLLF", GatedDeltaNet(2, 4, 8, 12, 4), FullAttention(4, 2, 24, 8), dtype="float32")


def test_qwen_08b_sizes():
    layout = ArenaLayout.of(QWEN_08B, page_size=16)
    page, slot = layout.size_class(PAGE), layout.size_class(SLOT)
    assert page.entry_bytes == page.stride == 192 * KIB
    assert slot.entry_bytes == 18 * MIB + 648 * KIB
    assert layout.slab_bytes == 100 * page.stride == slot.stride
    assert (page.count, slot.count) == (100, 1)
    assert slot.stride / slot.entry_bytes < 1.007


def test_page_is_contiguous_layer_by_layer():
    layout = ArenaLayout.of(QWEN_08B, page_size=16)
    assert [t.layer for t in layout.page_tensors] == [3, 7, 11, 15, 19, 23]
    assert {t.shape for t in layout.page_tensors} == {(2, 16, 2, 256)}
    assert [t.offset for t in layout.page_tensors] == [i * 32 * KIB for i in range(6)]


def test_slot_keeps_the_specs_order_and_alignment():
    layout = ArenaLayout.of(TINY, page_size=4)
    assert [(t.layer, t.role) for t in layout.slot_tensors] == [
        (layer, role) for layer in (0, 1, 2) for role in ("recurrent", "conv")
    ]
    end = 0
    for place in layout.slot_tensors:
        assert end <= place.offset < end + 16 and place.offset % 16 == 0
        end = place.offset + place.bytes
    assert layout.size_class(SLOT).entry_bytes == end


def test_mtp_layer_and_kv_dtype_are_parameters():
    with_mtp = ArenaLayout.of(QWEN_08B, 16, kv_layers=(*QWEN_08B.attention_layers, 24))
    assert with_mtp.size_class(PAGE).entry_bytes == 224 * KIB
    fp8 = ArenaLayout.of(QWEN_08B, 16, kv_dtype="float8_e4m3fn")
    assert fp8.size_class(PAGE).entry_bytes == 96 * KIB
    assert fp8.size_class(PAGE).count == 2 * 100 - 1  # 199 pages of 96 KiB already hold a slot


def test_model_without_attention_or_without_state():
    no_kv = ArenaLayout.of(dataclasses.replace(TINY, layers=TINY.layers[:3]), 16)
    assert [c.name for c in no_kv.classes] == [SLOT]
    assert no_kv.need(1000) == {SLOT: 1}
    assert (no_kv.stride(PAGE), no_kv.stride(SLOT)) == (0, no_kv.size_class(SLOT).stride)
    no_state = ArenaLayout.of(dataclasses.replace(TINY, layers=TINY.layers[3:]), 16)
    assert [c.name for c in no_state.classes] == [PAGE]
    assert no_state.need(17) == {PAGE: 2}


@pytest.mark.parametrize("page", [1, 200, 256, 1000, 4096, 100_000, 3_000_001])
@pytest.mark.parametrize("slot", [1, 300, 5000, 65_536, 99_999, 1_234_567, 19_537_920])
def test_smallest_slab_divides_and_wastes_little(page, slot):
    slab, (pages, slots) = smallest_slab(page, slot)
    page_stride, slot_stride = slab // pages, slab // slots
    rounded = -(-slot // STRIDE_ALIGN) * STRIDE_ALIGN
    assert slab == pages * page_stride == slots * slot_stride
    assert page_stride == -(-page // STRIDE_ALIGN) * STRIDE_ALIGN
    assert slot_stride % STRIDE_ALIGN == 0
    assert rounded <= slot_stride <= rounded * (1 + MAX_WASTE)


def test_smallest_slab_is_smallest():
    for page, slot in [(3, 10), (7, 3), (10, 3), (64, 5), (5, 64), (97, 89)]:
        fits = [
            (n * page, n, m)
            for n in range(1, slot + 1)
            for m in range(1, n * page // slot + 1)
            if n * page % m == 0 and slot <= n * page / m <= slot * (1 + MAX_WASTE)
        ]
        slab, (pages, _) = smallest_slab(page * STRIDE_ALIGN, slot * STRIDE_ALIGN)
        assert (slab, pages) == (min(fits)[0] * STRIDE_ALIGN, min(fits)[1])


def test_several_slots_per_slab_when_pages_are_bigger():
    slab, (pages, slots) = smallest_slab(100 * KIB, 10 * KIB)
    assert (slab, pages, slots) == (100 * KIB, 1, 10)


def test_cost_of_a_request_is_exact():
    layout = ArenaLayout.of(QWEN_08B, 16)
    assert layout.need(100) == {PAGE: 7, SLOT: 1}
    assert layout.request_bytes(100) == 7 * 192 * KIB + layout.size_class(SLOT).stride
    assert layout.slabs_for(layout.need(1600)) == 2
    assert layout.slabs_for(layout.need(1601)) == 3


def test_memory_below_one_request_is_refused_with_numbers():
    """ME-14: the smallest legal pool works (see tests/scheduler), one slab less is refused at start."""
    layout = ArenaLayout.of(QWEN_08B, 16)
    assert layout.num_slabs(2 * layout.slab_bytes) == 2
    with pytest.raises(CapacityError, match=f"{2 * layout.slab_bytes:,}"):
        layout.num_slabs(2 * layout.slab_bytes - 1)


def test_rings_lie_behind_the_states():
    """Two value heads of a key head: 8 records of 2 keys, 4 updates and 4 decays in fp32 for each layer."""
    plain, ringed = ArenaLayout.of(TINY, 16), ArenaLayout.of(TINY, 16, records=8)
    states = len(plain.slot_tensors)
    assert ringed.slot_tensors[:states] == plain.slot_tensors
    rings = ringed.slot_tensors[states:]
    assert [(t.layer, t.role) for t in rings[:4]] == [
        (0, "record_keys"),
        (0, "record_updates"),
        (0, "record_decays"),
        (1, "record_keys"),
    ]
    assert [t.shape for t in rings[:3]] == [(8, 2, 8), (8, 4, 12), (8, 4)]
    assert {t.dtype for t in rings} == {"float32"}
    assert sum(t.bytes for t in rings) == 3 * 8 * (2 * 8 + 4 * 12 + 4) * 4
