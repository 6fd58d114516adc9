"""The batch: everything that the layers need to know about one step, as tensors.

Owns the record of a step's spans, packed into one row of tokens, how a layer parts them into decode rows and
sequences, and the reads of slots that layers share.
Made by the runner from a step plan; layers read it and nothing else: no global context. Knows the device
views of pages and slots only through `memory`.

Rows that are plain decode tokens (one token that reads and writes its own slot) come first; the spans
behind them are sequences of any length, which may begin from a slot that they do not write to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.deferred import Ring
from denim.spec.mixers import RECORD_ROLES

if TYPE_CHECKING:
    from denim.layers.paged_attention import PagedAttention


class Memory(Protocol):
    """The arena's storage as layers see it: strided views indexed by page id and slot id."""

    def kv(self, layer: int) -> Tensor:
        """[pages, *page_shape] of the layer's mixer; for full attention [pages, 2, page_size, kv_heads,
        head_dim], 2 being key and value."""
        ...

    def state(self, layer: int, role: str) -> Tensor:
        """[slots, *shape] of one tensor of a layer's state; role is "recurrent" or "conv"."""
        ...


@dataclass
class StepBatch:
    """One step of T tokens in N spans, the first R of which are decode rows.

    On the device:
    positions       [T] int64, each token's place in its own sequence
    token_pages     [T] int64, the page that takes the token's KV; token_offsets [T]: its place in that page
    page_ids        [sum of ceil(kv_length / page_size)] int32, the page tables one behind the other
    page_indptr     [N + 1] int32, where in them each span's begins
    kv_lens         [N] int32, tokens to attend over, the span's own included
    q_indptr        [N + 1] int32, where each span begins among the T tokens
    decode_slots    [R] int64, the slots of the decode rows
    prefill_slots   [N - R] int64, the slots that the spans behind them write
    carried         [C] int64, which of those spans begin from a state, counted from the first of them
    carried_slots   [C] int64, the slots that they begin from; the other spans are fresh
    pending         [R] int32, records in the rings of the decode rows' slots; None: writes are not deferred
    cos, sin        [T, 1, rotary_dim / 2], filled by the model

    The same on the host: cu_seqlens (q_indptr), kv_lengths (kv_lens), page_offsets (page_indptr); and
    slot_in (-1: fresh), slot_out: N slots each
    saves           of the spans behind the decode rows: (tokens from the span's start, slot) of the states
                    that are wanted inside it
    attention       who attends over pages, planned for this batch; None: plain torch

    A padding row, which only captured steps have, is a decode row with slot -1, token_pages -1, kv_lens 0 and
    no pages: nothing is read or written for it, and its results may be anything.
    """

    memory: Memory
    positions: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    page_ids: Tensor
    page_indptr: Tensor
    kv_lens: Tensor
    q_indptr: Tensor
    decode_slots: Tensor
    prefill_slots: Tensor
    carried: Tensor
    carried_slots: Tensor
    cu_seqlens: list[int]
    kv_lengths: list[int]
    page_offsets: list[int]
    slot_in: list[int]
    slot_out: list[int]
    pending: Tensor | None = None
    saves: list[Sequence[tuple[int, int]]] = field(default_factory=list)
    cos: Tensor | None = None
    sin: Tensor | None = None
    attention: PagedAttention | None = None
    _chunk_tables: dict[int, ChunkTable] = field(default_factory=dict, repr=False)

    @property
    def num_decode(self) -> int:
        return len(self.decode_slots)

    def by_form(
        self, decode: Callable[..., Tensor], prefill: Callable[..., Tensor], *projected: Tensor
    ) -> Tensor:
        """What a linear layer's two forms make of its projections, each [T, ...]: [T, ...]. `decode` gets the
        decode rows of each and this batch, `prefill` the tokens behind them."""
        rows = self.num_decode
        if rows == len(projected[0]):
            return decode(*projected, self)
        if not rows:
            return prefill(*projected, self)
        first = decode(*[part[:rows] for part in projected], self)
        return torch.cat((first, prefill(*[part[rows:] for part in projected], self)))

    @cached_property
    def prefill_cu_seqlens(self) -> list[int]:
        """Offsets of the spans behind the decode rows, counted from the first of their tokens."""
        first = self.num_decode
        return [offset - self.cu_seqlens[first] for offset in self.cu_seqlens[first:]]

    def chunks(self, size: int) -> ChunkTable:
        """The spans behind the decode rows in chunks of at most `size` tokens. Made once a step."""
        if size not in self._chunk_tables:
            first = self.num_decode
            self._chunk_tables[size] = ChunkTable.of(
                self.prefill_cu_seqlens,
                self.slot_in[first:],
                self.slot_out[first:],
                size,
                self.positions.device,
                self.saves if any(self.saves) else None,
            )
        return self._chunk_tables[size]

    @cached_property
    def tables(self) -> list[Tensor]:
        """N page tables, each [ceil(kv_length / page_size)] int32."""
        ends = self.page_offsets[1:]
        return list(self.page_ids.split([end - at for at, end in zip(self.page_offsets, ends, strict=False)]))

    @cached_property
    def decode_tables(self) -> tuple[Tensor, Tensor]:
        """Page tables [R, P] of the decode rows, padded with page 0, and their KV lengths [R]."""
        rows = self.num_decode
        return nn.utils.rnn.pad_sequence(self.tables[:rows], batch_first=True), self.kv_lens[:rows]

    def ring(self, layer: int) -> Ring | None:
        """The layer's recorded updates; None where every step writes."""
        if self.pending is None:
            return None
        return Ring(*(self.memory.state(layer, role) for role in RECORD_ROLES))

    def starting(self, view: Tensor) -> Tensor | None:
        """What the spans behind the decode rows begin from, [N - R, *shape] of a view [slots, *shape].

        Zeros for a fresh span, whose slot is never read; None when all are fresh.
        """
        if not len(self.carried):
            return None
        carried = view.index_select(0, self.carried_slots)
        if len(carried) == len(self.prefill_slots):
            return carried
        begin = torch.zeros(len(self.prefill_slots), *view.shape[1:], dtype=view.dtype, device=view.device)
        return begin.index_copy_(0, self.carried, carried)

    @contextmanager
    def gathered(self, view: Tensor) -> Iterator[Tensor]:
        """The decode rows' entries [R, *shape] of a view [slots, *shape]; what is changed in place inside is
        written back."""
        entries = view.index_select(0, self.decode_slots)
        yield entries
        view.index_copy_(0, self.decode_slots, entries)

    def in_place(self, view: Tensor) -> AbstractContextManager[Tensor | list[Tensor]]:
        """The same for large states. On a GPU gathering is one launch for all rows; on a CPU it would move
        each state twice more, so there the rows are a list of views, each changed where it lies."""
        if view.is_cuda:
            return self.gathered(view)
        return nullcontext([view[slot] for slot in self.slot_out[: self.num_decode]])
