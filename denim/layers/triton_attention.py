"""Paged attention by Denim's own kernels: nothing to plan, and any step may be captured.

Owns the choice among them and the workspace. `kernels.paged_attention` takes any dtype and head size, fp32
exactly; on Hopper `kernels.hopper_decode` and `kernels.hopper_segments` take 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.kernels.paged_attention import Tiles, attend_pages
from denim.layers.kernels.split_keys import (
    LEAST_DOT,
    Cut,
    Workspace,
    kept_decode_units,
    kept_floats,
    kept_units,
    most_units,
)
from denim.layers.paged_attention import AttentionShape, StepLimits
from denim.recurrence.kernels.hopper import on_hopper

# Programs of a multiprocessor for decode rows, of the portable kernel; the one for Hopper has one.
PROGRAMS = 4
# Units of all decode rows that keep the device's memory busy, and fewest and most keys of a split: a row
# alone is done sooner in small ones, and a long row among short ones must not be the last. Measured on an
# H200.
DECODE_UNITS, DECODE_SPLITS = 256, (128, 1024)
HOPPER_UNITS, HOPPER_SPLITS = 128, (128, 2048)
# Units that one row alone is cut into: each more is one more partial sum to add.
DECODE_WAVE = 64
# All segments together are units for a large device's 132 multiprocessors; their partial sums are as large as
# a tile.
SEGMENTS = Cut(128, 512, 1 << 30)
SEGMENT_ROWS = 128  # of the largest tile


class TritonAttention:
    """`PagedAttention` for layers of these shapes."""

    def __init__(
        self, shapes: Sequence[AttentionShape], limits: StepLimits, page_size: int, device: torch.device
    ) -> None:
        self.multiprocessors = 1
        self.hopper = on_hopper(device)
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        keys = limits.pages * page_size
        floats = [kept_floats(kept_units(SEGMENTS), SEGMENT_ROWS, shape.dim) for shape in shapes]
        floats += [
            decode_floats(shape, rows, keys) for shape in shapes for rows in range(1, limits.spans + 1)
        ]
        self.workspace = Workspace.of(max(floats), device)

    def plan(self, batch: StepBatch) -> None:
        """Nothing to do: the kernel reads the lengths."""

    def captured(self, num_decode: int, limits: StepLimits) -> TritonAttention:
        """Itself: a launch depends on numbers of spans and tokens only."""
        return self

    def run(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if batch.num_decode:
            self._rows(q, kv, batch, scale, gate, out)
        if len(batch.kv_lens) > batch.num_decode:
            self.segments(q, kv, batch, scale, gate, out)
        return out

    def _rows(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None, out: Tensor
    ) -> None:
        """The decode rows, into their rows of `out`."""
        rows = batch.num_decode
        if self._suits(q, kv):
            from denim.layers.kernels.hopper_decode import hopper_decode

            hopper_decode(
                q[:rows],
                kv,
                batch.kv_lens[:rows],
                batch.page_ids,
                batch.page_indptr,
                scale,
                self.workspace,
                cut=decode_cut(rows, hopper=True),
                programs=self.multiprocessors,
                out=out,
                gate=gate,
            )
            return
        shape = AttentionShape(q.shape[1], kv.shape[3], q.shape[2])
        self._launch(q, kv[:, 0], kv[:, 1], batch, scale, shape, 0, rows, gate, out, decode=True)

    def segments(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None, out: Tensor
    ) -> None:
        """The spans behind the decode rows, into their rows of `out`."""
        rows, spans = batch.num_decode, len(batch.kv_lens)
        shape = AttentionShape(q.shape[1], kv.shape[3], q.shape[2])
        if self._suits(q, kv):
            from denim.layers.kernels.hopper_segments import hopper_segments

            hopper_segments(
                q,
                kv,
                batch.q_indptr[rows:],
                batch.kv_lens[rows:],
                batch.page_ids,
                batch.page_indptr[rows:],
                scale,
                self.workspace,
                tokens=len(q) - rows,
                cut=SEGMENTS,
                out=out,
                gate=gate,
            )
            return
        self._launch(q, kv[:, 0], kv[:, 1], batch, scale, shape, rows, spans, gate, out, decode=False)

    def _suits(self, q: Tensor, kv: Tensor) -> bool:
        if not self.hopper:
            return False
        from denim.layers.kernels.hopper_pages import suits

        return suits(q, kv)

    def run_latent(self, q: Tensor, pages: Tensor, batch: StepBatch, value_dim: int, scale: float) -> Tensor:
        out = q.new_empty(len(q), q.shape[1], value_dim)
        shape = AttentionShape(q.shape[1], 1, value_dim, q.shape[2] - value_dim)
        if len(q):
            key = pages.unsqueeze(2)
            self._launch(q, key, None, batch, scale, shape, 0, batch.num_decode, None, out, decode=True)
        return out

    def _launch(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor | None,
        batch: StepBatch,
        scale: float,
        shape: AttentionShape,
        first: int,
        end: int,
        gate: Tensor | None,
        out: Tensor,
        *,
        decode: bool,
    ) -> None:
        """Spans first .. end, with the portable kernel."""
        spans = end - first
        tokens = spans if decode else len(q) - batch.num_decode
        tiles = tiles_of(q.dtype, shape, tokens // spans)
        if decode:
            cut = decode_cut(spans, hopper=False)
            programs = PROGRAMS * self.multiprocessors
        else:
            cut = SEGMENTS
            programs = most_units(spans, tokens, shape.group, shape.num_kv_heads, tiles.rows, cut)
        attend_pages(
            q,
            key,
            value,
            batch.q_indptr[first:],
            batch.kv_lens[first:end],
            batch.page_ids,
            batch.page_indptr[first:],
            scale,
            tiles,
            self.workspace,
            cut=cut,
            programs=programs,
            out=out,
            gate=gate,
            decode=decode,
        )


@cache
def decode_cut(rows: int, *, hopper: bool) -> Cut:
    """How finely each of so many decode rows is cut."""
    units, (least, most) = (HOPPER_UNITS, HOPPER_SPLITS) if hopper else (DECODE_UNITS, DECODE_SPLITS)
    return Cut(min(DECODE_WAVE, max(1, units // rows)), least, most)


def decode_floats(shape: AttentionShape, rows: int, keys: int) -> int:
    """Numbers of partial sums that so many decode rows with `keys` keys together leave, whichever kernel
    runs. A group wider than LEAST_DOT may be several tiles."""
    group = shape.group if shape.group <= LEAST_DOT else -(-shape.group // LEAST_DOT) * LEAST_DOT
    return max(
        kept_floats(kept_decode_units(rows, keys, shape.num_kv_heads, cut), group, shape.dim)
        for cut in (decode_cut(rows, hopper=False), decode_cut(rows, hopper=True))
    )


@cache
def tiles_of(dtype: torch.dtype, shape: AttentionShape, tokens: int) -> Tiles:
    """Tiles for spans of about so many tokens. Measured on an H200: docs/performance.md."""
    rows = min(64, max(16, 1 << (tokens * shape.group - 1).bit_length()))
    if dtype == torch.float32:  # products without tensor cores, in small tiles for want of registers
        return Tiles(16, 16, 4, 1)
    if rows <= 32:
        return Tiles(rows, 32 if shape.dim > 128 else 64, 4, 3)
    if rows == 64 and tokens * shape.group <= 64:
        return Tiles(64, 64, 4, 2)
    return Tiles(128, 64, 8, 2)
