"""The forward pass of a step on the device, eager or from a captured graph.

Owns what outlives every single step there: the model, the planned attention, the graphs, and the tokens that
the last step drew, which the next one may need before the host has seen them. Knows spans; must not know
requests' states, sampling or when anything ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.paged_attention import StepLimits, attention_backend, attention_shapes, paged_attention
from denim.memory.layout import PAGE
from denim.memory.storage import Storage
from denim.models.family import Model
from denim.recurrence.backend import TRITON, rule_backend
from denim.runner.packing import HostStep, arrange, one_further, pack, sender
from denim.runner.plan import NO_ROWS, DecodeRows, Span
from denim.runner.step_graphs import GraphOutput, StepGraphs
from denim.runner.step_shapes import MOST_PREFILL_SPANS


class Forward:
    """`drawn` [most spans] int64: what the last step drew, by row."""

    def __init__(
        self,
        model: Model,
        storage: Storage,
        limits: StepLimits,
        *,
        attention: str = "auto",
        eager: bool = False,
    ) -> None:
        """`limits`: of any step. `attention`: one of `denim.layers.paged_attention.BACKENDS`. `eager`: no
        graphs; there are none without a CUDA device either. Raises ConfigError for an attention backend that
        is not there."""
        self.model = model
        self.storage = storage
        self.device = device = storage.buffer.device
        self.page_size = storage.layout.page_size
        self.paged = storage.layout.has(PAGE)
        self._send = sender(device)
        self._before: HostStep | None = None  # the step that was arranged last
        self.drawn = torch.zeros(limits.spans + MOST_PREFILL_SPANS, dtype=torch.int64, device=device)
        dtype = getattr(torch, model.spec.dtype)
        shapes = attention_shapes(model.spec)
        self.attention_backend = attention_backend(attention, shapes, dtype=dtype, device_type=device.type)
        self.attention = paged_attention(
            self.attention_backend,
            shapes,
            limits,
            page_size=self.page_size,
            dtype=dtype,
            kv_dtype=next((getattr(torch, place.dtype) for place in storage.layout.page_tensors), dtype),
            device=device,
        )
        # Plain torch forms read index tensors on the host, or know no padding.
        wishes = {getattr(module, "recurrence_backend", TRITON) for module in model.modules()}
        kernels = all(rule_backend(device.type, wish) == TRITON for wish in wishes)
        capturable = device.type == "cuda" and (self.attention is not None or not shapes) and kernels
        # All of them write the states that are wanted inside a sequence (`Span.saves`); plain forms do not.
        self.saves_inside = device.type == "cuda" and kernels
        self.graphs = None
        self.most_prefill_spans: int | None = None  # in a step that shall be captured; None: it is not to be
        if capturable and not eager:
            # Latents are expanded span by span in prefill, which the host counts out.
            prefill = not any(shape.extra for shape in shapes)
            self.graphs = StepGraphs(model, storage, self.attention, limits, self.drawn, prefill=prefill)
            self.most_prefill_spans = MOST_PREFILL_SPANS if prefill else None

    def arrange(
        self,
        spans: Sequence[Span],
        rows_before: Mapping[int, int] | None = None,
        rows: DecodeRows = NO_ROWS,
    ) -> HostStep:
        """`rows` and spans as `replay` and `run` take them. rows_before: request id -> its row in `drawn`,
        for those with a token that the host does not know."""
        drawn = {} if rows_before is None else rows_before
        step = None
        if not spans and self._before is not None:
            step = one_further(self._before, rows, drawn, page_size=self.page_size)
        if step is None:
            step = arrange(spans, drawn, page_size=self.page_size, paged=self.paged, rows=rows)
        self._before = step
        return step

    def replay(self, step: HostStep, pending: Sequence[int] | None = None) -> GraphOutput | None:
        """What the spans that draw a token draw from, by a captured graph; None when there is none for these
        spans. A graph has no report on prompts. pending: of each decode row the records in its slot's ring;
        None without rings."""
        return None if self.graphs is None or step.scored else self.graphs(step, pending)

    def run(self, step: HostStep, pending: Sequence[int] | None = None) -> tuple[StepBatch, Tensor]:
        """The batch of a step, and its hidden states [T, hidden]. Arguments as in `replay`."""
        packed = pack(step, self.storage, page_size=self.page_size, send=self._send, pending=pending)
        batch, tokens, source = packed
        if source is not None:
            # A row without an answer drew NO_TOKEN; its request has failed, whatever comes of it here.
            tokens = torch.where(source >= 0, self.drawn[source.clamp(min=0)].clamp(min=0), tokens)
        if self.attention is not None:
            batch.attention = self.attention
            self.attention.plan(batch)
        return batch, self.model(tokens, batch)

    def last_logits(self, batch: StepBatch, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), vocab] behind the last token of each of these spans; `hidden` is `run`'s."""
        last = np.asarray(batch.cu_seqlens, dtype=np.int64)[1:][np.asarray(rows, dtype=np.int64)] - 1
        picked = hidden if len(last) == len(hidden) else hidden[self._send(last)]
        return self.model.logits(picked)
