"""Copies between a CUDA device and the host that run beside the steps.

Owns a stream of its own and two small buffers on the device. What goes out is first gathered into a buffer,
in the order of the steps, which takes microseconds; so its entries may be overwritten at once, while the
buffer is on its way through PCIe. What the next step needs (`load`) is fetched into a buffer while earlier
steps still run, and put down in the order of the steps; what nobody needs yet comes in beside them
(`behind_steps`). The host never waits. Knows bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

STAGING_BYTES = 32 * 2**20  # of each buffer; about a slot, or the pages of 2,700 tokens, of Qwen3.5-0.8B


class Saved(NamedTuple):
    """Bytes in host memory, one behind the other; the host may read them after `wait`."""

    content: Tensor  # uint8
    ready: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.content


class HostCopies:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[Tensor] = []  # made when first needed
        self._last_use: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def save(self, parts: Sequence[Tensor]) -> Saved:
        """Bring contiguous uint8 tensors of the device to the host, as they are at this point of the current
        stream."""
        content = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, pin_memory=True)
        return Saved(content, self.store(parts, [content]))

    def store(self, parts: Sequence[Tensor], pieces: Sequence[Tensor]) -> torch.cuda.Event | None:
        """`save` into pinned `pieces` of the host that hold as many bytes together; returns when they are
        there, None for no bytes."""
        steps = torch.cuda.current_stream(self._device)
        left = list(pieces)
        ready = None
        for batch in _batches(parts):
            size = sum(part.numel() for part in batch)
            buffer = self._buffer(steps)[:size]
            torch.cat(batch, out=buffer)
            self._stream.wait_event(steps.record_event())
            with torch.cuda.stream(self._stream):
                copy_across([buffer], _take(left, size))
            ready = self._used(self._stream)
        return ready

    def load(self, saved: Saved, parts: Sequence[Tensor]) -> None:
        """Write what `save` brought out into contiguous tensors of the device; later work of the current
        stream sees it."""
        steps = torch.cuda.current_stream(self._device)
        at = 0
        for batch in _batches(parts):
            sizes = [part.numel() for part in batch]
            buffer = self._buffer(self._stream)[: sum(sizes)]
            with torch.cuda.stream(self._stream):
                buffer.copy_(saved.content[at : at + sum(sizes)], non_blocking=True)
            steps.wait_event(self._stream.record_event())
            for part, piece in zip(batch, buffer.split(sizes), strict=True):
                part.copy_(piece)
            self._used(steps)
            at += sum(sizes)

    @contextmanager
    def behind_steps(self) -> Iterator[None]:
        """What is done inside runs on the copies' stream, behind all steps so far and beside later ones."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """An event behind all copies so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def join(self) -> None:
        """Later steps come behind all copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _buffer(self, stream: torch.cuda.Stream) -> Tensor:
        """The buffer whose turn it is, when `stream` may write to it."""
        if not self._buffers:
            self._buffers = [
                torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)
            ]
        last = self._last_use[self._turn]
        if last is not None:
            stream.wait_event(last)
        return self._buffers[self._turn]

    def _used(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Note that the last use of the buffer is what `stream` has been given so far; the other is next."""
        event: torch.cuda.Event = stream.record_event()
        self._last_use[self._turn] = event
        self._turn = 1 - self._turn
        return event


def copy_across(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy contiguous uint8 tensors, one behind the other, into others that hold as many bytes together. From
    or to pinned memory the current stream does it, and the host does not wait."""
    left = list(targets)
    for source in sources:
        at = 0
        for target in _take(left, source.numel()):
            target.copy_(source[at : at + target.numel()], non_blocking=True)
            at += target.numel()


def _take(pieces: list[Tensor], size: int) -> list[Tensor]:
    """Cut the first `size` bytes off `pieces`, which loses them."""
    taken = []
    while size:
        piece = pieces.pop(0)
        if piece.numel() > size:
            pieces.insert(0, piece[size:])
            piece = piece[:size]
        if piece.numel():
            taken.append(piece)
        size -= piece.numel()
    return taken


def _batches(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut parts and join them, in order, to batches that fill a buffer."""
    batch: list[Tensor] = []
    room = STAGING_BYTES
    for part in parts:
        for piece in [part[:room], *part[room:].split(STAGING_BYTES)] if part.numel() > room else [part]:
            if piece.numel() > room:
                yield batch
                batch, room = [], STAGING_BYTES
            if piece.numel():
                batch.append(piece)
                room -= piece.numel()
    if batch:
        yield batch
