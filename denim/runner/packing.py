"""From spans to tensors: the packing of a step into a `StepBatch`.

Owns the order of everything in the two integer blocks that go to the device, each in one transfer. Knows
spans and the size of a page; must not know what layers do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import Memory, StepBatch
from denim.runner.plan import Span


class PackedStep(NamedTuple):
    """A batch, its tokens [T] int64, and for each token its place among the tokens that the last step drew,
    -1 where the token is given; None when all are given."""

    batch: StepBatch
    tokens: Tensor
    drawn_before: Tensor | None


Send = Callable[[np.ndarray, str], Tensor]
"""Brings an array to the device; the name says which of the two blocks it is."""


def sender(device: torch.device) -> Send:
    """Transfers that the host does not wait for. Pinned memory is given back when the copy is done."""
    if device.type == "cpu":
        return lambda array, _: torch.from_numpy(array)
    return lambda array, _: torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def pack(
    spans: Sequence[Span],
    memory: Memory,
    *,
    page_size: int,
    paged: bool,
    send: Send,
    rows_before: Mapping[int, int] | None = None,
) -> PackedStep:
    """The batch of `spans`, whose decode rows come first.

    `paged`: whether the model has pages at all. `rows_before`: request id -> its row among the tokens that
    the last step drew; needed where a span has a token that the host does not know (negative).
    """
    decode = sum(map(is_decode, spans))
    starts = [span.start for span in spans]
    lengths = [len(span.tokens) for span in spans]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    cu_seqlens = [0, *accumulate(lengths)]
    total = cu_seqlens[-1]

    tokens = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    tokens[:decode] = [span.tokens[0] for span in spans[:decode]]
    positions[:decode] = starts[:decode]
    for row in range(decode, len(spans)):
        here = slice(cu_seqlens[row], cu_seqlens[row + 1])
        tokens[here] = spans[row].tokens
        positions[here] = np.arange(starts[row], ends[row])

    counts = [-(-end // page_size) if paged else 0 for end in ends]
    page_offsets = [0, *accumulate(counts)]
    page_ids = np.empty(page_offsets[-1], dtype=np.int32)
    for span, at, count in zip(spans, page_offsets, counts, strict=False):
        page_ids[at : at + count] = span.pages[:count]
    if paged:
        table_of = np.repeat(page_offsets[:-1], lengths)
        token_pages = page_ids[table_of + positions // page_size].astype(np.int64)
    else:
        token_pages = np.empty(0, dtype=np.int64)

    behind = spans[decode:]
    carried = [row for row, span in enumerate(behind) if span.slot_in >= 0]
    wide = [
        tokens,
        positions,
        token_pages,
        [span.slot_out for span in spans[:decode]],
        [span.slot_out for span in behind],
        carried,
        [behind[row].slot_in for row in carried],
    ]
    unknown = np.flatnonzero(tokens < 0)
    if len(unknown):
        assert rows_before is not None, "a token is still on its way, and no step is"
        of_token = np.repeat(np.arange(len(spans)), lengths)
        source = np.full(total, -1, dtype=np.int64)
        source[unknown] = [rows_before[spans[row].request_id] for row in of_token[unknown]]
        wide.append(source)
    narrow = [page_ids, page_offsets, ends, cu_seqlens]
    tokens_, positions_, token_pages_, *slots = _parts(wide, np.int64, "wide", send)
    page_ids_, page_indptr, kv_lens, q_indptr = _parts(narrow, np.int32, "narrow", send)
    batch = StepBatch(
        memory=memory,
        positions=positions_,
        token_pages=token_pages_,
        token_offsets=positions_ % page_size,
        page_ids=page_ids_,
        page_indptr=page_indptr,
        kv_lens=kv_lens,
        q_indptr=q_indptr,
        decode_slots=slots[0],
        prefill_slots=slots[1],
        carried=slots[2],
        carried_slots=slots[3],
        cu_seqlens=cu_seqlens,
        kv_lengths=ends,
        page_offsets=page_offsets,
        slot_in=[span.slot_in for span in spans],
        slot_out=[span.slot_out for span in spans],
        saves=[span.saves for span in behind],
    )
    return PackedStep(batch, tokens_, slots[4] if len(unknown) else None)


def is_decode(span: Span) -> bool:
    """One token that reads and writes its request's own state, so that it can be updated in place."""
    return len(span.tokens) == 1 and span.slot_in == span.slot_out


def _parts(arrays: Sequence, dtype: type, name: str, send: Send) -> tuple[Tensor, ...]:
    block = np.concatenate([np.asarray(array, dtype=dtype) for array in arrays])
    return send(block, name).split([len(array) for array in arrays])
