"""How a checkpoint lies in host memory and in files: what of a slot is kept, and in how many bits.

Owns the arithmetic. Rings of recorded updates are left out (they are written into the state first), and
recurrent states may be kept in fewer bits; windows of convolutions and KV stay as they are. Pure Python: who
only counts bytes needs no torch. The conversion is `denim.memory.slot_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from denim.memory.layout import PAGE, SLOT, TENSOR_ALIGN, ArenaLayout, SizeClass, TensorPlace
from denim.spec.mixers import RECORD_ROLES

EXACT = "auto"
"""The name of checkpoints whose states keep the dtype that they are computed in."""

CHECKPOINT_DTYPES = (EXACT, "bfloat16", "int8")

STATE_ROLE = "recurrent"
SCALE_BYTES = 4  # an fp32 number for each row of a state in int8
ELEMENT_BYTES = {"bfloat16": 2, "int8": 1}


class StoredTensor(NamedTuple):
    """Where one tensor of a slot lies in a stored checkpoint: `offset` of its elements in bytes, and of the
    scales of its rows (-1: it has none). `dtype` may be narrower than the slot's."""

    place: TensorPlace
    dtype: str
    offset: int
    scales: int

    @property
    def elements(self) -> int:
        return prod(self.place.shape)

    @property
    def rows(self) -> int:
        return self.elements // self.place.shape[-1]


@dataclass(frozen=True)
class CheckpointForm:
    """`dtype`: one of `CHECKPOINT_DTYPES`. `tensors` is empty where the slot's own bytes are kept, the first
    `slot_bytes` of them. 0 bytes: the model has no such class."""

    dtype: str
    page_size: int
    page_bytes: int
    slot_bytes: int
    tensors: tuple[StoredTensor, ...] = ()

    @classmethod
    def of(cls, layout: ArenaLayout, dtype: str = EXACT) -> CheckpointForm:
        """The form of checkpoints of `layout`."""
        assert dtype in CHECKPOINT_DTYPES
        page = layout.stride(PAGE)
        kept = [place for place in layout.slot_tensors if place.role not in RECORD_ROLES]
        slot = max((place.offset + place.bytes for place in kept), default=0)
        if dtype == EXACT or not any(_narrows(place, dtype) for place in kept):
            return cls(dtype, layout.page_size, page, slot)
        tensors = []
        end = 0
        for place in kept:
            narrow = _narrows(place, dtype)
            stored = StoredTensor(place, dtype if narrow else place.dtype, end, -1)
            end += stored.elements * ELEMENT_BYTES[dtype] if narrow else place.bytes
            if narrow and dtype == "int8":
                end = _aligned(end)
                stored = stored._replace(scales=end)
                end += stored.rows * SCALE_BYTES
            end = _aligned(end)
            tensors.append(stored)
        return cls(dtype, layout.page_size, page, end, tuple(tensors))

    @property
    def block_bytes(self) -> int:
        """The unit of host memory: a page, or a slot where there are no pages. A slot takes whole blocks."""
        return self.page_bytes or self.slot_bytes

    @property
    def slot_blocks(self) -> int:
        return -(-self.slot_bytes // self.block_bytes)

    def layout(self) -> ArenaLayout:
        """The classes with the bytes that they take in blocks, for books that count bytes."""
        block = self.block_bytes
        sizes = {PAGE: (self.page_bytes, self.page_bytes), SLOT: (self.slot_bytes, self.slot_blocks * block)}
        classes = tuple(SizeClass(name, *both, 1) for name, both in sizes.items() if both[0])
        return ArenaLayout(self.page_size, block, classes, (), ())

    def checkpoint_bytes(self, tokens: int) -> int:
        """Bytes of host memory that a checkpoint and all pages before it take, when none is shared."""
        return -(-tokens // self.page_size) * self.page_bytes + self.slot_blocks * self.block_bytes


def _narrows(place: TensorPlace, dtype: str) -> bool:
    """Whether keeping the tensor in `dtype` takes fewer bytes."""
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(place.dtype, 0)
    return place.role == STATE_ROLE and width > ELEMENT_BYTES[dtype]


def _aligned(n: int) -> int:
    return -(-n // TENSOR_ALIGN) * TENSOR_ALIGN
