"""Captured steps: one CUDA graph for each of a few shapes, from token ids to the largest logit of each row.

Owns the static buffers that graphs read and the graphs. A step runs in the smallest shape that holds it;
what a shape has beyond it is padding, for which layers read and write nothing: decode rows with slot -1,
spans without tokens, tokens of no span. Steps that no shape holds run eagerly: long ones, whose kernels
outlast their launches, and rare ones. Knows the model as a function of a `StepBatch`; must not know what a
layer does.

All graphs share one pool of memory: what one leaves there is good until the next runs.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.paged_attention import PagedAttention, StepLimits
from denim.memory.layout import PAGE
from denim.memory.storage import Storage
from denim.models.family import Model
from denim.recurrence.chunk_table import ChunkTable, chunk_arrays
from denim.runner.largest import largest
from denim.runner.packing import HostStep, arrange
from denim.runner.plan import Span

log = logging.getLogger("denim")

# Decode rows between shapes, up to so many: a padded row costs its share of the products, a graph its
# capture.
_STRIDES = ((64, 8), (128, 16), (256, 32), (1 << 30, 64))
# Tokens of shapes with prefill; beside them, as many tokens as a step may have. Padding is cheaper than the
# launches of an eager step. One prompt alone has shapes of its own, so that its pass is cut as it should be.
_PROMPT_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)
_MIXED_TOKENS = (64, 256, 512, 1024, 2048, 4096)
_MIXED_ROWS = 32
# Spans behind the decode rows of such a shape: one for so many of its tokens, within these limits. A span
# that is not there costs programs that look and leave; a step of more spans than the most would run eagerly.
_TOKENS_PER_SPAN = 16
_LEAST_PREFILL_SPANS, MOST_PREFILL_SPANS = 16, 64
# Chunks of a captured table beyond those of one sequence, for each span: it may end with a part of a chunk,
# and states that are wanted inside it cut some more.
_SPARE_CHUNKS = 3

# Parts of a buffer begin at multiples of so many numbers, since kernels have a faster variant for pointers
# that are multiples of 16 bytes, and another variant for any that are not.
_ALIGNED = 4


class StepShape(NamedTuple):
    """`rows` decode rows, and behind them `spans` spans of `tokens` tokens in all."""

    rows: int
    spans: int = 0
    tokens: int = 0

    def holds(self, rows: int, spans: int, tokens: int) -> bool:
        return rows <= self.rows and spans <= self.spans and tokens <= self.tokens


class GraphOutput(NamedTuple):
    """For each span that draws, in order: `logits` [n, vocab], and the first largest `largest` [n] int64.
    Good until the next step."""

    logits: Tensor
    largest: Tensor


def decode_shapes(most: int) -> list[StepShape]:
    """Shapes for steps of at most `most` decode rows: 1, 2, 4, 8, then ever sparser, and `most`."""
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    for end, stride in _STRIDES:
        while sizes[-1] + stride <= min(end, most):
            sizes.append(sizes[-1] + stride)
    return [StepShape(size) for size in (sizes if sizes[-1] == most else [*sizes, most])]


def prefill_shapes(most_rows: int, most_tokens: int) -> list[StepShape]:
    """Shapes for steps with prefill, of at most so many decode rows, and tokens in all."""

    def sizes(most: Sequence[int]) -> list[int]:
        return sorted({*(size for size in most if size < most_tokens), most_tokens})

    def spans(tokens: int) -> int:
        return min(max(tokens // _TOKENS_PER_SPAN, _LEAST_PREFILL_SPANS), MOST_PREFILL_SPANS)

    rows = sorted({min(_MIXED_ROWS, most_rows), most_rows})
    alone = [StepShape(0, 1, tokens) for tokens in sizes(_PROMPT_TOKENS)]
    return alone + [StepShape(n, spans(tokens), tokens) for n in rows for tokens in sizes(_MIXED_TOKENS)]


@dataclass
class CapturedBatch(StepBatch):
    """A batch over static buffers. Its chunk tables are made once for each size, as the layers ask for them,
    and filled before every replay."""

    shape: StepShape = field(default_factory=lambda: StepShape(0))
    places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def chunks(self, size: int) -> ChunkTable:
        if size not in self._chunk_tables:
            places, slots, _ = self.chunk_arrays(size, [0] * (self.shape.spans + 1), [], [], [])
            device = self.positions.device
            self.places[size] = torch.from_numpy(places).to(device), torch.from_numpy(slots).to(device)
            self._chunk_tables[size] = ChunkTable.from_flat(
                *self.places[size], sequences=self.shape.spans, size=size, longest=self.most_chunks(size)
            )
        return self._chunk_tables[size]

    def most_chunks(self, size: int) -> int:
        return -(-self.shape.tokens // size) + _SPARE_CHUNKS * self.shape.spans

    def chunk_arrays(
        self,
        size: int,
        cu_seqlens: list[int],
        slot_in: list[int],
        slot_out: list[int],
        saves: list[Sequence[tuple[int, int]]],
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The table's content for spans behind the decode rows, padded to the shape's spans."""
        more = self.shape.spans - len(slot_in)
        padding = [-1] * more
        ends = [cu_seqlens[-1]] * (self.shape.spans + 1 - len(cu_seqlens))
        return chunk_arrays(
            [*cu_seqlens, *ends],
            [*slot_in, *padding],
            [*slot_out, *padding],
            size,
            [*saves, *([()] * more)],
            self.most_chunks(size),
        )


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: CapturedBatch
    output: GraphOutput


