"""Captured decode steps: one CUDA graph for each of a few numbers of rows.

Owns the static buffers that a graph reads and the graphs. A step of n decode rows runs in the smallest graph
that holds them; the rows behind are padding (slot -1, page -1, length 0), which layers read and write nothing
for. Knows the model as a function of a `StepBatch`; must not know what a layer does.

A graph goes from token ids to logits and, since most rows are greedy, to the largest of each row. All share
one pool of memory: what one leaves there is good until the next runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.paged_attention import PagedAttention, StepLimits
from denim.memory.layout import PAGE
from denim.memory.storage import Storage
from denim.models.family import Model
from denim.runner.largest import largest
from denim.runner.plan import Span

log = logging.getLogger("denim")

# Rows between graphs, up to so many: a padded row costs its share of the products, a graph its capture.
_STEPS = ((8, None), (64, 8), (128, 16), (256, 32), (1 << 30, 64))
_FIELDS = 5  # of `wide`: tokens, where a token was drawn, positions, pages, slots


class GraphOutput(NamedTuple):
    """`logits` [n, vocab] and the first largest of each row `largest` [n] int64; good until the next step."""

    logits: Tensor
    largest: Tensor


def graph_sizes(most: int) -> list[int]:
    """Numbers of rows to capture for steps of at most `most`: 1, 2, 4, 8, then ever sparser, and `most`."""
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    for end, stride in _STEPS[1:]:
        assert stride is not None
        while sizes[-1] + stride <= min(end, most):
            sizes.append(sizes[-1] + stride)
    return sizes if sizes[-1] == most else [*sizes, most]


class DecodeGraphs:
    """Graphs of steps of up to `limits.spans` decode rows, whose page tables have `limits.pages` in all."""

    def __init__(
        self,
        model: Model,
        storage: Storage,
        attention: PagedAttention | None,
        limits: StepLimits,
        drawn: Tensor,
    ) -> None:
        """`drawn` [limits.spans] int64: the tokens that the last step drew; a graph reads and writes it."""
        device = storage.buffer.device
        self.model = model
        self.storage = storage
        self.paged = storage.layout.has(PAGE)
        self.page_size = storage.layout.page_size
        self.most_rows = most_rows = limits.spans
        self.drawn = drawn
        pages = limits.pages
        self._wide = torch.zeros(_FIELDS, most_rows, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(2 * most_rows + 1 + pages, dtype=torch.int32, device=device)
        self._iota = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        # Two of each, in turn: one may still be on its way while the next step is packed.
        self._staging = [
            (torch.zeros_like(self._wide, device="cpu").pin_memory(), self._narrow.cpu().pin_memory())
            for _ in range(2)
        ]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepBatch, GraphOutput]] = {}
        self._capture(attention, limits)

    def __call__(self, spans: Sequence[Span], rows_before: Mapping[int, int]) -> GraphOutput:
        """Run decode rows, at most as many as the limits say. rows_before: request id -> its row in `drawn`,
        for spans whose token the host does not know."""
        size = next(size for size in self._graphs if size >= len(spans))
        graph, batch, output = self._graphs[size]
        self._fill(batch, spans, rows_before)
        if batch.attention is not None:
            batch.attention.plan(batch)
        graph.replay()
        return GraphOutput(output.logits[: len(spans)], output.largest[: len(spans)])

    def _fill(self, batch: StepBatch, spans: Sequence[Span], rows_before: Mapping[int, int]) -> None:
        """Pack `spans` and padding into the static buffers, in two transfers that nobody waits for."""
        rows, size, most = len(spans), batch.num_decode, self.most_rows
        self._staging.append(self._staging.pop(0))
        wide_host, narrow_host = self._staging[0]
        wide, narrow = wide_host.numpy(), narrow_host.numpy()
        tokens, source, positions, pages, slots = wide
        tokens[:rows] = [span.tokens[0] for span in spans]
        tokens[rows:size] = 0
        source[:size] = -1
        for row in np.flatnonzero(tokens[:rows] < 0).tolist():
            source[row] = rows_before[spans[row].request_id]
        positions[:rows] = [span.start for span in spans]
        positions[rows:size] = 0
        slots[:rows] = [span.slot_out for span in spans]
        slots[rows:size] = -1
        pages[:size] = -1

        lengths = [span.start + 1 for span in spans]
        padding = [0] * (size - rows)
        counts = [-(-length // self.page_size) for length in lengths] if self.paged else [0] * rows
        offsets = [0, *accumulate([*counts, *padding])]
        narrow[:rows] = lengths
        narrow[rows:size] = 0
        narrow[most : most + size + 1] = offsets
        page_ids = narrow[2 * most + 1 :]
        for span, at, count in zip(spans, offsets, counts, strict=False):
            page_ids[at : at + count] = span.pages[:count]
        if self.paged:
            pages[:rows] = page_ids[np.asarray(offsets[1 : rows + 1], dtype=np.int64) - 1]
        batch.kv_lengths, batch.page_offsets = lengths + padding, offsets
        batch.slot_in = batch.slot_out = slots[:size].tolist()

        self._wide.copy_(wide_host, non_blocking=True)
        used = 2 * most + 1 + offsets[-1]
        self._narrow[:used].copy_(narrow_host[:used], non_blocking=True)

    def _batch(self, size: int) -> StepBatch:
        """A batch of `size` decode rows over the static buffers."""
        _, _, positions, pages, slots = self._wide[:, :size]
        most = self.most_rows
        none = self._wide[0, :0]
        return StepBatch(
            memory=self.storage,
            positions=positions,
            token_pages=pages,
            token_offsets=positions,
            page_ids=self._narrow[2 * most + 1 :],
            page_indptr=self._narrow[most : most + size + 1],
            kv_lens=self._narrow[:size],
            q_indptr=self._iota[: size + 1],
            decode_slots=slots,
            prefill_slots=none,
            carried=none,
            carried_slots=none,
            cu_seqlens=list(range(size + 1)),
            kv_lengths=[],
            page_offsets=[],
            slot_in=[],
            slot_out=[],
        )

    def _step(self, batch: StepBatch) -> GraphOutput:
        tokens, source = self._wide[:2, : batch.num_decode]
        # A row without an answer drew NO_TOKEN; its request has failed, whatever comes of it here.
        tokens = torch.where(source >= 0, self.drawn[source.clamp(min=0)].clamp(min=0), tokens)
        batch.token_offsets = batch.positions % self.page_size
        logits = self.model.logits(self.model(tokens, batch))
        best = largest(logits)
        self.drawn[: len(best)].copy_(best)
        return GraphOutput(logits, self.drawn[: len(best)])

    @torch.inference_mode()
    def _capture(self, attention: PagedAttention | None, limits: StepLimits) -> None:
        """The largest first, whose memory then serves all others."""
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        graphs = {}
        for size in reversed(graph_sizes(self.most_rows)):
            batch = self._batch(size)
            if attention is not None:
                batch.attention = attention.captured(size, StepLimits(size, size, limits.pages))
            self._fill(batch, [], {})
            if batch.attention is not None:
                batch.attention.plan(batch)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(batch)  # compiles kernels and makes workspaces, which a capture may not
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                output = self._step(batch)
            graphs[size] = (graph, batch, output._replace(logits=_unowned(output.logits)))
        self._graphs = dict(sorted(graphs.items()))


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
