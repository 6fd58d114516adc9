"""From spans to tensors: the packing of a step into a `StepBatch`.

Owns the arrays of a step on the host and the order in which they go to the device, in one transfer for each
of the two widths of integers. Knows spans and the size of a page; must not know what layers do with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import Memory, StepBatch
from denim.runner.plan import NO_ROWS, DecodeRows, Span, is_decode


class HostStep(NamedTuple):
    """A step of T tokens in N spans on the host; the first `decode` are decode rows. `spans`: the last of
    them, those that did not come as rows.

    Of each span: request_ids, starts, slot_in, slot_out, saves, states (how its token is drawn; None: none
    is). drawing: the spans that draw a token. unknown: whether each of those ends with a token that the host
    does not know. scored: whether a report on a prompt is wanted. given, rows_before: the decode
    rows' tokens and their rows as they came; all_unknown: whether there are no others, and the host knows
    none of their tokens.
    Arrays: tokens, sources, positions, token_pages int [T]; a source is the token's row among those that
    the last step drew, -1 where the token is given. token_pages is empty without pages. page_ids int32, all
    page tables one behind the other; page_offsets [N + 1], where they begin; kv_lengths [N]; cu_seqlens
    [N + 1], where the spans begin among the tokens.
    """

    spans: Sequence[Span]
    decode: int
    request_ids: Sequence[int]
    starts: Sequence[int]
    given: Sequence[int]
    rows_before: Mapping[int, int]
    all_unknown: bool
    slot_in: Sequence[int]
    slot_out: Sequence[int]
    states: Sequence[Any]
    saves: Sequence[Sequence[tuple[int, int]]]
    drawing: list[int]
    unknown: list[bool]
    scored: bool
    tokens: np.ndarray
    sources: np.ndarray
    positions: np.ndarray
    token_pages: np.ndarray
    page_ids: np.ndarray
    page_offsets: np.ndarray
    kv_lengths: np.ndarray
    cu_seqlens: np.ndarray


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
    spans: Sequence[Span],
    rows_before: Mapping[int, int],
    *,
    page_size: int,
    paged: bool,
    rows: DecodeRows = NO_ROWS,
) -> HostStep:
    """`rows` and `spans`, decode rows first, column by column: what is done row by row costs the host in
    every step.

    `paged`: whether the model has pages at all. `rows_before`: request id -> its row among the tokens that
    the last step drew; needed where a span has a token that the host does not know (negative).
    """
    request_ids, slot_in, row_pages, states, begins, given = rows
    slot_out, decode, scored = slot_in, len(request_ids), False
    lengths = np.ones(decode + len(spans), dtype=np.int64)
    saves: tuple[Sequence[tuple[int, int]], ...] = ((),) * decode
    drawing = list(range(decode))
    if spans:
        in_place = [is_decode(span) for span in spans]
        if not all(in_place[: sum(in_place)]):
            spans = sorted(spans, key=lambda span: not is_decode(span))
        columns: Any = Span._make(zip(*spans, strict=True))  # in place of each field those of all spans
        request_ids += columns.request_id
        slot_in, slot_out = slot_in + columns.slot_in, slot_out + columns.slot_out
        states, saves = states + columns.sampling, saves + columns.saves
        lengths[decode:] = list(map(len, columns.tokens))
        begins = [*begins, *columns.start]
        drawing += [row for row, state in enumerate(columns.sampling, decode) if state is not None]
        decode, scored = decode + sum(in_place), True in columns.all_logits

    starts = np.array(begins, dtype=np.int64)
    kv_lengths = starts + lengths
    cu_seqlens = _offsets(lengths)
    tokens = np.array(given, dtype=np.int64)
    if spans:
        tokens = np.concatenate([tokens, *columns.tokens])
    of_token, positions = np.arange(len(request_ids)), starts
    if decode < len(request_ids):
        of_token = np.repeat(of_token, lengths)
        positions = np.arange(len(tokens)) + (starts - cu_seqlens[:-1])[of_token]

    unknown = tokens < 0
    if len(rows_before) == np.count_nonzero(unknown) == len(tokens) and tuple(rows_before) == request_ids:
        sources = of_token  # the same rows as in the last step
    else:
        sources = np.full(len(tokens), -1, dtype=np.int64)
        sources[unknown] = [rows_before[request_ids[row]] for row in of_token[unknown].tolist()]
    last_unknown = unknown[cu_seqlens[1:] - 1].tolist()

    page_counts = -(-kv_lengths // page_size) if paged else np.zeros_like(starts)
    page_offsets = _offsets(page_counts)
    tables = b"".join(row_pages)
    if spans:
        behind = page_counts[len(row_pages) :].tolist()
        own = [array("i", span.pages[:count]) for span, count in zip(spans, behind, strict=True)]
        tables = b"".join([tables, *own])
    page_ids = np.frombuffer(tables, dtype=np.int32)
    assert len(page_ids) == page_offsets[-1], "a table does not hold the pages of its tokens"
    token_pages = np.empty(0, dtype=np.int64)
    if paged:
        token_pages = page_ids[page_offsets[:-1][of_token] + positions // page_size].astype(np.int64)
    return HostStep(
        spans=spans,
        decode=decode,
        request_ids=request_ids,
        starts=begins,
        given=given,
        rows_before=rows_before,
        all_unknown=decode == len(request_ids) == np.count_nonzero(unknown) > 0,
        slot_in=slot_in,
        slot_out=slot_out,
        states=states,
        saves=saves,
        drawing=drawing,
        unknown=last_unknown if len(drawing) == len(last_unknown) else [last_unknown[row] for row in drawing],
        scored=scored,
        tokens=tokens,
        sources=sources,
        positions=positions,
        token_pages=token_pages,
        page_ids=page_ids,
        page_offsets=page_offsets,
        kv_lengths=kv_lengths,
        cu_seqlens=cu_seqlens,
    )


def one_further(
    before: HostStep, rows: DecodeRows, rows_before: Mapping[int, int], *, page_size: int
) -> HostStep | None:
    """What `arrange` makes of `rows` alone where they are those of the step before, one token further, which
    the host does not know yet: nearly always, as steps overlap. What stays the same is the same object. None
    where it is otherwise."""
    same = (
        rows.request_ids is before.request_ids
        and rows.slots is before.slot_out
        and rows_before is before.rows_before
        and rows.tokens == before.given
        and before.all_unknown
    )
    if not same:
        return None
    more = rows.starts[0] - before.starts[0]
    kv_lengths, page_offsets = before.kv_lengths + more, before.page_offsets
    page_ids = np.frombuffer(b"".join(rows.pages), dtype=np.int32)
    token_pages = before.token_pages
    if len(token_pages):  # the model has pages, and each row's token is in its last
        if len(page_ids) != len(before.page_ids):
            page_offsets = _offsets(-(-kv_lengths // page_size))
        assert len(page_ids) == page_offsets[-1], "a table does not hold the pages of its tokens"
        token_pages = page_ids[page_offsets[1:] - 1]
    return before._replace(
        starts=rows.starts,
        positions=before.positions + more,
        kv_lengths=kv_lengths,
        token_pages=token_pages,
        page_ids=page_ids,
        page_offsets=page_offsets,
    )


def pack(
    step: HostStep,
    memory: Memory,
    *,
    page_size: int,
    send: Send,
    pending: Sequence[int] | None = None,
) -> PackedStep:
    """The batch of a step. `pending`: of each decode row the records in its slot's ring; None without
    rings."""
    decode = step.decode
    behind_in, behind_out = step.slot_in[decode:], step.slot_out[decode:]
    carried = [row for row, slot in enumerate(behind_in) if slot >= 0]
    unknown = bool((step.sources >= 0).any())
    wide = [
        step.tokens,
        step.positions,
        step.token_pages,
        step.slot_out[:decode],
        behind_out,
        carried,
        [behind_in[row] for row in carried],
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
        cu_seqlens=step.cu_seqlens.tolist(),
        kv_lengths=step.kv_lengths.tolist(),
        page_offsets=step.page_offsets.tolist(),
        slot_in=list(step.slot_in),
        slot_out=list(step.slot_out),
        saves=list(step.saves[decode:]),
        pending=None if pending is None else records,
    )
    return PackedStep(batch, tokens, sources if unknown else None)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets


def _parts(arrays: Sequence, dtype: type, send: Send) -> tuple[Tensor, ...]:
    block = np.concatenate([np.asarray(array, dtype=dtype) for array in arrays])
    return send(block).split([len(array) for array in arrays])
