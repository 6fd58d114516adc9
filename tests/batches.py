"""Batches for tests of layers, packed as the runner packs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.runner.packing import arrange, pack, sender
from denim.runner.plan import Span


def batch_of(
    spans: Sequence[Span], memory: Any = None, *, page_size: int = 16, device: str = "cpu"
) -> StepBatch:
    """The batch of `spans`, decode rows first; without pages where no span names any."""
    paged = any(span.pages for span in spans)
    step = arrange(spans, {}, page_size=page_size, paged=paged)
    return pack(step, memory, page_size=page_size, send=sender(torch.device(device))).batch


def span_of(start: int, end: int, slot_in: int, slot_out: int, pages: Sequence[int] = ()) -> Span:
    """A span of tokens that nobody reads."""
    return Span(0, start, [0] * (end - start), list(pages), slot_in, slot_out)


def rows_of_pages(
    tables: Sequence[Tensor],
    lengths: Sequence[int],
    news: Sequence[int],
    *,
    decode: int,
    page_size: int,
    device: str = "cpu",
) -> StepBatch:
    """The last `news` tokens of sequences of so many `lengths`, the first `decode` of them decode rows."""
    rows = zip(tables, lengths, news, strict=True)
    spans = [
        span_of(length - new, length, 0 if row < decode else -1, 0, table.tolist())
        for row, (table, length, new) in enumerate(rows)
    ]
    return batch_of(spans, page_size=page_size, device=device)
