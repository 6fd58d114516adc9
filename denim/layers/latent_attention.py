"""Multi-head latent attention over paged latents.

Owns the projections of one layer and the read of its pages. A page holds [page_size, latent + rope] per
layer: each token's normed latent, and behind it the key part that all heads share, turned where the model
has RoPE. DeepSeek-V2 (arXiv 2405.04434); Kimi Linear's without RoPE, Ling-3.0's with RoPE and a gate.

Two forms
=========
With U_k [nope, latent] and U_v [value, latent] the parts of a head's up-projection, c_s the latents and r_s
the shared key parts, token t's scores and output are

    a_ts = <q_t, U_k c_s> + <q'_t, r_s>        o_t = sum_s softmax(a)_ts U_v c_s

Absorbed: a_ts = <[U_k^T q_t | q'_t], [c_s | r_s]> and o_t = U_v (sum_s softmax(a)_ts c_s). All heads then
attend over the same rows, as they lie in the page; that is multi-query attention with wide heads, and the
form for decode. Expanded: keys [U_k c_s | r_s] and values U_v c_s are made once for a segment, and attention
runs over narrow heads. With n queries over the same tokens, each token costs a head n (2 latent + rope)
products in the first form and n (nope + rope + value) + latent (nope + value) in the second, so that many
queries pay for the expansion (`expand_from`).
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.attention import QUERY_BLOCK, narrowed
from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.layers.rotary import rotate
from denim.spec.attention import LatentAttention

# Queries of one absorbed product: 16 of 32 heads over 32k tokens are 64 MiB of fp32 scores.
ABSORBED_BLOCK = 16


class LatentAttentionLayer(nn.Module):
    """`in_proj.weight` is [q | latent | shared key | gate] by rows, q being the queries of all heads
    [nope | rope], or their low-rank part, which `query_norm` and `query_up` turn into them. `up` is
    [heads, nope + value, latent]. `turned`: RoPE turns the last `rope_dim` of each query and the shared key,
    whose dims are paired (0, 1), (2, 3), ...
    """

    def __init__(
        self,
        spec: LatentAttention,
        hidden: int,
        index: int,
        *,
        turned: bool,
        norm_eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.turned = turned
        self.scale = (spec.nope_dim + spec.rope_dim) ** -0.5
        saved = 2 * spec.latent_dim - spec.nope_dim - spec.value_dim
        work = spec.latent_dim * (spec.nope_dim + spec.value_dim)
        self.expand_from = work / saved if saved > 0 else inf

        queries = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        gates = spec.num_heads if spec.gated else 0
        self.rows = (spec.query_rank or queries, spec.latent_dim, spec.rope_dim, gates)
        place = {"dtype": dtype, "device": device}
        self.in_proj = Linear(hidden, sum(self.rows), **place)
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if spec.query_rank:
            self.query_norm = RMSNorm(spec.query_rank, norm_eps, zero_centred=False, **place)
            self.query_up = Linear(spec.query_rank, queries, **place)
        self.latent_norm = RMSNorm(spec.latent_dim, norm_eps, zero_centred=False, **place)
        self.up = nn.Parameter(
            torch.empty(
                spec.num_heads,
                spec.nope_dim + spec.value_dim,
                spec.latent_dim,
                dtype=dtype,
                device=device,
            ),
            requires_grad=False,
        )
        self.out = Linear(spec.num_heads * spec.value_dim, hidden, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; writes the latents of all T tokens, then attends."""
        spec = self.spec
        q, latent, shared, gate = self.in_proj(x).split(self.rows, dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q, q_shared = q.unflatten(-1, (spec.num_heads, -1)).split((spec.nope_dim, spec.rope_dim), dim=-1)
        if self.turned:
            q_shared = _turn(q_shared, batch)
        pages = batch.memory.kv(self.index)
        self._store(latent, shared, pages, batch)
        out = self._attend(q, q_shared, pages, batch)
        if spec.gated:
            out = out * torch.sigmoid(gate.float()).to(out.dtype).unsqueeze(-1)
        return self.out(out.flatten(1))

    def _store(self, latent: Tensor, shared: Tensor, pages: Tensor, batch: StepBatch) -> None:
        """Norm the latents [T, latent] and turn the shared keys [T, rope]; both go into their pages."""
        norm = self.latent_norm
        if batch.attention is not None:
            from denim.layers.kernels.latent_key import latent_key

            latent_key(
                latent,
                shared,
                pages,
                batch.token_pages,
                batch.token_offsets,
                scale=norm.scale,
                eps=norm.eps,
                cos=batch.cos if self.turned else None,
                sin=batch.sin if self.turned else None,
            )
            return
        if self.turned:
            shared = _turn(shared.unsqueeze(1), batch).squeeze(1)
        kept = torch.cat((norm(latent), shared), dim=-1)
        pages[batch.token_pages, batch.token_offsets] = narrowed(kept, pages.dtype)

    def _attend(self, q: Tensor, q_shared: Tensor, pages: Tensor, batch: StepBatch) -> Tensor:
        """Every span over its own pages: q [T, heads, nope], q_shared [T, heads, rope] ->
        [T, heads, value]. Reads are masked by length: what lies behind it in a page is never used."""
        spec = self.spec
        out = q.new_empty(len(q), spec.num_heads, spec.value_dim)
        first = batch.num_decode if q.is_cuda or batch.attention is not None else 0
        if first:
            absorbed = self._absorb(q[:first], q_shared[:first])
            if batch.attention is not None:
                read = batch.attention.run_latent(absorbed, pages, batch, spec.latent_dim, self.scale)
                out[:first] = self._values(read)
            else:
                out[:first] = self._decode_rows(absorbed, pages, batch)
        for row in range(first, len(batch.kv_lengths)):  # none in a captured step, whose tables have no place
            begin, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
            length = batch.kv_lengths[row]
            stored = pages.index_select(0, batch.tables[row]).flatten(0, 1)[:length].to(q.dtype)
            span = slice(begin, end)
            if end - begin < self.expand_from:
                out[span] = self._over_latents(self._absorb(q[span], q_shared[span]), stored)
            else:
                out[span] = self._expanded(torch.cat((q[span], q_shared[span]), dim=-1), stored)
        return out

    def _absorb(self, q: Tensor, q_shared: Tensor) -> Tensor:
        """Queries that meet latents: [n, heads, nope], [n, heads, rope] -> [n, heads, latent + rope]."""
        taken = torch.bmm(q.transpose(0, 1), self.up[:, : self.spec.nope_dim]).transpose(0, 1)
        return torch.cat((taken, q_shared), dim=-1)

    def _values(self, read: Tensor) -> Tensor:
        """Weighted latents to values: [n, heads, latent] -> [n, heads, value]."""
        return torch.bmm(read.transpose(0, 1), self.up[:, self.spec.nope_dim :].mT).transpose(0, 1)

    def _weighted(self, q: Tensor, stored: Tensor, visible: Tensor | None) -> Tensor:
        """q [B, m, latent + rope], stored [B, L, latent + rope], visible [B or 1, m or 1, L] ->
        [B, m, latent]; softmax in fp32."""
        scores = torch.bmm(q, stored.mT).float().mul_(self.scale)
        if visible is not None:
            scores.masked_fill_(~visible, -inf)
        return torch.bmm(scores.softmax(dim=-1).to(q.dtype), stored[..., : self.spec.latent_dim])

    def _over_latents(self, q: Tensor, stored: Tensor) -> Tensor:
        """Absorbed form for consecutive queries, the last of which sees all of stored [L, latent + rope]."""
        n, heads, _ = q.shape
        parts = []
        for at in range(0, n, ABSORBED_BLOCK):
            block = q[at : at + ABSORBED_BLOCK]
            seen = len(stored) - n + at + len(block)
            visible = None
            if len(block) > 1:
                shape = (len(block), seen)
                visible = torch.ones(shape, dtype=torch.bool, device=q.device).tril(seen - len(block))
                visible = visible.repeat_interleave(heads, 0)[None]
            read = self._weighted(block.flatten(0, 1)[None], stored[None, :seen], visible)
            parts.append(read.view(len(block), heads, -1))
        return self._values(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _decode_rows(self, q: Tensor, pages: Tensor, batch: StepBatch) -> Tensor:
        """Absorbed form for all decode rows in one call, padded to the longest table.

        Padding repeats page 0; what lies behind a row's length is zeroed, since a page that was never
        written may hold anything, NaN included.
        """
        tables, lengths = batch.decode_tables
        stored = pages.index_select(0, tables.flatten()).view(len(q), -1, pages.shape[-1]).to(q.dtype)
        valid = torch.arange(stored.shape[1], device=q.device) < lengths[:, None]
        stored = stored.masked_fill(~valid[:, :, None], 0)
        return self._values(self._weighted(q, stored, valid[:, None]))

    def _expanded(self, q: Tensor, stored: Tensor) -> Tensor:
        """Expanded form: q [n, heads, nope + rope] over stored [L, latent + rope] -> [n, heads, value]."""
        spec = self.spec
        n, length = len(q), len(stored)
        latent, shared = stored.split((spec.latent_dim, spec.rope_dim), dim=-1)
        expanded = F.linear(latent, self.up.flatten(0, 1)).unflatten(-1, (spec.num_heads, -1))
        k, v = expanded.split((spec.nope_dim, spec.value_dim), dim=-1)
        k = torch.cat((k, shared.unsqueeze(1).expand(-1, spec.num_heads, -1)), dim=-1).transpose(0, 1)[None]
        # torch's fast kernels want keys and values of one width.
        v = F.pad(v, (0, max(0, k.shape[-1] - spec.value_dim))).transpose(0, 1)[None]
        parts = []
        block = QUERY_BLOCK[q.device.type]
        for at in range(0, n, block):
            query = q[at : at + block]
            seen = length - n + at + len(query)
            fresh = len(query) == seen
            mask = None
            if not fresh:
                shape = (len(query), seen)
                mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(seen - len(query))
            read = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                k[:, :, :seen],
                v[:, :, :seen],
                attn_mask=mask,
                is_causal=fresh,
                scale=self.scale,
            )
            parts.append(read[0].transpose(0, 1)[..., : spec.value_dim])
        return torch.cat(parts)


def _turn(x: Tensor, batch: StepBatch) -> Tensor:
    """RoPE over pairs (0, 1), (2, 3), ... of x [T, heads, rope].

    The result lies as [0, 2, .. | 1, 3, ..]; no score changes, since queries and keys are permuted alike.
    """
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), batch.cos, batch.sin)
