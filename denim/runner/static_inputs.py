"""What captured steps read: one buffer of integers, filled on the host and sent in one transfer.

Owns the buffer, where each input of a shape lies in it, and what a step and its padding look like there:
decode rows with slot -1, spans without tokens, tokens of no span. Knows a step's arrays; must not know graphs
or what a layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.runner.packing import HostStep
from denim.runner.step_shapes import StepShape

# Inputs begin at multiples of so many numbers, since kernels have a faster variant for pointers that are
# multiples of 16 bytes, and another variant for any that are not.
_ALIGNED = 4
# What is sent is a multiple of so many numbers (4 KiB), so that there are few different lengths.
_SENT = 1024


class StaticInputs(NamedTuple):
    """Views of one buffer, tensors or arrays, for a shape of R rows, S spans and T tokens.

    int64: tokens, sources, positions, token_pages [R + T]; decode_slots [R]; ends [R + S], the rows that are
    drawn from. int32: kv_lens [R + S]; page_indptr, q_indptr [R + S + 1]; records [R], in the rings of the
    decode rows' slots; page_ids, all that follows.
    """

    tokens: Any
    sources: Any
    positions: Any
    token_pages: Any
    decode_slots: Any
    ends: Any
    kv_lens: Any
    page_indptr: Any
    q_indptr: Any
    records: Any
    page_ids: Any

    @classmethod
    def of(cls, buffer: Any, wide: Any, shape: StepShape) -> StaticInputs:
        """`buffer`: int32, of at least `ints_of(shape)`. `wide`: int64, as its `view` takes it."""
        split = 2 * _size(_wide_lengths(shape))
        narrow = buffer[split:]
        page_ids = narrow[_size(_narrow_lengths(shape)) :]
        wide_parts = _parts(buffer[:split].view(wide), _wide_lengths(shape))
        return cls._make([*wide_parts, *_parts(narrow, _narrow_lengths(shape)), page_ids])


class InputBuffers:
    """Room for `ints` int32 on the device and, twice, in pinned memory: what was sent from one may still be
    on its way while the next step is written into the other."""

    def __init__(self, ints: int, device: torch.device) -> None:
        self._buffer = torch.zeros(-(-ints // _SENT) * _SENT, dtype=torch.int32, device=device)
        self._staged = [(self._buffer.cpu().pin_memory(), torch.Event(device)) for _ in range(2)]
        self._turn = 0
        # Of each turn the tokens that were written last: a step with the very same array of tokens has the
        # same rows (`denim.runner.packing.one_further`), and so the same shape.
        self._tokens: list[np.ndarray | None] = [None, None]
        # Beginnings of the buffers by turn and length, kept as a slice costs as much as a transfer's start.
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def inputs(self, shape: StepShape) -> tuple[StaticInputs, list[StaticInputs]]:
        """The places of a shape's inputs: on the device, and as arrays in either of the host's buffers."""
        staged = [StaticInputs.of(buffer.numpy(), np.int64, shape) for buffer, _ in self._staged]
        return StaticInputs.of(self._buffer, torch.int64, shape), staged

    def begin(self) -> int:
        """Which of the host's two buffers the next step is written to, 0 or 1. All that was sent in that turn
        has arrived: only a host that is two steps ahead waits."""
        self._turn = 1 - self._turn
        self._staged[self._turn][1].synchronize()
        return self._turn

    def send(
        self,
        staged: Sequence[StaticInputs],
        shape: StepShape,
        step: HostStep,
        pending: Sequence[int] | None,
    ) -> StaticInputs:
        """Write the step that began, which `shape` holds, and send it behind what else is sent in its turn;
        nobody waits. `staged`: the second of `inputs`. Returns what was sent. pending: of each decode row the
        records in its slot's ring; None: no rings."""
        buffer, sent = self._staged[self._turn]
        same = self._tokens[self._turn] is step.tokens
        (_write_on if same else _write_all)(staged[self._turn], shape, step, pending)
        self._tokens[self._turn] = step.tokens
        used = -(-(ints_of(shape) + len(step.page_ids)) // _SENT) * _SENT
        parts = self._parts.get((self._turn, used))
        if parts is None:
            parts = self._parts[self._turn, used] = self._buffer[:used], buffer[:used]
        parts[0].copy_(parts[1], non_blocking=True)
        sent.record()
        return staged[self._turn]


@cache
def ints_of(shape: StepShape) -> int:
    """int32 of a buffer before the page ids."""
    return 2 * _size(_wide_lengths(shape)) + _size(_narrow_lengths(shape))


def _write_all(inputs: StaticInputs, shape: StepShape, step: HostStep, pending: Sequence[int] | None) -> None:
    """A step and the padding behind it."""
    rows, first = step.decode, shape.rows  # of the step; where the spans behind them begin
    for part, nothing in (
        (inputs.tokens, 0),
        (inputs.sources, -1),
        (inputs.positions, 0),
        (inputs.token_pages, -1),
        (inputs.decode_slots, -1),
        (inputs.ends, 0),
        (inputs.kv_lens, 0),
    ):
        part.fill(nothing)
    _put(inputs.tokens, first, step.tokens, rows)
    _put(inputs.sources, first, step.sources, rows)
    inputs.decode_slots[:rows] = step.slot_out[:rows]
    inputs.q_indptr[:first] = np.arange(first)
    _put_offsets(inputs.q_indptr[first:], step.cu_seqlens[rows:] + (first - rows))
    if shape.spans:  # without them every row is drawn from
        last = step.cu_seqlens[1:][step.drawing] - 1
        last[np.asarray(step.drawing) >= rows] += first - rows
        inputs.ends[: len(last)] = last
    _write_on(inputs, shape, step, pending)


def _write_on(inputs: StaticInputs, shape: StepShape, step: HostStep, pending: Sequence[int] | None) -> None:
    """What differs from the step before where that had the same rows."""
    rows, first = step.decode, shape.rows
    _put(inputs.positions, first, step.positions, rows)
    _put(inputs.kv_lens, first, step.kv_lengths, rows)
    if len(step.token_pages):
        _put(inputs.token_pages, first, step.token_pages, rows)
    if pending is not None:
        inputs.records[:rows] = pending
    inputs.page_indptr[:rows] = step.page_offsets[:rows]
    inputs.page_indptr[rows:first] = step.page_offsets[rows]
    _put_offsets(inputs.page_indptr[first:], step.page_offsets[rows:])
    inputs.page_ids[: len(step.page_ids)] = step.page_ids


def _put(part: np.ndarray, first: int, values: np.ndarray, rows: int) -> None:
    """Values of the decode rows at the beginning, those behind them from `first` on."""
    part[:rows] = values[:rows]
    if len(values) > rows:
        part[first : first + len(values) - rows] = values[rows:]


def _put_offsets(part: np.ndarray, values: np.ndarray) -> None:
    """Offsets, and the last one once more for every span that is not there."""
    part[: len(values)] = values
    part[len(values) :] = values[-1]


def _wide_lengths(shape: StepShape) -> list[int]:
    """Of the int64 inputs but for the page ids, in their order."""
    return [shape.rows + shape.tokens] * 4 + [shape.rows, shape.rows + shape.spans]


def _narrow_lengths(shape: StepShape) -> list[int]:
    """Of the int32 inputs, in their order."""
    spans = shape.rows + shape.spans
    return [spans, spans + 1, spans + 1, shape.rows]


def _size(lengths: Sequence[int]) -> int:
    """Of a block with parts so long, each of which begins at a multiple of `_ALIGNED`."""
    return sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths)


def _parts(block: Any, lengths: Sequence[int]) -> list:
    """Views of the parts of a block."""
    starts = [_size(lengths[:n]) for n in range(len(lengths))]
    return [block[start : start + length] for start, length in zip(starts, lengths, strict=True)]
