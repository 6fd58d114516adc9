"""The Mamba2 layer: projection, short convolution over [x | B | C], gated accumulation, gated norm.

Owns the weights of one layer; its state lies in the slots that the batch names. Dao and Gu 2024 (arXiv
2405.21060), in the layout that every family publishes: `in_proj` gives [z | x | B | C | Δ] by rows. What
differs between families is in `Mamba2` and in the options of `Mamba2Layer`; scaling the layer's input or
output is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.norm import GroupedGatedRMSNorm
from denim.recurrence.backend import AUTO, TRITON, rule_backend
from denim.recurrence.gated_accumulation import gated_accumulation_chunked, gated_accumulation_step
from denim.recurrence.short_conv import short_conv, short_conv_step
from denim.spec.linear import Mamba2


@dataclass(frozen=True)
class GateNorm:
    """The gated norm over the layer's values: norm(x · silu(z)), or norm(x) · silu(z) if `before_gate`.

    `groups`: equal parts of the values, each normed by itself.
    """

    eps: float
    groups: int = 1
    before_gate: bool = False


class Mamba2Layer(nn.Module):
    """`in_proj.weight` is [z | x | B | C | Δ] by rows; `conv` is [channels, width].

    gate_norm: None for families without one, where the output is x · silu(z).
    time_step_limit: least and largest Δ, which is clamped to them in every step.
    projection_scales: what z, x, B, C and Δ are multiplied with before anything else (Falcon-H1's muP).

    Biases (`in_bias`, `conv_bias`, `out_bias`) are None where the spec has none.
    """

    recurrence_backend: str = AUTO

    def __init__(
        self,
        spec: Mamba2,
        hidden: int,
        index: int,
        *,
        gate_norm: GateNorm | None,
        chunk_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        time_step_limit: tuple[float, float] = (0.0, inf),
        projection_scales: tuple[float, float, float, float, float] | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.chunk_size = chunk_size
        self.time_step_limit = time_step_limit
        self.group_rows = spec.num_groups * spec.state_dim  # of B, and of C
        rows = (spec.inner, spec.inner, self.group_rows, self.group_rows, spec.num_heads)
        self.in_proj = Linear(hidden, sum(rows), dtype=dtype, device=device)
        self.out = Linear(spec.inner, hidden, dtype=dtype, device=device)

        def empty(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=of, device=device), requires_grad=False)

        self.in_bias = empty(sum(rows)) if spec.proj_bias else None
        self.out_bias = empty(hidden) if spec.proj_bias else None
        self.conv = empty(spec.conv_channels, spec.conv_width)
        self.conv_bias = empty(spec.conv_channels) if spec.conv_bias else None
        self.A_log = empty(spec.num_heads, of=torch.float32)
        self.D = empty(spec.num_heads, of=torch.float32)
        self.dt_bias = empty(spec.num_heads, of=torch.float32)
        self.norm = None
        if gate_norm is not None:
            self.norm = GroupedGatedRMSNorm(
                spec.inner,
                gate_norm.eps,
                groups=gate_norm.groups,
                before_gate=gate_norm.before_gate,
                dtype=dtype,
                device=device,
            )
        scales = None
        if projection_scales is not None:
            parts = [torch.full((n,), scale) for n, scale in zip(rows, projection_scales, strict=True)]
            scales = torch.cat(parts).to(dtype=dtype, device=device)
        self.register_buffer("projection_scales", scales, persistent=False)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; reads every span's slot, writes its `slot_out`."""
        projected = self.in_proj(x)
        if self.in_bias is not None:
            projected = projected + self.in_bias
        if self.projection_scales is not None:
            projected = projected * self.projection_scales
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        out = self.out(batch.by_form(*forms, projected))
        return out if self.out_bias is None else out + self.out_bias

    def _decode_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, as three kernels."""
        from denim.recurrence.kernels.ssd_step import ssd_step_fused

        norm = self.norm
        return ssd_step_fused(
            projected,
            self.conv,
            self.conv_bias,
            self.A_log,
            self.D,
            self.dt_bias,
            None if norm is None else norm.scale,
            0.0 if norm is None else norm.eps,
            1 if norm is None else norm.groups,
            norm is not None and norm.before_gate,
            batch.decode_slots,
            batch.memory.state(self.index, "conv"),
            batch.memory.state(self.index, "recurrent"),
            self.spec.num_groups,
            self.time_step_limit,
        )

    def _decode(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row, [R, rows of in_proj] -> [R, inner]; states updated in place."""
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        z, xbc, dt = self._parts(projected)
        with batch.gathered(conv) as window:
            mixed = short_conv_step(xbc, self.conv, window)
        x, k, q, delta, log_decay = self._terms(mixed, dt)
        v = x * delta.unsqueeze(-1)
        with batch.in_place(states) as rows:
            out = gated_accumulation_step(q, k, v, log_decay, rows, scale=1.0)
        return self._gated(out, x, z)

    def _prefill_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, in kernels, which also write the states that are wanted inside sequences."""
        from denim.recurrence.kernels.accumulation_chunks import TimeStep, accumulation_chunks, chunk_tokens
        from denim.recurrence.kernels.gated_norm import gated_norm
        from denim.recurrence.kernels.short_conv import short_conv_chunks

        spec, norm = self.spec, self.norm
        table = batch.chunks(min(self.chunk_size, chunk_tokens(projected.dtype)))
        z, xbc, dt = self._parts(projected)
        conv = batch.memory.state(self.index, "conv")
        mixed = short_conv_chunks(xbc, self.conv, table, conv, bias=self.conv_bias, silu=True)
        x, b, c = mixed.split((spec.inner, self.group_rows, self.group_rows), dim=-1)
        b, c = (part.unflatten(-1, (spec.num_groups, spec.state_dim)) for part in (b, c))
        y = accumulation_chunks(
            c,
            b,
            x.unflatten(-1, (spec.num_heads, spec.head_dim)),
            self.A_log,
            table,
            batch.memory.state(self.index, "recurrent"),
            time_step=TimeStep(dt, self.dt_bias, self.time_step_limit),
            skip=self.D,
        )
        if norm is None:
            return gated_norm(y.flatten(1), z, None)
        norm_of = {"groups": norm.groups, "before_gate": norm.before_gate}
        return gated_norm(y.flatten(1), z, norm.scale, norm.eps, **norm_of)

    def _prefill(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another, in the chunked form: [T, ...] -> [T, inner]."""
        cu_seqlens = batch.prefill_cu_seqlens
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        z, xbc, dt = self._parts(projected)
        mixed, window = short_conv(xbc, self.conv, cu_seqlens=cu_seqlens, window=batch.starting(conv))
        x, k, q, delta, log_decay = self._terms(mixed, dt)
        out, final = gated_accumulation_chunked(
            q,
            k,
            x * delta.unsqueeze(-1),
            log_decay,
            cu_seqlens=cu_seqlens,
            initial_state=batch.starting(states),
            chunk_size=self.chunk_size,
            scale=1.0,
        )
        conv.index_copy_(0, batch.prefill_slots, window)
        states.index_copy_(0, batch.prefill_slots, final.to(states.dtype))
        return self._gated(out, x, z)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, rows of in_proj] -> z [T, inner], [x | B | C] [T, channels], Δ's rows [T, H]."""
        spec = self.spec
        return projected.split((spec.inner, spec.conv_channels, spec.num_heads), dim=-1)

    def _terms(self, mixed: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The rule's arguments, all in fp32, of the convolution's output [T, channels] and Δ's rows [T, H].

        Returns x [T, H, P], B and C [T, groups, N], Δ and the log-decay ΔA [T, H].
        """
        spec = self.spec
        mixed = mixed.float()
        mixed = F.silu(mixed if self.conv_bias is None else mixed + self.conv_bias.float())
        x, b, c = mixed.split((spec.inner, self.group_rows, self.group_rows), dim=-1)
        delta = F.softplus(dt.float() + self.dt_bias)
        if self.time_step_limit != (0.0, inf):
            delta = delta.clamp(*self.time_step_limit)
        log_decay = -self.A_log.exp() * delta
        b, c = (part.unflatten(-1, (spec.num_groups, spec.state_dim)) for part in (b, c))
        return x.unflatten(-1, (spec.num_heads, spec.head_dim)), b, c, delta, log_decay

    def _gated(self, out: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """out + D x, gated and normed, in z's dtype: out and x [T, H, P], z [T, inner] -> [T, inner]."""
        y = torch.addcmul(out, x, self.D.unsqueeze(-1)).flatten(1)
        return self.norm(y, z) if self.norm is not None else (y * F.silu(z.float())).to(z.dtype)
