"""The batch that a captured step reads: tensors that stay where they are while their content changes.

Owns the chunk tables of such a batch, which are as long for every step. Knows a shape and where its inputs
lie; must not know graphs or what a layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import Memory, StepBatch
from denim.recurrence.chunk_table import ChunkTable, chunk_arrays
from denim.runner.packing import HostStep
from denim.runner.static_inputs import StaticInputs
from denim.runner.step_shapes import StepShape

# Chunks of a table beyond those of one sequence, for each span: it may end with a part of a chunk, and states
# that are wanted inside it cut some more.
_SPARE_CHUNKS = 3


class _TablePlaces(NamedTuple):
    """A chunk table's two tensors, as `ChunkTable.from_flat` takes them: on the device, and in pinned memory
    for either turn of a step (`InputBuffers.begin`)."""

    device: tuple[Tensor, Tensor]
    pinned: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class CapturedBatch(StepBatch):
    """`staged`: where its inputs are written on the host. Chunk tables are made once for each size, as the
    layers ask for them, and filled before every replay."""

    shape: StepShape = field(default_factory=lambda: StepShape(0))
    staged: list[StaticInputs] = field(default_factory=list)
    _places: dict[int, _TablePlaces] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inputs: StaticInputs,
        staged: list[StaticInputs],
        shape: StepShape,
        memory: Memory,
        *,
        deferred: bool,
    ) -> CapturedBatch:
        """`deferred`: whether decode rows record their updates."""
        none = inputs.tokens[:0]
        return cls(
            memory=memory,
            positions=inputs.positions,
            token_pages=inputs.token_pages,
            token_offsets=inputs.positions,
            page_ids=inputs.page_ids,
            page_indptr=inputs.page_indptr,
            kv_lens=inputs.kv_lens,
            q_indptr=inputs.q_indptr,
            decode_slots=inputs.decode_slots,
            prefill_slots=none,
            carried=none,
            carried_slots=none,
            cu_seqlens=[],
            kv_lengths=[],
            page_offsets=[],
            slot_in=[],
            slot_out=[],
            pending=inputs.records if deferred else None,
            shape=shape,
            staged=staged,
        )

    def chunks(self, size: int) -> ChunkTable:
        if size not in self._chunk_tables:
            places, slots, _ = self._arrays(size, [0] * (self.shape.spans + 1), [], [], [])
            empty = torch.from_numpy(places), torch.from_numpy(slots)
            on_device = empty[0].to(self.positions.device), empty[1].to(self.positions.device)
            first, second = [(empty[0].clone().pin_memory(), empty[1].clone().pin_memory()) for _ in range(2)]
            self._places[size] = _TablePlaces(on_device, (first, second))
            self._chunk_tables[size] = ChunkTable.from_flat(
                *on_device, sequences=self.shape.spans, size=size, longest=self._most(size)
            )
        return self._chunk_tables[size]

    def send_chunks(self, step: HostStep, turn: int) -> bool:
        """Fill the chunk tables for a step by way of the pinned memory of a `turn`; nobody waits. False, and
        nothing is sent, when its chunks are more than there is room for."""
        rows = step.decode
        transfers: list[tuple[Tensor, Tensor, np.ndarray]] = []
        for size, (on_device, pinned) in self._places.items():
            offsets = (step.cu_seqlens[rows:] - rows).tolist()
            *content, _ = self._arrays(
                size, offsets, step.slot_in[rows:], step.slot_out[rows:], step.saves[rows:]
            )
            if len(content[0]) > len(on_device[0]):
                return False
            transfers += zip(on_device, pinned[turn], content, strict=True)
        for target, staged, array in transfers:
            staged.numpy()[:] = array
            target.copy_(staged, non_blocking=True)
        return True

    def _most(self, size: int) -> int:
        return -(-self.shape.tokens // size) + _SPARE_CHUNKS * self.shape.spans

    def _arrays(
        self,
        size: int,
        cu_seqlens: Sequence[int],
        slot_in: Sequence[int],
        slot_out: Sequence[int],
        saves: Sequence[Sequence[tuple[int, int]]],
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """A table's content for spans behind the decode rows, padded to the shape's spans."""
        more = self.shape.spans - len(slot_in)
        padding = [-1] * more
        ends = [cu_seqlens[-1]] * (self.shape.spans + 1 - len(cu_seqlens))
        return chunk_arrays(
            [*cu_seqlens, *ends],
            [*slot_in, *padding],
            [*slot_out, *padding],
            size,
            [*saves, *([()] * more)],
            self._most(size),
        )
