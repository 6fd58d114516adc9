"""Full attention over paged KV.

Owns the projections of one attention layer, and the plain torch form of what lies between them: the place of
KV in pages and the read of pages. Where the batch says who attends (`StepBatch.attention`), kernels take
over. The pages' place in memory comes with the batch; a page holds [2, page_size, num_kv_heads, head_dim] per
layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.layers.rotary import rotate
from denim.spec.attention import FullAttention

# Queries of one attention call. Keys end with the block, so that a CPU skips most of what is masked (128
# rows: a third less time for 512 fresh tokens, measured); on a GPU it only bounds the mask's memory.
QUERY_BLOCK = {"cpu": 128, "cuda": 8192}


class Attention(nn.Module):
    """Grouped-query attention; gate, QK-norm and (partial) RoPE as the spec says.

    `qkv.weight` is [q (per head [q | gate] if gated) | k | v] by rows. `zero_centred` is said of the QK-norm;
    `scale` is that of the scores, None: head_dim ** -0.5.
    """

    def __init__(
        self,
        spec: FullAttention,
        hidden: int,
        index: int,
        *,
        norm_eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
        zero_centred: bool = True,
        scale: float | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.scale = scale
        self.q_rows = spec.num_heads * spec.head_dim * (2 if spec.gated else 1)
        self.kv_rows = spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(hidden, self.q_rows + 2 * self.kv_rows, dtype=dtype, device=device)
        self.out = Linear(spec.num_heads * spec.head_dim, hidden, dtype=dtype, device=device)
        if spec.qk_norm:
            norm = {"zero_centred": zero_centred, "dtype": dtype, "device": device}
            q_dim, k_dim = (self.q_rows, self.kv_rows) if spec.qk_norm_whole else (spec.head_dim,) * 2
            self.q_norm = RMSNorm(q_dim, norm_eps, **norm)
            self.k_norm = RMSNorm(k_dim, norm_eps, **norm)

    def forward(
        self, x: Tensor, batch: StepBatch, *, norm: RMSNorm | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden] -> [T, hidden]: add + mixer(norm(x)), see `Linear.project`; writes the
        KV of all T tokens, then attends."""
        spec = self.spec
        q, k, v = self.qkv.project(x, norm=norm).split((self.q_rows, self.kv_rows, self.kv_rows), dim=-1)
        q = q.view(-1, spec.num_heads, self.q_rows // spec.num_heads)
        gate = None
        if spec.gated:
            q, gate = q.split(spec.head_dim, dim=-1)
        k = k.view(-1, spec.num_kv_heads, spec.head_dim)
        v = v.view(-1, spec.num_kv_heads, spec.head_dim)
        norms = None
        if spec.qk_norm_whole:
            q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
        elif spec.qk_norm:
            norms = self.q_norm, self.k_norm
        kv = batch.memory.kv(self.index)
        q = prepare(q, k, v, kv, batch, turned=spec.rotary_dim > 0, norms=norms)
        return self.out.project(attend(q, kv, batch, self.scale, gate).flatten(1), add=add)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    batch: StepBatch,
    *,
    turned: bool,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
) -> Tensor:
    """Write the step's KV into its pages; returns the queries [T, heads, head_dim] that read them.

    q: [T, heads, head_dim], k, v: [T, kv_heads, head_dim]; norms: of q and k, a head at a time; `turned`:
    RoPE by the batch's angles. kv: a layer's view of all pages.
    """
    if batch.attention is not None:
        from denim.layers.kernels.query_key import query_key

        return query_key(
            q,
            k,
            v,
            kv,
            batch.token_pages,
            batch.token_offsets,
            q_scale=norms[0].scale if norms else None,
            k_scale=norms[1].scale if norms else None,
            eps=norms[0].eps if norms else 0.0,
            cos=batch.cos if turned else None,
            sin=batch.sin if turned else None,
        )
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    if turned:
        q, k = rotate(q, batch.cos, batch.sin), rotate(k, batch.cos, batch.sin)
    store(k, v, kv, batch)
    return q


