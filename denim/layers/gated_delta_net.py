"""The Gated DeltaNet layer: projections, short convolution, gated delta rule, gated norm.

Owns the weights of one layer; its state lies in the slots that the batch names. Yang, Kautz and
Hatamizadeh 2024 (arXiv 2412.06464), in the layout of Qwen3.5 (separate q/k/v, z, b, a projections).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.delta_step import delta_step
from denim.layers.linear import Linear
from denim.layers.norm import GatedRMSNorm, RMSNorm
from denim.recurrence.arrivals import new_arrivals
from denim.recurrence.backend import (
    AUTO,
    TRITON,
    DeltaPrefill,
    delta_prefill_backend,
    rule_backend,
)
from denim.recurrence.backends import gated_delta_by
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm
from denim.recurrence.short_conv import short_conv, short_conv_step
from denim.spec.linear import GatedDeltaNet


class GatedDeltaNetLayer(nn.Module):
    """`in_proj.weight` is [q | k | v | z | b | a] by rows; `conv` is [channels, width]."""

    recurrence_backend: str = AUTO

    def __init__(
        self,
        spec: GatedDeltaNet,
        hidden: int,
        index: int,
        *,
        norm_eps: float,
        chunk_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.chunk_size = chunk_size
        self.key_rows = spec.num_key_heads * spec.key_dim
        self.value_rows = spec.num_value_heads * spec.value_dim
        rows = spec.conv_channels + self.value_rows + 2 * spec.num_value_heads
        self.in_proj = Linear(hidden, rows, dtype=dtype, device=device)
        self.out = Linear(self.value_rows, hidden, dtype=dtype, device=device)
        self.norm = GatedRMSNorm(spec.value_dim, norm_eps, dtype=dtype, device=device)

        def empty(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=of, device=device), requires_grad=False)

        self.conv = empty(spec.conv_channels, spec.conv_width)
        self.A_log = empty(spec.num_value_heads, of=torch.float32)
        self.dt_bias = empty(spec.num_value_heads)
        self.register_buffer(
            "arrivals", new_arrivals(spec.num_key_heads, spec.num_value_heads, device), persistent=False
        )
        self.register_buffer("conv_taps", torch.empty_like(self.conv).t().contiguous(), persistent=False)

    def prepare(self) -> None:
        """Once the weights are loaded: the convolution's by tap, [width, channels], as decode reads them."""
        self.conv_taps = self.conv.t().contiguous()

    def forward(
        self, x: Tensor, batch: StepBatch, *, norm: RMSNorm | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden] -> [T, hidden]: add + mixer(norm(x)), see `Linear.project`; reads every
        span's slot, writes its `slot_out`."""
        projected = self.in_proj.project(x, norm=norm)
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        return self.out.project(batch.by_form(*forms, projected), add=add)

    def _decode_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, as one kernel."""
        from denim.recurrence.kernels.delta_inputs import DeltaInputs
        from denim.recurrence.kernels.fused_delta_step import fused_delta_step

        inputs = DeltaInputs(
            *self._parts(projected),
            self.conv_taps,
            self.A_log,
            self.dt_bias,
            self.norm.scale,
            self.norm.eps,
            batch.decode_slots,
            batch.memory.state(self.index, "conv"),
            batch.memory.state(self.index, "recurrent"),
            beta_limit=self.spec.beta_limit,
        )
        return fused_delta_step(inputs, self.arrivals, batch.ring(self.index), batch.pending)

    def _decode(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row, [R, rows of in_proj] -> [R, Hv·d_v]; states updated in place."""
        conv = batch.memory.state(self.index, "conv")
        qkv, z, log_decay, beta = self._split(projected)
        with batch.gathered(conv) as window:
            q, k, v = self._heads(F.silu(short_conv_step(qkv, self.conv, window)))
        out = delta_step(batch, self.index, q, k, v, log_decay, beta)
        return self.norm(out, z).flatten(1)

    def _prefill_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, in kernels, which also write the states that are wanted inside sequences."""
        from denim.layers.kernels.gated_rms_norm import gated_rms_norm
        from denim.recurrence.kernels.delta_pass import largest_chunk
        from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks
        from denim.recurrence.kernels.short_conv import short_conv_chunks

        spec = self.spec
        table = batch.chunks(min(self.chunk_size, largest_chunk(projected.dtype)))
        qkv, z, b, a = self._parts(projected)
        backend = delta_prefill_backend(self.recurrence_backend, self._call(qkv, table))
        own = backend == TRITON
        rows = short_conv_chunks(
            qkv,
            self.conv_taps.t(),
            table,
            batch.memory.state(self.index, "conv"),
            silu=True,
            unit_heads=2 * spec.num_key_heads,
            head_dim=spec.key_dim,
            apart=None if own else (self.key_rows, self.key_rows),
        )
        states = batch.memory.state(self.index, "recurrent")
        run = gated_delta_chunks if own else gated_delta_by(backend)
        out = run(
            rows,
            b,
            a,
            self.A_log,
            self.dt_bias,
            table,
            states,
            spec.num_key_heads,
            beta_limit=spec.beta_limit,
        )
        return gated_rms_norm(out, z, self.norm.scale, self.norm.eps)

    def _call(self, qkv: Tensor, table: ChunkTable) -> DeltaPrefill:
        """What the choice of a kernel for these sequences depends on."""
        spec = self.spec
        return DeltaPrefill(
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            qkv.dtype,
            tokens=len(qkv),
            sequences=len(table.slot_in),
            saves=table.save is not None,
            captured=qkv.is_cuda and torch.cuda.is_current_stream_capturing(),
            capability=torch.cuda.get_device_capability(qkv.device) if qkv.is_cuda else (0, 0),
        )

    def _prefill(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another, in the chunked form: [T, ...] -> [T, Hv·d_v]."""
        cu_seqlens = batch.prefill_cu_seqlens
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        qkv, z, log_decay, beta = self._split(projected)
        mixed, window = short_conv(qkv, self.conv, cu_seqlens=cu_seqlens, window=batch.starting(conv))
        q, k, v = self._heads(F.silu(mixed))
        out, final = gated_delta_chunked(
            q,
            k,
            v,
            log_decay,
            beta,
            cu_seqlens=cu_seqlens,
            initial_state=batch.starting(states),
            chunk_size=self.chunk_size,
        )
        conv.index_copy_(0, batch.prefill_slots, window)
        states.index_copy_(0, batch.prefill_slots, final.to(states.dtype))
        return self.norm(out, z).flatten(1)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, rows of in_proj] -> qkv [T, channels], z [T, Hv·d_v], b and a [T, Hv], as views."""
        heads = self.spec.num_value_heads
        return projected.split((self.spec.conv_channels, self.value_rows, heads, heads), dim=-1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, rows of in_proj] -> qkv [T, channels], z [T, Hv, d_v], log-decay and β [T, Hv] in fp32."""
        heads = self.spec.num_value_heads
        qkv, z, b, a = self._parts(projected)
        # Log of the decay α = exp(−exp(A) softplus(a + bias)), always ≤ 0; fp32 as every gate.
        log_decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias.float())
        beta = b.float().sigmoid()
        if self.spec.beta_limit != 1.0:
            beta = beta * self.spec.beta_limit
        return qkv, z.view(-1, heads, self.spec.value_dim), log_decay, beta

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, channels] after the convolution -> normalised q, k [T, Hk, d_k] in fp32 and v [T, Hv, d_v]."""
        spec = self.spec
        q, k, v = qkv.split((self.key_rows, self.key_rows, self.value_rows), dim=-1)
        q = l2norm(q.reshape(-1, spec.num_key_heads, spec.key_dim).float())
        k = l2norm(k.reshape(-1, spec.num_key_heads, spec.key_dim).float())
        return q, k, v.reshape(-1, spec.num_value_heads, spec.value_dim).float()
