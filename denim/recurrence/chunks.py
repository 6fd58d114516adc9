"""How the tokens of packed sequences lie in chunks.

Owns the way from [T, ...] (sequences one behind the other) to [chunks, heads, C, ...] and back. Knows
lengths only; must not know what is computed on the chunks.

Chunks are ordered by their place in the sequence, and those of one place by descending length of their
sequences. So the chunks that a pass over places works on at one time are neighbours, and a sequence that
has ended is always the last of those still running.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from denim.recurrence.operands import check_chunk_size


class ChunkLayout(NamedTuple):
    """Where each token of N sequences lies among chunks of `chunk_size` tokens.

    active[i]: how many sequences have a chunk i; the sum is the number of chunks. order: the sequences by
    descending length (a stable sort), inverse_order the way back; both index a dimension of N. rank: the
    latter on the host. place: [T], each token's place in the flattened chunks; None if all lengths are
    equal, when packing is a reshape.
    """

    sequences: int
    length: int
    chunk_size: int
    active: list[int]
    order: Tensor | slice
    inverse_order: Tensor | slice
    rank: Sequence[int]
    place: Tensor | None

    @classmethod
    def of(cls, offsets: Sequence[int], chunk_size: int, device: torch.device) -> ChunkLayout:
        """ValueError for a chunk size below 1."""
        check_chunk_size(chunk_size)
        lengths = [end - start for start, end in pairwise(offsets)]
        sequences, longest = len(lengths), max(lengths, default=0)
        # A chunk longer than every sequence would be padding; a power of two keeps the sizes few.
        chunk_size = min(chunk_size, 1 << (longest - 1).bit_length()) if longest else chunk_size
        counts = [-(-length // chunk_size) for length in lengths]
        active = [sum(count > i for count in counts) for i in range(max(counts, default=0))]
        if all(length == longest for length in lengths):
            everything = slice(None)
            return cls(sequences, longest, chunk_size, active, everything, everything, range(sequences), None)
        order = torch.tensor(lengths).argsort(descending=True, stable=True)
        rank = order.argsort()
        first = torch.tensor([0, *active]).cumsum(0)  # first[i]: number of chunks before place i
        of_token = torch.arange(sequences).repeat_interleave(torch.tensor(lengths))
        position = torch.arange(offsets[-1]) - torch.tensor(offsets)[of_token]
        chunk = first[position // chunk_size] + rank[of_token]
        place = chunk * chunk_size + position % chunk_size
        return cls(
            sequences,
            longest,
            chunk_size,
            active,
            order.to(device),
            rank.to(device),
            rank.tolist(),
            place.to(device),
        )

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H, ...] to [chunks, H, C, ...] in `dtype`, contiguous; padding is zero."""
        size = self.chunk_size
        if self.place is None:
            places = len(self.active)
            rows = x.reshape(self.sequences, self.length, *x.shape[1:])
            if padding := places * size - self.length:
                rows = F.pad(rows, (0, 0) * (x.dim() - 1) + (0, padding))
            rows = rows.unflatten(1, (places, size)).transpose(0, 1)  # [places, N, C, H, ...]
        else:
            rows = x.new_zeros(sum(self.active) * size, *x.shape[1:]).index_copy(0, self.place, x)
            rows = rows.unflatten(0, (1, -1, size))
        rows = rows.transpose(2, 3).to(dtype, memory_format=torch.contiguous_format)
        return rows.flatten(0, 1)

    def groups(self, at_most: int) -> list[list[int]]:
        """`active`, cut into lists of neighbouring places with at most `at_most` chunks (or one place)."""
        groups: list[list[int]] = []
        for count in self.active:
            if groups and sum(groups[-1]) + count <= at_most:
                groups[-1].append(count)
            else:
                groups.append([count])
        return groups

    def places_of(self, positions: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """Where each sequence's positions lie; position p stands for its first p tokens, and 0 is left out.

        Each is (index among all positions, chunk, row in it of the last of the p tokens).
        """
        flat = enumerate((n, position) for n, at in enumerate(positions) for position in at)
        first = [0, *accumulate(self.active)]
        return [
            (index, first[(position - 1) // self.chunk_size] + self.rank[n], (position - 1) % self.chunk_size)
            for index, (n, position) in flat
            if position
        ]

    def unpack(self, y: Tensor) -> Tensor:
        """[chunks, H, C, d] back to [T, H, d]."""
        rows = y.transpose(1, 2)
        if self.place is not None:
            return rows.flatten(0, 1)[self.place]
        rows = rows.unflatten(0, (len(self.active), self.sequences)).transpose(0, 1)
        return rows.flatten(1, 2)[:, : self.length].flatten(0, 1)
