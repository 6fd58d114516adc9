"""The Mamba1 layer: projection, short convolution over x, selective scan, gate.

Owns the weights of one layer; its state lies in the slots that the batch names. Gu and Dao 2023 (arXiv
2312.00752): `in_proj` gives [x | z], a second projection of the convolved x gives [Δ's inner part | B | C].
Families differ in the norms on these three: none (Mamba), with weights (Jamba) or without (Falcon-Mamba).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.recurrence.backend import AUTO, TRITON, rule_backend
from denim.recurrence.selective_scan import selective_scan_chunked, selective_scan_step
from denim.recurrence.short_conv import short_conv, short_conv_step
from denim.spec.linear import Mamba1


class Mamba1Layer(nn.Module):
    """`in_proj.weight` is [x | z] and `x_proj.weight` is [Δ | B | C] by rows; `conv` is [inner, width].

    inner_norm_eps: that of the RMS norms on Δ's inner part, B and C, which have weights where the spec says
        so; None: there are no such norms.

    Biases (`in_bias`, `conv_bias`, `out_bias`) are None where the spec has none; Δ always has one.
    """

    recurrence_backend: str = AUTO

    def __init__(
        self,
        spec: Mamba1,
        hidden: int,
        index: int,
        *,
        inner_norm_eps: float | None,
        chunk_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.inner_norm_eps = inner_norm_eps
        self.chunk_size = chunk_size
        self.in_proj = Linear(hidden, 2 * spec.inner, dtype=dtype, device=device)
        self.x_proj = Linear(spec.inner, spec.dt_rank + 2 * spec.state_dim, dtype=dtype, device=device)
        self.dt_proj = Linear(spec.dt_rank, spec.inner, dtype=dtype, device=device)
        self.out = Linear(spec.inner, hidden, dtype=dtype, device=device)

        def empty(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=of, device=device), requires_grad=False)

        self.in_bias = empty(2 * spec.inner) if spec.proj_bias else None
        self.out_bias = empty(hidden) if spec.proj_bias else None
        self.conv = empty(spec.inner, spec.conv_width)
        self.conv_bias = empty(spec.inner) if spec.conv_bias else None
        self.A_log = empty(spec.inner, spec.state_dim, of=torch.float32)
        self.D = empty(spec.inner, of=torch.float32)
        self.dt_bias = empty(spec.inner, of=torch.float32)
        self.dt_norm: RMSNorm | None = None
        self.b_norm: RMSNorm | None = None
        self.c_norm: RMSNorm | None = None
        if spec.inner_norms:
            assert inner_norm_eps is not None, "norms with weights need an epsilon"
            norm = {"zero_centred": False, "dtype": dtype, "device": device}
            self.dt_norm = RMSNorm(spec.dt_rank, inner_norm_eps, **norm)
            self.b_norm = RMSNorm(spec.state_dim, inner_norm_eps, **norm)
            self.c_norm = RMSNorm(spec.state_dim, inner_norm_eps, **norm)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; reads every span's slot, writes its `slot_out`."""
        projected = self.in_proj(x)
        if self.in_bias is not None:
            projected = projected + self.in_bias
        inner, z = projected.chunk(2, dim=-1)
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        out = self.out(batch.by_form(*forms, inner, z))
        return out if self.out_bias is None else out + self.out_bias

    def _decode_fused(self, inner: Tensor, z: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, in two kernels around the inner projections."""
        from denim.recurrence.kernels.selective_scan_step import selective_scan_step_fused
        from denim.recurrence.kernels.short_conv_step import short_conv_step_slots

        conv = batch.memory.state(self.index, "conv")
        slots = batch.decode_slots
        mixed = short_conv_step_slots(inner, self.conv, self.conv_bias, slots, conv, silu=True)
        states = batch.memory.state(self.index, "recurrent")
        return selective_scan_step_fused(*self._raw_terms(mixed), z, slots, states)

    def _prefill_fused(self, inner: Tensor, z: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, in kernels, which also write the states that are wanted inside sequences."""
        from denim.recurrence.kernels.selective_scan_chunks import CHUNK_TOKENS, selective_scan_chunks
        from denim.recurrence.kernels.short_conv import short_conv_chunks

        table = batch.chunks(min(self.chunk_size, CHUNK_TOKENS))
        conv = batch.memory.state(self.index, "conv")
        mixed = short_conv_chunks(inner, self.conv, table, conv, bias=self.conv_bias, silu=True)
        states = batch.memory.state(self.index, "recurrent")
        return selective_scan_chunks(*self._raw_terms(mixed), z, table, states)

    def _raw_terms(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float | None, Tensor | None, Tensor | None]:
        """What the kernels make the rule's arguments of, x being the convolution's output behind SiLU."""
        spec = self.spec
        dt, bc = self.x_proj(x).split((spec.dt_rank, 2 * spec.state_dim), dim=-1)
        b_scale, c_scale = (norm if norm is None else norm.scale for norm in (self.b_norm, self.c_norm))
        delta = self.dt_proj(self._normed(dt, self.dt_norm))
        return x, delta, self.dt_bias, self.A_log, self.D, bc, self.inner_norm_eps, b_scale, c_scale

    def _decode(self, inner: Tensor, z: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row, [R, inner] -> [R, inner]; states updated in place."""
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        with batch.gathered(conv) as window:
            terms = self._terms(short_conv_step(inner, self.conv, window))
        with batch.in_place(states) as rows:
            y = selective_scan_step(*terms, self.D, rows)
        return (y * F.silu(z.float())).to(z.dtype)

    def _prefill(self, inner: Tensor, z: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another: [T, inner] -> [T, inner]."""
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        cu_seqlens = batch.prefill_cu_seqlens
        mixed, window = short_conv(inner, self.conv, cu_seqlens=cu_seqlens, window=batch.starting(conv))
        y, final = self._scan(*self._terms(mixed), cu_seqlens, batch.starting(states))
        conv.index_copy_(0, batch.prefill_slots, window)
        states.index_copy_(0, batch.prefill_slots, final.to(states.dtype))
        return (y * F.silu(z.float())).to(z.dtype)

    def _terms(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The rule's x, Δ [T, inner], A [inner, N], B and C [T, N] of the convolution's output; all fp32."""
        spec = self.spec
        wide = mixed.float()
        x = F.silu(wide if self.conv_bias is None else wide + self.conv_bias.float())
        parts = self.x_proj(x.to(mixed.dtype)).split((spec.dt_rank, spec.state_dim, spec.state_dim), dim=-1)
        norms = (self.dt_norm, self.b_norm, self.c_norm)
        dt, b, c = (self._normed(part, norm) for part, norm in zip(parts, norms, strict=True))
        delta = F.softplus(self.dt_proj(dt).float() + self.dt_bias)
        return x, delta, -self.A_log.exp(), b.float(), c.float()

    def _normed(self, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """One of Δ's inner part, B and C by its norm, or by one without weights where the layer has norms."""
        if norm is not None:
            return norm(part)
        if self.inner_norm_eps is None:
            return part
        return F.rms_norm(part.float(), part.shape[-1:], eps=self.inner_norm_eps).to(part.dtype)

    def _scan(
        self,
        x: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        cu_seqlens: list[int],
        begin: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """y [T, inner] and the states behind the sequences.

        On a CPU each sequence is one chunk: less arithmetic than chunks in lockstep (docs/rules.md), and no
        result depends on what else is in the step.
        """
        if x.is_cuda:
            return selective_scan_chunked(
                x,
                delta,
                a,
                b,
                c,
                self.D,
                cu_seqlens=cu_seqlens,
                initial_state=begin,
                chunk_size=self.chunk_size,
            )
        ys, states = [], []
        for row, (first, end) in enumerate(pairwise(cu_seqlens)):
            y, state = selective_scan_chunked(
                x[first:end],
                delta[first:end],
                a,
                b[first:end],
                c[first:end],
                self.D,
                cu_seqlens=[0, end - first],
                initial_state=None if begin is None else begin[row : row + 1],
                chunk_size=end - first,
            )
            ys.append(y)
            states.append(state)
        return torch.cat(ys), torch.cat(states)
