"""What of a slot a stored checkpoint keeps, where, and how near the state that comes back is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from denim.memory.checkpoint_form import CHECKPOINT_DTYPES, CheckpointForm
from denim.memory.layout import PAGE, SLOT, ArenaLayout
from denim.memory.slot_codec import decode, encode
from denim.memory.storage import Storage
from tests.memory.test_layout import QWEN_08B, TINY


def slots(spec, records: int = 0) -> tuple[Storage, torch.Tensor, torch.Tensor]:
    """Two slots of random numbers and poison: (storage, first slot's bytes, second slot's bytes)."""
    storage = Storage(ArenaLayout.of(spec, page_size=4, records=records), 4, debug_poison=True)
    generator = torch.Generator().manual_seed(0)
    for place in storage.layout.slot_tensors:
        view = storage.state(place.layer, place.role)
        view[0] = torch.randn(place.shape, generator=generator).to(view.dtype)
    (row,), (other,) = storage.parts(SLOT, [0]), storage.parts(SLOT, [1])
    return storage, row, other


def test_an_exact_checkpoint_is_the_slot_without_its_rings():
    plain = CheckpointForm.of(ArenaLayout.of(TINY, page_size=4))
    ringed = CheckpointForm.of(ArenaLayout.of(TINY, page_size=4, records=5))
    assert plain == ringed and not plain.tensors
    assert plain.slot_bytes == ArenaLayout.of(TINY, page_size=4).size_class(SLOT).entry_bytes


@pytest.mark.parametrize("dtype", CHECKPOINT_DTYPES)
@pytest.mark.parametrize("records", [0, 3])
def test_round_trip(dtype: str, records: int) -> None:
    storage, row, other = slots(TINY, records)
    form = CheckpointForm.of(storage.layout, dtype)
    stored = encode(form, row)
    assert stored.dtype == torch.uint8 and stored.numel() == form.slot_bytes
    decode(form, stored, other)
    error = {"auto": 0.0, "bfloat16": 2**-8, "int8": 0.51 / 127}[dtype]
    for place in storage.layout.slot_tensors:
        before, after = storage.state(place.layer, place.role)[:2].float()
        if place.role == "recurrent":
            largest = before.abs() if dtype == "bfloat16" else before.abs().amax(-1, keepdim=True)
            assert ((after - before).abs() <= error * largest).all()
        elif place.role.startswith("record"):
            assert after.isnan().all(), "a ring is not part of a checkpoint"
        else:
            assert torch.equal(before, after), "only recurrent states lose bits"


def test_rows_of_zeros_and_of_large_numbers() -> None:
    storage, row, other = slots(TINY)
    form = CheckpointForm.of(storage.layout, "int8")
    place = next(p for p in storage.layout.slot_tensors if p.role == "recurrent")
    state = storage.state(place.layer, place.role)
    state[0, 0] = 0.0
    state[0, 1] = 3e37
    decode(form, encode(form, row), other)
    assert (state[1, 0] == 0).all() and torch.allclose(state[1, 1], state[0, 1])


def test_sizes_of_qwen_08b() -> None:
    """18.56 MiB of states in fp32; what fewer bits save, scales counted."""
    layout = ArenaLayout.of(QWEN_08B, page_size=16)
    sizes = {dtype: CheckpointForm.of(layout, dtype) for dtype in CHECKPOINT_DTYPES}
    exact = sizes["auto"].slot_bytes
    states = sum(p.bytes for p in layout.slot_tensors if p.role == "recurrent")
    assert sizes["bfloat16"].slot_bytes == exact - states // 2
    assert sizes["int8"].slot_bytes == exact - states * 3 // 4 + states // 128  # rows of 128 elements
    form = sizes["auto"]
    assert form.block_bytes == layout.size_class(PAGE).stride and form.slot_blocks == 100
    assert form.checkpoint_bytes(1000) == (63 + 100) * form.block_bytes


@pytest.mark.parametrize("missing", [PAGE, SLOT])
def test_models_without_one_of_the_two(missing: str) -> None:
    keep = "linear_layers" if missing == PAGE else "attention_layers"
    spec = dataclasses.replace(TINY, layers=tuple(TINY.layers[i] for i in getattr(TINY, keep)))
    form = CheckpointForm.of(ArenaLayout.of(spec, page_size=4))
    assert (form.page_bytes == 0) == (missing == PAGE) and (form.slot_bytes == 0) == (missing == SLOT)
    assert [size.name for size in form.layout().classes] == [SLOT if missing == PAGE else PAGE]
    assert form.checkpoint_bytes(8) > 0


def test_states_that_are_narrow_already_stay_as_they_are() -> None:
    spec = dataclasses.replace(TINY, state_dtype="bfloat16")
    layout = ArenaLayout.of(spec, page_size=4)
    assert CheckpointForm.of(layout, "bfloat16").tensors == ()
    assert CheckpointForm.of(layout, "int8").tensors != ()
