"""From spans to tensors: the packing of a step into a `StepBatch`.

Owns the arrays of a step on the host and the order in which they go to the device, in one transfer for each
of the two widths of integers. Knows spans and the size of a page; must not know what layers do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import Memory, StepBatch
from denim.runner.plan import Span, is_decode


class HostStep(NamedTuple):
    """A step of T tokens in N spans, the first `decode` of which are decode rows, as arrays on the host.

    tokens, sources, positions, token_pages: int64 [T]; a source is the token's row among those that the last
    step drew, -1 where the token is given. token_pages is empty without pages. page_ids: int32, all page
    tables one behind the other.
    """

    decode: int
    tokens: np.ndarray
    sources: np.ndarray
    positions: np.ndarray
    token_pages: np.ndarray
    page_ids: np.ndarray
    page_offsets: list[int]
    kv_lengths: list[int]
    cu_seqlens: list[int]


class PackedStep(NamedTuple):
    """A batch, its tokens [T] int64, and for each token its place among the tokens that the last step drew,
    -1 where the token is given; None when all are given."""

    batch: StepBatch
    tokens: Tensor
    drawn_before: Tensor | None


Send = Callable[[np.ndarray], Tensor]
"""Brings an array to the device."""


def sender(device: torch.device) -> Send:
    """Transfers that the host does not wait for. Pinned memory is given back when the copy is done."""
    if device.type == "cpu":
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def arrange(
    spans: Sequence[Span], rows_before: Mapping[int, int], *, page_size: int, paged: bool
) -> HostStep:
    """`spans` as arrays; decode rows come first. See `pack`."""
    starts = np.array([span.start for span in spans], dtype=np.int64)
    lengths = np.array([len(span.tokens) for span in spans], dtype=np.int64)
    decode = sum([is_decode(span) for span in spans])
    kv_lengths = starts + lengths
    cu_seqlens = _offsets(lengths)

    tokens = np.empty(cu_seqlens[-1], dtype=np.int64)
    positions = np.empty(cu_seqlens[-1], dtype=np.int64)
    tokens[:decode] = [span.tokens[0] for span in spans[:decode]]
    positions[:decode] = starts[:decode]
    for row in range(decode, len(spans)):
        here = slice(cu_seqlens[row], cu_seqlens[row + 1])
        tokens[here] = spans[row].tokens
        positions[here] = np.arange(starts[row], kv_lengths[row])

    sources = np.full(len(tokens), -1, dtype=np.int64)
    unknown = np.flatnonzero(tokens < 0)
    if len(unknown):
        of_token = np.repeat(np.arange(len(spans)), lengths)[unknown]
        sources[unknown] = [rows_before[spans[row].request_id] for row in of_token.tolist()]

    counts = -(-kv_lengths // page_size) if paged else np.zeros_like(starts)
    page_offsets = _offsets(counts)
    page_ids = np.empty(page_offsets[-1], dtype=np.int32)
    for span, at, end in zip(spans, page_offsets.tolist(), page_offsets[1:].tolist(), strict=False):
        page_ids[at:end] = span.pages[: end - at]
    token_pages = np.empty(0, dtype=np.int64)
    if paged:
        tables = np.repeat(page_offsets[:-1], lengths)
        token_pages = page_ids[tables + positions // page_size].astype(np.int64)
    return HostStep(
        decode,
        tokens,
        sources,
        positions,
        token_pages,
        page_ids,
        page_offsets.tolist(),
        kv_lengths.tolist(),
        cu_seqlens.tolist(),
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def pack(
    spans: Sequence[Span],
    memory: Memory,
    *,
    page_size: int,
    paged: bool,
    send: Send,
    rows_before: Mapping[int, int],
    pending: Sequence[int] | None = None,
) -> PackedStep:
    """The batch of `spans`, whose decode rows come first.

    `paged`: whether the model has pages at all. `rows_before`: request id -> its row among the tokens that
    the last step drew; needed where a span has a token that the host does not know (negative). `pending`: of
    each decode row the records in its slot's ring; None without rings.
    """
    step = arrange(spans, rows_before, page_size=page_size, paged=paged)
    behind = spans[step.decode :]
    carried = [row for row, span in enumerate(behind) if span.slot_in >= 0]
    unknown = bool((step.sources >= 0).any())
    wide = [
        step.tokens,
        step.positions,
        step.token_pages,
        [span.slot_out for span in spans[: step.decode]],
        [span.slot_out for span in behind],
        carried,
        [behind[row].slot_in for row in carried],
        step.sources if unknown else (),
    ]
    narrow = [step.page_ids, step.page_offsets, step.kv_lengths, step.cu_seqlens, pending or ()]
    tokens, positions, token_pages, *slots, sources = _parts(wide, np.int64, send)
    page_ids, page_indptr, kv_lens, q_indptr, records = _parts(narrow, np.int32, send)
    batch = StepBatch(
        memory=memory,
        positions=positions,
        token_pages=token_pages,
        token_offsets=positions % page_size,
        page_ids=page_ids,
        page_indptr=page_indptr,
        kv_lens=kv_lens,
        q_indptr=q_indptr,
        decode_slots=slots[0],
        prefill_slots=slots[1],
        carried=slots[2],
        carried_slots=slots[3],
        cu_seqlens=step.cu_seqlens,
        kv_lengths=step.kv_lengths,
        page_offsets=step.page_offsets,
        slot_in=[span.slot_in for span in spans],
        slot_out=[span.slot_out for span in spans],
        saves=[span.saves for span in behind],
        pending=None if pending is None else records,
    )
    return PackedStep(batch, tokens, sources if unknown else None)


def _parts(arrays: Sequence, dtype: type, send: Send) -> tuple[Tensor, ...]:
    block = np.concatenate([np.asarray(array, dtype=dtype) for array in arrays])
    return send(block).split([len(array) for array in arrays])