class StepGraphs:
    """Graphs of steps of up to `limits.spans` decode rows, whose page tables have `limits.pages` in all."""

    def __init__(
        self,
        model: Model,
        storage: Storage,
        attention: PagedAttention | None,
        limits: StepLimits,
        drawn: Tensor,
        *,
        prefill: bool,
    ) -> None:
        """`drawn` [limits.spans + spans of a prefill shape]: the tokens that the last step drew; a graph
        reads and writes it. `prefill`: whether steps with prefill are captured as well."""
        device = storage.buffer.device
        self.model = model
        self.storage = storage
        self.paged = storage.layout.has(PAGE)
        self.deferred = storage.layout.records > 0
        self.page_size = storage.layout.page_size
        self.drawn = drawn
        shapes = decode_shapes(limits.spans)
        if prefill:
            shapes += prefill_shapes(limits.spans, limits.tokens)
        ints = max(_ints(shape) for shape in shapes) + limits.pages
        # What goes to the device comes first to pinned memory; two of each, in turn, since one may still be
        # on its way while the next step is packed.
        self._buffer = torch.zeros(ints, dtype=torch.int32, device=device)
        self._staging = [(self._buffer.cpu().pin_memory(), torch.cuda.Event()) for _ in range(2)]
        self.replays = 0  # steps that ran from a graph
        self._graphs: dict[StepShape, _Graph] = {}
        self._capture(shapes, attention, limits)

    def __call__(
        self, spans: Sequence[Span], rows_before: Mapping[int, int], pending: Sequence[int] | None
    ) -> GraphOutput | None:
        """Run `spans`, decode rows first; None when no shape holds them. rows_before: request id -> its row
        in `drawn`, for spans with a token that the host does not know. pending: of each decode row the
        records in its slot's ring; None without rings."""
        step = arrange(spans, rows_before, page_size=self.page_size, paged=self.paged)
        behind = len(spans) - step.decode
        tokens = len(step.tokens) - step.decode
        shape = next((shape for shape in self._graphs if shape.holds(step.decode, behind, tokens)), None)
        if shape is None:
            return None
        graph, batch, output = self._graphs[shape]
        if not self._fill(batch, step, spans, pending):
            return None
        if batch.attention is not None:
            batch.attention.plan(batch)
        graph.replay()
        self.replays += 1
        drawing = sum(span.sampling is not None for span in spans)
        return GraphOutput(output.logits[:drawing], output.largest[:drawing])

    # Static buffers

    def _fill(
        self,
        batch: CapturedBatch,
        step: HostStep,
        spans: Sequence[Span],
        pending: Sequence[int] | None = None,
    ) -> bool:
        """Pack a step and padding into the static buffers, in transfers that nobody waits for. False when its
        chunks are more than the shape has room for."""
        shape, rows = batch.shape, step.decode
        behind = spans[rows:]
        slot_in, slot_out = ([getattr(span, name) for span in behind] for name in ("slot_in", "slot_out"))
        offsets = [offset - rows for offset in step.cu_seqlens[rows:]]
        saves = [span.saves for span in behind]
        tables = {}
        for size in batch.places:
            places, slots, longest = batch.chunk_arrays(size, offsets, slot_in, slot_out, saves)
            if len(places) > len(batch.places[size][0]) or longest > batch.most_chunks(size):
                return False
            tables[size] = places, slots
        for size, (places, slots) in tables.items():
            for target, array in zip(batch.places[size], (places, slots), strict=True):
                target.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

        self._staging.append(self._staging.pop(0))
        staged, sent = self._staging[0]
        sent.synchronize()  # the copy before the last; only a host that is two steps ahead waits
        wide, narrow = (part.numpy() for part in _halves(staged, shape))
        last = [
            (end - 1 if row < rows else end - 1 - rows + shape.rows)
            for row, (end, span) in enumerate(zip(step.cu_seqlens[1:], spans, strict=True))
            if span.sampling is not None
        ]
        decode_slots = [span.slot_out for span in spans[:rows]]
        tokens, sources, positions, pages, slots, ends, _ = _parts(wide, _wide_lengths(shape))
        for part, values, nothing in (
            (tokens, step.tokens, 0),
            (sources, step.sources, -1),
            (positions, step.positions, 0),
            (pages, step.token_pages, -1),
        ):
            part[:] = nothing
            if not len(values):
                continue  # pages of a model that has none
            part[:rows] = values[:rows]
            part[shape.rows : shape.rows + len(values) - rows] = values[rows:]
        slots[:rows], slots[rows:] = decode_slots, -1
        ends[: len(last)], ends[len(last) :] = last, 0

        kv_lengths = _padded(step.kv_lengths, rows, shape, 0)
        page_offsets = [0, *_padded(step.page_offsets[1:], rows, shape, None)]
        starts = [*range(shape.rows + 1), *(shape.rows + offset for offset in offsets[1:])]
        starts += [starts[-1]] * (shape.rows + shape.spans + 1 - len(starts))
        kv_lens, page_indptr, q_indptr, records, page_ids = _parts(narrow, _narrow_lengths(shape))
        kv_lens[:], page_indptr[:], q_indptr[:] = kv_lengths, page_offsets, starts
        records[:rows] = pending or 0
        page_ids[: len(step.page_ids)] = step.page_ids
        batch.kv_lengths, batch.page_offsets, batch.cu_seqlens = kv_lengths, page_offsets, starts

        used = _ints(shape) + len(step.page_ids)
        self._buffer[:used].copy_(staged[:used], non_blocking=True)
        sent.record()
        return True

    def _batch(self, shape: StepShape) -> tuple[CapturedBatch, tuple[Tensor, Tensor, Tensor]]:
        """A batch over the static buffers; with it tokens, their sources, and the rows that are drawn
        from."""
        wide, narrow = _halves(self._buffer, shape)
        tokens, sources, positions, pages, slots, ends, _ = _parts(wide, _wide_lengths(shape))
        kv_lens, page_indptr, q_indptr, records, page_ids = _parts(narrow, _narrow_lengths(shape))
        none = wide[:0]
        batch = CapturedBatch(
            memory=self.storage,
            positions=positions,
            token_pages=pages,
            token_offsets=positions,
            page_ids=page_ids,
            page_indptr=page_indptr,
            kv_lens=kv_lens,
            q_indptr=q_indptr,
            decode_slots=slots,
            prefill_slots=none,
            carried=none,
            carried_slots=none,
            cu_seqlens=[],
            kv_lengths=[],
            page_offsets=[],
            slot_in=[],
            slot_out=[],
            pending=records if self.deferred else None,
            shape=shape,
        )
        return batch, (tokens, sources, ends)

    # Capture

    def _step(self, batch: CapturedBatch, inputs: tuple[Tensor, Tensor, Tensor]) -> GraphOutput:
        from denim.runner.kernels.inputs import inputs_of

        tokens, sources, ends = inputs
        ids, batch.token_offsets = inputs_of(tokens, sources, batch.positions, self.drawn, self.page_size)
        hidden = self.model(ids, batch)
        logits = self.model.logits(hidden if not batch.shape.spans else hidden[ends])
        best = largest(logits)
        self.drawn[: len(best)].copy_(best)
        return GraphOutput(logits, self.drawn[: len(best)])

    @torch.inference_mode()
    def _capture(
        self, shapes: Sequence[StepShape], attention: PagedAttention | None, limits: StepLimits
    ) -> None:
        """The largest first, whose memory then serves all others. A shape for which memory does not suffice
        is left out: such steps run eagerly."""
        begin = time.perf_counter()
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        graphs = {}
        with _nothing_dies():
            for shape in sorted(shapes, key=_cost, reverse=True):
                try:
                    graphs[shape] = self._captured(shape, attention, limits, stream, pool)
                except torch.OutOfMemoryError:
                    log.warning("no memory for a captured step of %s; such steps run eagerly", shape)
                    torch.cuda.empty_cache()
        self._graphs = dict(sorted(graphs.items(), key=lambda entry: _cost(entry[0])))
        log.info("%d shapes of steps captured in %.1f s", len(graphs), time.perf_counter() - begin)

    def _captured(
        self,
        shape: StepShape,
        attention: PagedAttention | None,
        limits: StepLimits,
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> _Graph:
        batch, inputs = self._batch(shape)
        if attention is not None:
            spans, tokens = shape.rows + shape.spans, shape.rows + shape.tokens
            batch.attention = attention.captured(shape.rows, StepLimits(spans, tokens, limits.pages))
        self._fill(batch, arrange([], {}, page_size=self.page_size, paged=self.paged), [])
        if batch.attention is not None:
            batch.attention.plan(batch)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch, inputs)  # compiles kernels and makes workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile, another engine's say, is no business of this capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = self._step(batch, inputs)
        return _Graph(graph, batch, output._replace(logits=_unowned(output.logits)))


