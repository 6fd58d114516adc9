"""The arena's bytes: one device buffer, typed views of it, and moves between entries and the host.

Owns the buffer. Knows the layout, not who holds what: ids come from `denim.memory.arena`. Every view is
made once over the whole buffer, so kernels index it by page id or slot id; offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from denim.memory.host_copies import HostCopies, Saved
from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass, TensorPlace

MOVED_BYTES = 64 * 2**20  # on their way at one time; entries are gathered and then put down
POISON = 0xFF  # a float of any supported dtype made of these bytes is NaN


class Storage:
    """`num_slabs` slabs of `layout` on `device`.

    The buffer is not zeroed: nothing reads an entry before it was written. With `debug_poison` it starts
    as NaN, and entries given to `retire` (an arena's `on_free`) become NaN at the next `poison_retired`,
    which the runner calls after a step's swap-outs have read what was freed and before anything is written.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        num_slabs: int,
        device: torch.device | str = "cpu",
        debug_poison: bool = False,
    ) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        self.debug_poison = debug_poison
        self.buffer = torch.empty(num_slabs * layout.slab_bytes, dtype=torch.uint8, device=device)
        if debug_poison:
            self.buffer.fill_(POISON)
        self.copies = HostCopies(self.buffer.device) if self.buffer.is_cuda else None
        self._retired: dict[str, list[int]] = {}
        self._rows = {size.name: self.buffer.view(-1, size.stride) for size in layout.classes}
        self._kv = {place.layer: self._view(PAGE, place) for place in layout.page_tensors}
        self._state = {(place.layer, place.role): self._view(SLOT, place) for place in layout.slot_tensors}

    def kv(self, layer: int) -> Tensor:
        """KV of one layer, [num_pages, *page_shape of its mixer]."""
        return self._kv[layer]

    def state(self, layer: int, role: str) -> Tensor:
        """One state tensor of one layer, [num_slots, *shape]; `role` is that of its `StateTensor`."""
        return self._state[layer, role]

    def copy(self, name: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole entries of a class, source by source. No target may be a later source."""
        rows = self._rows[name]
        for source, target in zip(sources, targets, strict=True):
            rows[target].copy_(rows[source])

    def move(self, name: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move whole entries of a class; no target is a source. The sources are retired, and targets that
        were retired before hold something again. What was retired of another class in the targets' slabs is
        poisoned now: later it would be what has moved there."""
        if self.debug_poison:
            self._poison_others(name, targets)
        words = self._rows[name].view(torch.int64)
        device = words.device
        step = max(1, MOVED_BYTES // self.layout.size_class(name).stride)
        for at in range(0, len(sources), step):
            from_, to = (torch.tensor(ids[at : at + step], device=device) for ids in (sources, targets))
            words.index_copy_(0, to, words.index_select(0, from_))
        if self.debug_poison:
            live = set(targets)
            left = [entry for entry in self._retired.get(name, ()) if entry not in live]
            self._retired[name] = left + list(sources)

    def _poison_others(self, name: str, targets: Sequence[int]) -> None:
        slabs = {target // self.layout.size_class(name).count for target in targets}
        for other, retired in self._retired.items():
            if other == name:
                continue
            count = self.layout.size_class(other).count
            self.poison(other, sorted(entry for entry in retired if entry // count in slabs))
            self._retired[other] = [entry for entry in retired if entry // count not in slabs]

    def save(self, name: str, ids: Sequence[int]) -> Saved:
        """Entries in host memory, stride by stride, pinned on CUDA; they may be overwritten when this
        returns."""
        parts = self.parts(name, ids)
        return Saved(torch.cat(parts)) if self.copies is None else self.copies.save(parts)

    def load(self, name: str, ids: Sequence[int], saved: Saved) -> None:
        """Write what `save` returned into these entries (other ids than before are fine)."""
        parts = self.parts(name, ids)
        if self.copies is not None:
            self.copies.load(saved, parts)
            return
        for part, content in zip(parts, saved.content.split([p.numel() for p in parts]), strict=True):
            part.copy_(content)

    def parts(self, name: str, ids: Sequence[int]) -> list[Tensor]:
        """The bytes of entries in their order, stride by stride: uint8 views, neighbours joined."""
        rows = self._rows[name]
        return [rows[first : first + n].view(-1) for first, n in runs(ids)]

    def poison(self, name: str, ids: Sequence[int]) -> None:
        """Fill entries with NaN."""
        rows = self._rows[name]
        for first, n in runs(ids):
            rows[first : first + n].fill_(POISON)

    def retire(self, name: str, ids: Sequence[int]) -> None:
        """Note freed entries for `poison_retired`. Their bytes stay until then."""
        self._retired.setdefault(name, []).extend(ids)

    def poison_retired(self) -> None:
        """Fill with NaN all that was retired since the last call."""
        for name, ids in self._retired.items():
            self.poison(name, sorted(ids))
        self._retired.clear()

    def _view(self, name: str, place: TensorPlace) -> Tensor:
        size: SizeClass = self.layout.size_class(name)
        dtype: torch.dtype = getattr(torch, place.dtype)
        inner = torch.empty(place.shape, device="meta").stride()
        return self.buffer.view(dtype).as_strided(
            (self.num_slabs * size.count, *place.shape),
            (size.stride // dtype.itemsize, *inner),
            place.offset // dtype.itemsize,
        )


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ids into runs of neighbours, each moved as one block: (first id, length)."""
    at = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield ids[at], i - at
            at = i
