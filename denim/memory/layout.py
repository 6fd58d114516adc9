"""How a model's pages and slots lie in the arena: sizes, strides and offsets, all derived from its spec.

Owns the arithmetic that turns a `ModelSpec` into size classes and tensor places. Knows nothing of
devices or of which entry is in use. Every byte size that memory, scheduler and runner use comes from here.

The arena is cut into equal slabs, and every size class divides a slab evenly: `count` entries of
stride `slab_bytes / count`. So a class is one uniformly strided view of the whole buffer, and the slab
of an entry is `id // count`. Pages tile a slab without a gap; slots may leave up to `MAX_WASTE` of their
size unused, which is the price for slabs of a few pages instead of the lowest common multiple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from denim.errors import CapacityError
from denim.spec.mixers import DTYPE_BYTES
from denim.spec.model import ModelSpec

PAGE = "page"
SLOT = "slot"

STRIDE_ALIGN = 256  # bytes; what device allocators guarantee for the buffer's own address
TENSOR_ALIGN = 16  # bytes; the widest vector load, and what TMA descriptors ask for
MAX_WASTE = 0.02  # of a slot; design, section 4


class TensorPlace(NamedTuple):
    """One tensor inside an entry. `offset` is in bytes from the entry's start; `role` is "kv" in a page,
    else that of its `StateTensor`."""

    layer: int
    role: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SizeClass:
    """A kind of entry. `entry_bytes` is its content, `stride` its share of a slab (content and rest)."""

    name: str
    entry_bytes: int
    stride: int
    count: int  # entries per slab


@dataclass(frozen=True)
class ArenaLayout:
    """The size classes of one model and where each tensor lies in a page or slot.

    A model without attention has no page class, one without linear layers no slot class. `records` is the
    length of the rings in a slot, 0 without deferred writes; steps of fewer than `record_from` decode rows
    write their states all the same.
    """

    page_size: int
    slab_bytes: int
    classes: tuple[SizeClass, ...]
    page_tensors: tuple[TensorPlace, ...]
    slot_tensors: tuple[TensorPlace, ...]
    records: int = 0
    record_from: int = 0

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        page_size: int,
        kv_dtype: str | None = None,
        kv_layers: Sequence[int] | None = None,
        records: int = 0,
        record_from: int = 0,
    ) -> ArenaLayout:
        """Layout of `spec` with pages of `page_size` tokens.

        `kv_dtype` None means the model's dtype. `kv_layers` are the layers whose KV lies in a page, as
        indices into `spec.layers + spec.mtp_layers`; None means all attention layers of the trunk.
        Within a page: layer by layer, each its mixer's `page_shape`. Within a slot: layer by layer, each
        layer's state tensors in the spec's order; behind them all, where writes are deferred, each layer's
        ring of `records` updates.
        """
        layers = spec.layers + spec.mtp_layers
        kv = spec.attention_layers if kv_layers is None else kv_layers
        pages = []
        for index in kv:
            shape = layers[index].mixer.page_shape(page_size)
            assert shape is not None, f"layer {index} keeps no KV"
            pages.append((index, "kv", shape, kv_dtype or spec.dtype))
        slots = [
            (index, tensor.role, tensor.shape, tensor.dtype)
            for index in spec.linear_layers
            for tensor in layers[index].mixer.state_tensors(spec.state_dtype, spec.dtype)
        ]
        if records:
            slots += [
                (index, tensor.role, tensor.shape, tensor.dtype)
                for index in spec.linear_layers
                for tensor in layers[index].mixer.record_tensors(records)
            ]
        page_tensors, page_bytes = _place(pages)
        slot_tensors, slot_bytes = _place(slots)
        slab, per_slab = smallest_slab(page_bytes, slot_bytes)
        classes = tuple(
            SizeClass(name, entry_bytes, slab // count, count)
            for name, entry_bytes, count in zip((PAGE, SLOT), (page_bytes, slot_bytes), per_slab, strict=True)
            if entry_bytes
        )
        return cls(page_size, slab, classes, page_tensors, slot_tensors, records, record_from)

    def recorded(self, rows: int) -> int:
        """The length of the rings in which a step of so many decode rows records its updates; 0: it writes
        states, and what was recorded before has to be written first."""
        return self.records if rows >= self.record_from else 0

    def size_class(self, name: str) -> SizeClass:
        """The class called `name`. Raises KeyError when this model has none."""
        for size_class in self.classes:
            if size_class.name == name:
                return size_class
        raise KeyError(name)

    def has(self, name: str) -> bool:
        return any(size_class.name == name for size_class in self.classes)

    def stride(self, name: str) -> int:
        """Bytes of a slab that one entry takes; 0 when this model has no such class."""
        return self.size_class(name).stride if self.has(name) else 0

    def need(self, tokens: int) -> dict[str, int]:
        """Entries of each class that one request of `tokens` tokens holds: exact, nothing reserved."""
        counts = {PAGE: -(-tokens // self.page_size), SLOT: 1}
        return {size_class.name: counts[size_class.name] for size_class in self.classes}

    def request_bytes(self, tokens: int) -> int:
        """Bytes of arena that one request of `tokens` tokens holds (its entries' strides)."""
        return sum(self.size_class(name).stride * n for name, n in self.need(tokens).items())

    def slabs_for(self, need: dict[str, int]) -> int:
        """Slabs that hold these entries and nothing else."""
        return sum(-(-n // self.size_class(name).count) for name, n in need.items() if n)

    def longest_request(self, num_slabs: int) -> int | None:
        """Tokens of the longest request that fits alone into so many slabs; None: any length fits."""
        if not self.has(PAGE):
            return None
        slots = self.slabs_for({SLOT: 1}) if self.has(SLOT) else 0
        return (num_slabs - slots) * self.size_class(PAGE).count * self.page_size

    def num_slabs(self, memory_bytes: int) -> int:
        """Slabs in `memory_bytes`. Raises CapacityError when not even a request of one token fits."""
        slabs = memory_bytes // self.slab_bytes
        least = self.slabs_for(self.need(1))
        if slabs < least:
            raise CapacityError(
                f"memory of {memory_bytes:,} bytes is too little for one request of this model: it needs "
                f"{least} slabs of {self.slab_bytes:,} bytes = {least * self.slab_bytes:,}; raise memory"
            )
        return slabs


def smallest_slab(page_bytes: int, slot_bytes: int) -> tuple[int, tuple[int, int]]:
    """(slab bytes, (pages, slots) per slab): the smallest slab that both divide evenly.

    Both are first rounded up to `STRIDE_ALIGN`. Pages fill the slab exactly; a slot's share may exceed
    the slot by `MAX_WASTE`. Zero bytes means that the class does not exist. There is always an answer:
    at the lowest common multiple nothing is wasted.
    """
    page = -(-page_bytes // STRIDE_ALIGN)
    slot = -(-slot_bytes // STRIDE_ALIGN)
    if not page or not slot:
        return max(page, slot) * STRIDE_ALIGN, (1, 1)
    slab = 0
    while True:
        slab += page
        slots = slab // slot
        while slots and slab <= slots * slot * (1 + MAX_WASTE):
            if slab % slots == 0:
                return slab * STRIDE_ALIGN, (slab // page, slots)
            slots -= 1


def _place(
    tensors: Sequence[tuple[int, str, tuple[int, ...], str]],
) -> tuple[tuple[TensorPlace, ...], int]:
    """Lay (layer, role, shape, dtype) one behind the other; returns the places and the entry's bytes."""
    places = []
    end = 0
    for layer, role, shape, dtype in tensors:
        place = TensorPlace(layer, role, -(-end // TENSOR_ALIGN) * TENSOR_ALIGN, shape, dtype)
        end = place.offset + place.bytes
        places.append(place)
    return tuple(places), end