@contextmanager
def _nothing_dies() -> Iterator[None]:
    """Garbage is collected before and not during: pinned memory or graphs of an engine that is no more may be
    in it, and a capture in which such things are let go of is invalid."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cost(shape: StepShape) -> tuple[int, int]:
    return shape.rows + shape.tokens, shape.spans


def _wide_lengths(shape: StepShape) -> list[int]:
    """Of the int64 parts: tokens, sources, positions, pages, decode slots, rows that are drawn from."""
    return [shape.rows + shape.tokens] * 4 + [shape.rows, shape.rows + shape.spans]


def _narrow_lengths(shape: StepShape) -> list[int]:
    """Of the int32 parts: KV lengths, offsets of page tables, offsets of tokens, records of decode rows; page
    ids follow."""
    spans = shape.rows + shape.spans
    return [spans, spans + 1, spans + 1, shape.rows]


def _size(lengths: Sequence[int]) -> int:
    """Of a block with parts so long, each of which begins at a multiple of `_ALIGNED`."""
    return sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths)


def _parts(block, lengths: Sequence[int]) -> list:
    """Views of the parts of a block, and of what follows them."""
    starts = [_size(lengths[:n]) for n in range(len(lengths) + 1)]
    views = [block[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    return [*views, block[starts[-1] :]]


def _ints(shape: StepShape) -> int:
    """int32 of a buffer before the page ids."""
    return 2 * _size(_wide_lengths(shape)) + _size(_narrow_lengths(shape))


def _halves(buffer: Tensor, shape: StepShape) -> tuple[Tensor, Tensor]:
    """int64 and int32 views of a buffer for one shape; the second goes to its end."""
    wide = 2 * _size(_wide_lengths(shape))
    return buffer[:wide].view(torch.int64), buffer[wide:]


def _padded(values: list[int], rows: int, shape: StepShape, nothing: int | None) -> list[int]:
    """Values of spans with those of padding between and behind them: `nothing`, or None: the value before."""
    decode, behind = values[:rows], values[rows:]
    for part, size in ((decode, shape.rows), (behind, shape.spans)):
        fill = (part or decode or [0])[-1] if nothing is None else nothing
        part += [fill] * (size - len(part))
    return decode + behind


class _Pointer:
    """Memory of a graph's pool, as torch takes it in."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """The same bytes without a hold on them, so that graphs captured later may use them too."""
    flat = torch.as_tensor(_Pointer(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
