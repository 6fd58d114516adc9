"""Paged attention by Denim's own kernel: any dtype and head size, fp32 exactly, nothing to plan.

Owns the tiles for each dtype and size, and the workspace. See `denim.layers.kernels.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.kernels.paged_attention import Tiles, attend_pages
from denim.layers.kernels.split_keys import WAVE, Workspace, kept_floats, most_units
from denim.layers.paged_attention import AttentionShape, StepLimits

# Partial sums may take so much memory; where the largest step needs more, spans are split less finely.
WORKSPACE_BYTES = 128 << 20
PROGRAMS_PER_MULTIPROCESSOR = 4


class TritonAttention:
    """`PagedAttention` for layers of these shapes."""

    def __init__(self, shapes: Sequence[AttentionShape], limits: StepLimits, device: torch.device) -> None:
        self.limits = limits
        self.programs = PROGRAMS_PER_MULTIPROCESSOR * (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        self.floats = WORKSPACE_BYTES // torch.float32.itemsize
        self.decode_wave = min(
            finest_wave(self.floats, shape, tiles_of(torch.bfloat16, shape, 1), limits.spans, decode=True)
            for shape in shapes
        )
        self.workspace = Workspace.of(self.floats, device)

    def plan(self, batch: StepBatch) -> None:
        """Nothing to do: the kernel reads the lengths."""

    def captured(self, num_decode: int, limits: StepLimits) -> TritonAttention:
        """Itself: a launch depends on numbers of spans and tokens only."""
        return self

    def run(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows, spans = batch.num_decode, len(batch.kv_lens)
        shape = AttentionShape(q.shape[1], kv.shape[3], q.shape[2])
        key, value = kv[:, 0], kv[:, 1]
        if rows:
            self._launch(q, key, value, batch, scale, shape, 0, rows, gate, out, decode=True)
        if spans > rows:
            self._launch(q, key, value, batch, scale, shape, rows, spans, gate, out, decode=False)
        return out

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
        """Spans first .. end."""
        spans = end - first
        tokens = spans if decode else len(q) - batch.num_decode
        tiles = tiles_of(q.dtype, shape, tokens // spans)
        wave = self.decode_wave if decode else finest_wave(self.floats, shape, tiles, spans, decode=False)
        units = most_units(spans, tokens, shape.group, shape.num_kv_heads, tiles.rows, wave)
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
            wave=wave,
            programs=min(units, self.programs) if decode else units,
            out=out,
            gate=gate,
            decode=decode,
        )


@cache
def finest_wave(floats: int, shape: AttentionShape, tiles: Tiles, spans: int, *, decode: bool) -> int:
    """How finely each of so many spans may be cut, a power of two, when a workspace has `floats` numbers; 1:
    not at all."""
    wave = WAVE
    while wave > 1 and floats < kept_floats(
        spans, shape.group, shape.dim, shape.num_kv_heads, tiles.rows, wave, decode=decode
    ):
        wave //= 2
    return wave


@cache
def tiles_of(dtype: torch.dtype, shape: AttentionShape, tokens: int) -> Tiles:
    """Tiles for spans of about so many tokens. Measured on an H200: docs/performance.md."""
    rows = min(64, max(16, 1 << (tokens * shape.group - 1).bit_length()))
    if dtype == torch.float32:  # products without tensor cores, in small tiles for want of registers
        return Tiles(16, 16, 256, 4, 1)
    if rows <= 32:
        return Tiles(rows, 32 if shape.dim > 128 else 64, 256, 4, 3)
    if rows == 64 and tokens * shape.group <= 64:
        return Tiles(64, 64, 256, 4, 2)
    return Tiles(128, 64, 512, 8, 2)
