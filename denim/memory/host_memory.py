"""The bytes of the host tier: one buffer of blocks, pinned on CUDA, and the copies between it and the device.

Owns the buffer and which blocks an entry has. Knows how a checkpoint lies there (`checkpoint_form`), not what
stands for which tokens, nor when an entry should leave: ids come from the tier's books, blocks follow.

On CUDA all copies, both ways, run in order on one stream beside the steps. So whoever loads what is still on
its way out gets what was stored, and a block may be used again as soon as the books say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from denim.errors import CapacityError
from denim.ledger.units import size_text
from denim.memory.checkpoint_form import CheckpointForm
from denim.memory.host_copies import HostCopies, copy_across
from denim.memory.layout import PAGE, SLOT
from denim.memory.slot_codec import decode, encode
from denim.memory.storage import POISON, Storage, runs
from denim.memory.transfer import Transfer


class HostMemory:
    """As many blocks as `limit_bytes` hold, for checkpoints that leave `storage`. `debug_poison`: freed
    blocks become NaN. Raises CapacityError when the host does not give that much."""

    def __init__(
        self, form: CheckpointForm, limit_bytes: int, storage: Storage, debug_poison: bool = False
    ) -> None:
        self.form = form
        self.num_blocks = limit_bytes // form.block_bytes
        self._storage = storage
        self._poison = debug_poison
        self._copies: HostCopies | None = storage.copies
        self._pinned: finalize[..., HostMemory] | None = None
        try:
            self._blocks = torch.empty((self.num_blocks, form.block_bytes), dtype=torch.uint8)
            if self._copies is not None and self.num_blocks:
                _pin(self._blocks)
                self._pinned = finalize(self, _unpin, self._blocks.data_ptr())
        except (RuntimeError, TypeError) as error:  # too much for the machine, or for a size of a tensor
            why = str(error).partition("\n")[0]
            raise CapacityError(
                f"host_memory={size_text(limit_bytes)} cannot be had from this machine: {why}; lower it"
            ) from error
        self._free: list[int] = []
        self._of: dict[int, list[int]] = {}
        self._arrivals: dict[int, torch.cuda.Event | None] = {}
        self.reset()

    def reset(self) -> None:
        """All blocks are free. Copies that are on their way end before anything later is written."""
        self.join()
        self._of.clear()
        self._arrivals.clear()
        self._free = list(range(self.num_blocks))
        heapify(self._free)

    def close(self) -> None:
        """Wait for all copies and let go of the memory; of no use afterwards."""
        if self._pinned is not None:
            self.mark().synchronize()
            self._pinned()

    # Entries

    def free(self, ids: Sequence[int]) -> None:
        """These entries are nobody's any more (`ByteArena`'s `on_free`)."""
        for entry in ids:
            for block in self._of.pop(entry, ()):
                if self._poison:
                    self._blocks[block].fill_(POISON)
                heappush(self._free, block)

    def slot_bytes(self, entry: int) -> list[Tensor]:
        """Where the bytes of a stored slot lie, in order: uint8 tensors, `form.slot_bytes` together."""
        return self._pieces(self._blocks_of(entry, self.form.slot_blocks), self.form.slot_bytes)

    def page_bytes(self, entries: Sequence[int]) -> list[Tensor]:
        """Where the bytes of pages lie, one behind the other; neighbours are joined."""
        blocks = [self._blocks_of(entry, 1)[0] for entry in entries]
        return self._pieces(blocks, len(blocks) * self.form.page_bytes)

    def slot_buffers(self, entry: int) -> list[memoryview]:
        """`slot_bytes` for whoever reads and writes files."""
        return [_buffer(piece) for piece in self.slot_bytes(entry)]

    def page_buffers(self, entry: int) -> list[memoryview]:
        """The bytes of one page for whoever reads and writes files."""
        return [_buffer(piece) for piece in self.page_bytes([entry])]

    def _blocks_of(self, entry: int, count: int) -> list[int]:
        blocks = self._of.get(entry)
        if blocks is None:
            blocks = self._of[entry] = [heappop(self._free) for _ in range(count)]
        return blocks

    def _pieces(self, blocks: Sequence[int], nbytes: int) -> list[Tensor]:
        pieces = [self._blocks[first : first + n].view(-1) for first, n in runs(blocks)]
        rest = sum(piece.numel() for piece in pieces) - nbytes
        if rest:
            pieces[-1] = pieces[-1][:-rest]
        return pieces

    # Copies, called by the runner in the order of its steps

    def store(self, transfer: Transfer) -> None:
        """Bring a checkpoint out, as it is now; its entries may be overwritten when this returns."""
        if transfer.slot >= 0:
            (row,) = self._storage.parts(SLOT, [transfer.slot])
            self._out([encode(self.form, row)], self.slot_bytes(transfer.host_slot))
        if transfer.pages:
            self._out(self._storage.parts(PAGE, transfer.pages), self.page_bytes(transfer.host_pages))

    def load(self, transfer: Transfer) -> None:
        """Bring a checkpoint in. Its entries hold it once `arrived`; until then nobody may use them, and
        nobody does: what earlier steps still read there has been waited for."""
        copies = self._copies
        if copies is None:
            self._in(transfer)
            self._arrivals[transfer.key] = None
            return
        with copies.behind_steps():
            self._in(transfer)
        self._arrivals[transfer.key] = copies.mark()

    def arrived(self, key: int) -> bool:
        """Whether the load of this key is there; to be asked no more once it was."""
        if key not in self._arrivals:
            return False
        ready = self._arrivals[key]
        if ready is not None and not ready.query():
            return False
        del self._arrivals[key]
        return True

    def join(self) -> None:
        """Later work of the steps comes behind all copies so far."""
        if self._copies is not None:
            self._copies.join()

    def mark(self) -> Any:
        """Something whose `synchronize()` waits for all copies so far; None: there is nothing to wait for."""
        return None if self._copies is None else self._copies.mark()

    def _out(self, parts: list[Tensor], pieces: list[Tensor]) -> None:
        if self._copies is None:
            copy_across(parts, pieces)
        else:
            self._copies.store(parts, pieces)

    def _in(self, transfer: Transfer) -> None:
        form, storage = self.form, self._storage
        if transfer.slot >= 0:
            (row,) = storage.parts(SLOT, [transfer.slot])
            pieces = self.slot_bytes(transfer.host_slot)
            if form.tensors:
                stored = torch.empty(form.slot_bytes, dtype=torch.uint8, device=row.device)
                copy_across(pieces, [stored])
                decode(form, stored, row)
            else:
                copy_across(pieces, [row[: form.slot_bytes]])
        if transfer.pages:
            copy_across(self.page_bytes(transfer.host_pages), storage.parts(PAGE, transfer.pages))


def _buffer(piece: Tensor) -> memoryview:
    array: Any = piece.numpy()
    return memoryview(array)


def _pin(blocks: Tensor) -> None:
    """Page-lock a buffer where it lies: torch's own allocator of pinned memory rounds up to powers of two."""
    error = torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.numel(), 0)
    if int(error):
        raise RuntimeError(f"cudaHostRegister: error {int(error)}")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