def store(k: Tensor, v: Tensor, kv: Tensor, batch: StepBatch) -> None:
    """Write k and v [T, kv_heads, head_dim] of the step's tokens into `kv`, a layer's view of all pages."""
    kv[batch.token_pages, 0, batch.token_offsets] = narrowed(k, kv.dtype)
    kv[batch.token_pages, 1, batch.token_offsets] = narrowed(v, kv.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, where what is too large for an 8-bit format becomes its largest number, not NaN."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def attend(
    q: Tensor, kv: Tensor, batch: StepBatch, scale: float | None = None, gate: Tensor | None = None
) -> Tensor:
    """Softmax attention of every span over its own pages, times sigmoid(gate) where there is one.

    q, gate: [T, heads, head_dim]; kv: a layer's view of all pages. Returns [T, heads, head_dim]. Scores are
    scaled by `scale`, None: head_dim ** -0.5. Reads are masked by length: what lies behind it in a page is
    never used.
    """
    if batch.attention is not None:
        return batch.attention.run(q, kv, batch, q.shape[-1] ** -0.5 if scale is None else scale, gate)
    out = _plain(q, kv, batch, scale)
    return out if gate is None else out * torch.sigmoid(gate)


def _plain(q: Tensor, kv: Tensor, batch: StepBatch, scale: float | None) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    first = 0
    if batch.num_decode and q.is_cuda:
        first = batch.num_decode
        out[:first] = _decode_rows(q[:first], kv, batch, scale)
    for row in range(first, len(batch.tables)):
        begin, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
        length = batch.kv_lengths[row]
        table = batch.tables[row]
        k, v = (
            kv[:, side].index_select(0, table).flatten(0, 1)[:length].transpose(0, 1).to(q.dtype)
            for side in (0, 1)
        )
        if end - begin == 1:
            # The query heads that share a key head are the rows of one small product.
            query = q[begin].reshape(k.shape[0], -1, q.shape[-1])
            row_out = F.scaled_dot_product_attention(query[None], k[None], v[None], scale=scale)
            out[begin] = row_out.reshape(q.shape[1:])
            continue
        block = QUERY_BLOCK[q.device.type]
        for at in range(begin, end, block):
            stop = min(at + block, end)
            seen = length - (end - stop)
            out[at:stop] = _segment(q[at:stop], k[:, :seen], v[:, :seen], scale)
    return out


def _segment(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of consecutive queries, the last of which sees all keys.

    q: [n, heads, head_dim]; k, v: [kv_heads, seen, head_dim]. Returns [n, heads, head_dim].
    """
    n, seen = len(q), k.shape[1]
    fresh = n == seen
    mask = None if fresh else torch.ones(n, seen, dtype=torch.bool, device=q.device).tril(seen - n)
    return F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=fresh,
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


def _decode_rows(q: Tensor, kv: Tensor, batch: StepBatch, scale: float | None = None) -> Tensor:
    """Attention of all decode rows in one call, padded to the longest table: one launch, not one a row.

    q: [R, heads, head_dim]. Padding repeats page 0 of a row; its keys are masked and its values zeroed,
    since a page that was never written may hold anything, NaN included.
    """
    rows, heads, head_dim = q.shape
    tables, lengths = batch.decode_tables
    kv_heads, page_size = kv.shape[3], kv.shape[2]
    valid = torch.arange(tables.shape[1] * page_size, device=q.device) < lengths[:, None]
    k, v = (
        kv[:, side].index_select(0, tables.flatten()).view(rows, -1, kv_heads, head_dim).to(q.dtype)
        for side in (0, 1)
    )
    v = v.masked_fill(~valid[:, :, None, None], 0)
    k = k.masked_fill(~valid[:, :, None, None], 0)
    query = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        query, k.transpose(1, 2), v.transpose(1, 2), attn_mask=valid[:, None, None, :], scale=scale
    )
    return out.reshape(rows, heads, head_dim)
