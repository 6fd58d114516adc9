"""Paged attention by FlashInfer (arXiv 2501.01005), planned once a step on the host.

Owns FlashInfer's wrappers: tensor-core decode for the decode rows, prefill (FA3 on Hopper) for the spans
behind them. Which kernel of theirs runs is theirs to choose. Needs page tables on the host side of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from denim.layers.batch import StepBatch
from denim.layers.kernels.output_gate import gate_output
from denim.layers.paged_attention import AttentionShape, StepLimits
from denim.layers.triton_attention import TritonAttention

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; all wrappers share it


class FlashInferAttention:
    """`PagedAttention` for layers of these shapes. `others` takes what FlashInfer does not get: layers with
    latents, and segments in captured steps, whose padding its wrappers refuse."""

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        others: TritonAttention,
    ) -> None:
        self.shapes = [shape for shape in shapes if not shape.extra]
        self.page_size = page_size
        self.dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype}
        self.others = others
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.decode = {shape: self._decode() for shape in self.shapes}
        self.segments = {shape: self._segments() for shape in self.shapes}

    def captured(self, num_decode: int, limits: StepLimits) -> FlashInferAttention:
        mine = copy(self)
        mine.decode, mine.segments = {}, {}
        for shape in self.shapes if num_decode else ():
            sizes = {"indptr": num_decode + 1, "indices": limits.pages, "last_page_len": num_decode}
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=self.workspace.device)
                for name, size in sizes.items()
            }
            mine.decode[shape] = self._decode(use_cuda_graph=True, **buffers)
        return mine

    def _decode(self, **given: Any) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        return BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True, **given)

    def _segments(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")

    def plan(self, batch: StepBatch) -> None:
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
            if spans > rows and shape in self.segments:
                queries = torch.tensor(batch.cu_seqlens[rows:], dtype=torch.int32) - rows
                self.segments[shape].plan(
                    queries,
                    offsets[rows:] - split,
                    batch.page_ids[split : batch.page_offsets[spans]],
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
            if shape in self.segments:
                self.segments[shape].run(q[rows:], kv, q_scale=scale, out=out[rows:])
            else:
                self.others.segments(q, kv, batch, scale, None, out)
        if gate is not None:
            gate_output(out, gate)
        return out

    def run_latent(self, q: Tensor, pages: Tensor, batch: StepBatch, value_dim: int, scale: float) -> Tensor:
        return self.others.run_latent(q, pages, batch, value_dim, scale)
