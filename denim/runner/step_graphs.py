"""Captured steps: one CUDA graph for each of a few shapes, from token ids to the largest logit of each row.

Owns the graphs. A step runs in the smallest shape that holds it; what a shape has beyond it is padding, for
which layers read and write nothing. Steps that no shape holds run eagerly: long ones, whose kernels outlast
their launches, and rare ones. Knows the model as a function of a `StepBatch`; must not know what a layer
does.

All graphs share one pool of memory: what one leaves there is good until the next runs.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from denim.layers.paged_attention import PagedAttention, StepLimits
from denim.memory.layout import PAGE
from denim.memory.storage import Storage
from denim.models.family import Model
from denim.runner.captured_batch import CapturedBatch
from denim.runner.largest import largest
from denim.runner.packing import HostStep, arrange
from denim.runner.static_inputs import InputBuffers, StaticInputs, ints_of
from denim.runner.step_shapes import StepShape, decode_shapes, prefill_shapes

log = logging.getLogger("denim")


class GraphOutput(NamedTuple):
    """For each span that draws, in order: `logits` [n, vocab], and the first largest `largest` [n] int64.
    Good until the next step."""

    logits: Tensor
    largest: Tensor


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
        self.page_size = storage.layout.page_size
        self.drawn = drawn
        shapes = decode_shapes(limits.spans)
        if prefill:
            shapes += prefill_shapes(limits.spans, limits.tokens)
        ints = max(map(ints_of, shapes)) + limits.pages
        self._inputs = InputBuffers(ints, device)
        self.replays = 0  # steps that ran from a graph
        self._graphs: dict[StepShape, _Graph] = {}
        self._capture(shapes, attention, limits)

    def __call__(self, step: HostStep, pending: Sequence[int] | None) -> GraphOutput | None:
        """Run a step; None when no shape holds it. pending: of each decode row the records in its slot's
        ring; None in a step that records nothing."""
        behind = len(step.request_ids) - step.decode
        tokens = len(step.tokens) - step.decode
        shape = next((shape for shape in self._graphs if shape.holds(step.decode, behind, tokens)), None)
        if shape is None:
            return None
        graph, batch, output = self._graphs[shape]
        if (batch.pending is None) != (pending is None) or not self._fill(batch, step, pending):
            return None
        if batch.attention is not None:
            batch.attention.plan(batch)
        graph.replay()
        self.replays += 1
        drawing = len(step.drawing)
        if drawing == len(output.largest):
            return output
        return GraphOutput(output.logits[:drawing], output.largest[:drawing])

    # Static memory

    def _fill(self, batch: CapturedBatch, step: HostStep, pending: Sequence[int] | None = None) -> bool:
        """Bring a step and padding to where the graph reads them, in transfers that nobody waits for. False
        when its chunks are more than the shape has room for."""
        if not batch.send_chunks(step, self._inputs.begin()):
            return False
        sent = self._inputs.send(batch.staged, batch.shape, step, pending)
        batch.kv_lengths, batch.page_offsets = sent.kv_lens.tolist(), sent.page_indptr.tolist()
        batch.cu_seqlens = sent.q_indptr.tolist()
        return True

    def _batch(self, shape: StepShape) -> tuple[CapturedBatch, StaticInputs]:
        """A batch over the static buffers, and all that lies in them."""
        inputs, staged = self._inputs.inputs(shape)
        deferred = self.storage.layout.recorded(shape.rows) > 0
        return CapturedBatch.of(inputs, staged, shape, self.storage, deferred=deferred), inputs

    # Capture

    def _step(self, batch: CapturedBatch, inputs: StaticInputs) -> GraphOutput:
        from denim.runner.kernels.inputs import inputs_of

        ids, batch.token_offsets = inputs_of(
            inputs.tokens, inputs.sources, inputs.positions, self.drawn, self.page_size
        )
        hidden = self.model(ids, batch)
        logits = self.model.logits(hidden if not batch.shape.spans else hidden[inputs.ends])
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
            for shape in sorted(shapes, key=lambda shape: shape.cost, reverse=True):
                try:
                    graphs[shape] = self._captured(shape, attention, limits, stream, pool)
                except torch.OutOfMemoryError:
                    log.warning("no memory for a captured step of %s; such steps run eagerly", shape)
                    torch.cuda.empty_cache()
        self._graphs = dict(sorted(graphs.items(), key=lambda entry: entry[0].cost))
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
        self._fill(batch, arrange([], {}, page_size=self.page_size, paged=self.paged))
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
