"""Where the chunks of packed sequences lie and which slots they read and write, as kernels need it.

Owns the table that a step's chunked kernels share: one row a chunk, one row a sequence, all on the device.
Knows token counts and slot ids; must not know any rule, nor where the slots' tensors lie.

A chunk ends on every multiple of `size` tokens of its sequence and wherever a state is wanted, so that a
state inside a sequence is always the state behind a whole chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.recurrence.operands import check_chunk_size, whole_numbers
from denim.recurrence.sequences import offsets_of

NO_SLOT = -1


class ChunkTable(NamedTuple):
    """N sequences of T tokens in M chunks.

    chunks [M, 3] int32: (sequence, first token counted over all T, number of tokens 1 .. size), in the
    order of tokens; a row with sequence -1 is padding.
    first_chunk [N + 1] int32: sequence n has chunks first_chunk[n] .. first_chunk[n + 1] - 1.
    cu_seqlens [N + 1] int32: sequence n has tokens cu_seqlens[n] .. cu_seqlens[n + 1] - 1.
    slot_in [N] int64: where its state lies before; -1: it begins from zeros, and nothing is read.
    slot_out [N] int64: where its last state goes; -1: padding, nothing is written.
    save [M] int64: the slot that takes the state behind this chunk as well, -1: none. None: no state inside
    a sequence is wanted at all.
    size: the most tokens of a chunk. longest: chunks of the longest sequence. Both on the host.
    """

    chunks: Tensor
    first_chunk: Tensor
    cu_seqlens: Tensor
    slot_in: Tensor
    slot_out: Tensor
    save: Tensor | None
    size: int
    longest: int

    @classmethod
    def of(
        cls,
        cu_seqlens: Sequence[int],
        slot_in: Sequence[int],
        slot_out: Sequence[int],
        size: int,
        device: torch.device | str,
        saves: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> ChunkTable:
        """saves: for each sequence the (tokens from its start, slot) of states wanted inside it, each
        0 < tokens <= its length. ValueError for another, for two slots at one place, offsets that do not
        rise from 0, more or fewer slots than sequences, a slot that is written twice, and one below -1; how
        many slots there are is not known here."""
        places, slots, longest = chunk_arrays(cu_seqlens, slot_in, slot_out, size, saves)
        return cls.from_flat(
            torch.from_numpy(places).to(device, non_blocking=True),
            torch.from_numpy(slots).to(device, non_blocking=True),
            sequences=len(slot_in),
            size=size,
            longest=longest,
        )

    @classmethod
    def from_flat(
        cls, places: Tensor, slots: Tensor, *, sequences: int, size: int, longest: int
    ) -> ChunkTable:
        """Views of two device tensors: `places` is chunks | first_chunk | cu_seqlens, `slots` is slot_in |
        slot_out | save (absent when no state is wanted)."""
        chunks = (len(places) - 2 * (sequences + 1)) // 3
        table, first_chunk, cu_seqlens = places.split([3 * chunks, sequences + 1, sequences + 1])
        slot_in, slot_out, save = slots.split([sequences, sequences, len(slots) - 2 * sequences])
        return cls(
            table.view(chunks, 3),
            first_chunk,
            cu_seqlens,
            slot_in,
            slot_out,
            save if len(save) else None,
            size,
            longest,
        )


def chunk_arrays(
    cu_seqlens: Sequence[int],
    slot_in: Sequence[int],
    slot_out: Sequence[int],
    size: int,
    saves: Sequence[Sequence[tuple[int, int]]] | None = None,
    padded_to: int | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """What `ChunkTable.from_flat` takes, on the host, and the chunks of the longest sequence; see
    `ChunkTable.of`. `padded_to`: so many chunks, or more where there are more."""
    wanted = saves if saves is not None else [()] * len(slot_in)
    offsets = _offsets_of(cu_seqlens, slot_in, slot_out, size, wanted)
    rows: list[tuple[int, int, int, int]] = []
    first = [0]
    for n, ((begin, end), at) in enumerate(zip(pairwise(offsets), wanted, strict=True)):
        slot_at = {begin + tokens: slot for tokens, slot in at}
        if len(slot_at) != len(at) or any(not begin < place <= end for place in slot_at):
            raise ValueError(f"saves[{n}] must be distinct places in 1 .. {end - begin}; got {list(at)}")
        ends = sorted({*range(begin + size, end, size), *slot_at, end})
        begins = [begin, *ends]
        rows += [
            (n, start, stop - start, slot_at.get(stop, NO_SLOT))
            for start, stop in zip(begins, ends, strict=False)
            if stop > start
        ]
        first.append(len(rows))
    rows += [(-1, 0, 0, NO_SLOT)] * ((padded_to or 0) - len(rows))
    table = np.array(rows, dtype=np.int32).reshape(-1, 4)
    places = np.concatenate([table[:, :3].ravel(), np.array([*first, *offsets], dtype=np.int32)])
    slots = np.array([*slot_in, *slot_out, *(table[:, 3] if saves is not None else ())], dtype=np.int64)
    return places, slots, max((stop - start for start, stop in pairwise(first)), default=0)


def _offsets_of(
    cu_seqlens: Sequence[int],
    slot_in: Sequence[int],
    slot_out: Sequence[int],
    size: int,
    wanted: Sequence[Sequence[tuple[int, int]]],
) -> list[int]:
    """cu_seqlens as a list; ValueError for what `ChunkTable.of` excludes."""
    check_chunk_size(size)
    offsets = offsets_of(cu_seqlens, cu_seqlens[-1] if len(cu_seqlens) else 0)
    if not len(slot_in) == len(slot_out) == len(wanted) == len(offsets) - 1:
        raise ValueError(
            f"cu_seqlens has {len(offsets) - 1} sequences; slot_in, slot_out and saves must have as many "
            f"entries, got {len(slot_in)}, {len(slot_out)} and {len(wanted)}"
        )
    saved = [number for at in wanted for save in at for number in save]
    slots = whole_numbers([*slot_in, *slot_out, *saved[1::2]])
    if slots is None or whole_numbers(saved) is None or min(slots, default=0) < NO_SLOT:
        raise ValueError(
            f"slots must be whole numbers from 0 up, or {NO_SLOT} for none, and places in saves whole; "
            f"got slot_in {list(slot_in)}, slot_out {list(slot_out)}, saves {list(wanted)}"
        )
    written = [slot for slot in slots[len(slot_in) :] if slot != NO_SLOT]
    if len(set(written)) < len(written):
        raise ValueError(f"a slot in slot_out and saves may be written once; got {written}")
    return offsets
