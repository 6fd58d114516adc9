"""Paged attention by FlashInfer (arXiv 2501.01005), planned once a step on the host.

Owns FlashInfer's wrappers: tensor-core decode for the decode rows, prefill (FA3 on Hopper) for the spans
behind them. Which kernel of theirs runs is theirs to choose. Needs page tables on the host side of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.kernels.output_gate import gate_output
from denim.layers.paged_attention import AttentionShape, PagedAttention, StepLimits

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; all wrappers share it


class FlashInferAttention:
    """`PagedAttention` for layers of these shapes. `latent` takes the layers with latents, which FlashInfer
    does not get."""

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        latent: PagedAttention,
    ) -> None:
        self.shapes = [shape for shape in shapes if not shape.extra]
        self.page_size = page_size
        self.dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype}
        self.latent = latent
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.decode: dict[AttentionShape, Any] = {}
        self.segments: dict[AttentionShape, Any] = {}
        for shape in self.shapes:
            self.decode[shape], self.segments[shape] = self._wrappers()

    def captured(self, num_decode: int, limits: StepLimits) -> FlashInferAttention:
        mine = object.__new__(FlashInferAttention)
        mine.__dict__ |= self.__dict__
        mine.latent = self.latent.captured(num_decode, limits)
        mine.decode, mine.segments = {}, {}
        for shape in self.shapes:
            mine.decode[shape], mine.segments[shape] = self._wrappers((num_decode, limits))
        return mine

    def _wrappers(self, capture: tuple[int, StepLimits] | None = None) -> tuple[Any, Any]:
        """Wrappers for decode rows and for segments, with buffers of their own where a graph is captured."""
        import flashinfer

        decode: dict[str, Any] = {"use_tensor_cores": True}
        segments: dict[str, Any] = {}
        if capture is not None:
            num_decode, limits = capture
            device = self.workspace.device
            for into, spans, names in (
                (decode, num_decode, "paged_kv_{}_buffer"),
                (segments, limits.spans - num_decode, "paged_kv_{}_buf"),
            ):
                into["use_cuda_graph"] = True
                for name, size in (
                    ("indptr", spans + 1),
                    ("indices", limits.pages),
                    ("last_page_len", spans),
                ):
                    into[names.format(name)] = torch.zeros(size, dtype=torch.int32, device=device)
            segments["qo_indptr_buf"] = torch.zeros_like(segments["paged_kv_indptr_buf"])
            segments["max_total_num_rows"] = limits.tokens
        return (
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", **decode),
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", **segments),
        )

    def plan(self, batch: StepBatch) -> None:
        self.latent.plan(batch)
        rows, spans = batch.num_decode, len(batch.kv_lengths)
        if not self.shapes:
            return
        offsets = torch.tensor(batch.page_offsets, dtype=torch.int32)
        last = torch.tensor(
            [(n - 1) % self.page_size + 1 if n else 0 for n in batch.kv_lengths], dtype=torch.int32
        )
        split = batch.page_offsets[rows]
        for shape in self.shapes:
            heads = (shape.num_heads, shape.num_kv_heads, shape.dim, self.page_size)
            if rows:
                self.decode[shape].plan(
                    offsets[: rows + 1],
                    batch.page_ids[:split],
                    last[:rows],
                    *heads,
                    sm_scale=1.0,
                    **self.dtypes,
                )
            if spans > rows:
                queries = torch.tensor(batch.cu_seqlens[rows:], dtype=torch.int32) - rows
                self.segments[shape].plan(
                    queries,
                    offsets[rows:] - split,
                    batch.page_ids[split:],
                    last[rows:],
                    *heads,
                    causal=True,
                    sm_scale=1.0,
                    **self.dtypes,
                )

    def run(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None = None
    ) -> Tensor:
        rows = batch.num_decode
        shape = AttentionShape(q.shape[1], kv.shape[3], q.shape[2])
        q = q.contiguous()
        out = torch.empty_like(q)
        if rows:
            self.decode[shape].run(q[:rows], kv, q_scale=scale, out=out[:rows])
        if len(q) > rows:
            self.segments[shape].run(q[rows:], kv, q_scale=scale, out=out[rows:])
        if gate is not None:
            gate_output(out, gate)
        return out

    def run_latent(self, q: Tensor, pages: Tensor, batch: StepBatch, value_dim: int, scale: float) -> Tensor:
        return self.latent.run_latent(q, pages, batch, value_dim, scale)
