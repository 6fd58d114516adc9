"""The KDA layer: projections, short convolutions, delta rule with a decay per key channel, gated norm.

Owns the weights of one layer; its state lies in the slots that the batch names. Kimi Linear (arXiv
2510.26692), and Ling-3.0, whose projections have full rank and whose decay has a floor. The published
convolutions of q, k and v are one here, over [q | k | v].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.delta_step import delta_step
from denim.layers.linear import Linear
from denim.layers.norm import GatedRMSNorm
from denim.recurrence.arrivals import new_arrivals
from denim.recurrence.backend import AUTO, TRITON, rule_backend
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm
from denim.recurrence.short_conv import short_conv, short_conv_step
from denim.spec.linear import KimiDelta


class KimiDeltaLayer(nn.Module):
    """`in_proj.weight` is [q | k | v | b | f | g] by rows, where f and g are the projections of the decay and
    of the output gate, or their first halves where they are of low rank (`decay_up` and `gate_up` are the
    second halves, else None). `conv` is [channels, width]; `A_log` [heads] and `dt_bias` [heads * d_k] are
    fp32.
    """

    recurrence_backend: str = AUTO

    def __init__(
        self,
        spec: KimiDelta,
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
        self.key_rows = spec.num_heads * spec.key_dim
        self.value_rows = spec.num_heads * spec.value_dim
        self.rows = (
            spec.conv_channels,
            spec.num_heads,
            spec.decay_rank or self.key_rows,
            spec.gate_rank or self.value_rows,
        )
        place = {"dtype": dtype, "device": device}
        self.in_proj = Linear(hidden, sum(self.rows), **place)
        self.decay_up = Linear(spec.decay_rank, self.key_rows, **place) if spec.decay_rank else None
        self.gate_up = Linear(spec.gate_rank, self.value_rows, **place) if spec.gate_rank else None
        self.out = Linear(self.value_rows, hidden, **place)
        self.norm = GatedRMSNorm(spec.value_dim, norm_eps, sigmoid=True, **place)

        def empty(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=of, device=device), requires_grad=False)

        self.conv = empty(spec.conv_channels, spec.conv_width)
        self.A_log = empty(spec.num_heads, of=torch.float32)
        self.dt_bias = empty(self.key_rows, of=torch.float32)
        self.register_buffer(
            "arrivals", new_arrivals(spec.num_heads, spec.num_heads, device), persistent=False
        )
        self.register_buffer("conv_taps", torch.empty_like(self.conv).t().contiguous(), persistent=False)

    def prepare(self) -> None:
        """Once the weights are loaded: the convolution's by tap, [width, channels], as decode reads them."""
        self.conv_taps = self.conv.t().contiguous()

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; reads every span's slot, writes its `slot_out`."""
        qkv, b, f, g = self.in_proj(x).split(self.rows, dim=-1)
        f = f if self.decay_up is None else self.decay_up(f)
        g = g if self.gate_up is None else self.gate_up(g)
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        return self.out(batch.by_form(*forms, qkv, b, f, g))

    def _gated(self, out: Tensor, g: Tensor) -> Tensor:
        """[T, H, d_v] and its gate [T, H * d_v] -> [T, H * d_v]."""
        return self.norm(out, g.unflatten(-1, (self.spec.num_heads, self.spec.value_dim))).flatten(1)

    def _log_decay(self, f: Tensor) -> Tensor:
        """[T, H * d_k] -> the log of the decay, [T, H, d_k] in fp32, always <= 0."""
        spec = self.spec
        biased = (f.float() + self.dt_bias).unflatten(-1, (spec.num_heads, spec.key_dim))
        rate = self.A_log.exp().unsqueeze(-1)
        if spec.decay_floor is None:
            return -rate * F.softplus(biased)
        return spec.decay_floor * torch.sigmoid(rate * biased)

    def _decode_fused(self, qkv: Tensor, b: Tensor, f: Tensor, g: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, as one kernel."""
        from denim.recurrence.kernels.delta_inputs import DeltaInputs
        from denim.recurrence.kernels.fused_delta_step import fused_delta_step

        inputs = DeltaInputs(
            qkv,
            g,
            b,
            f,
            self.conv_taps,
            self.A_log,
            self.dt_bias,
            self.norm.scale,
            self.norm.eps,
            batch.decode_slots,
            batch.memory.state(self.index, "conv"),
            batch.memory.state(self.index, "recurrent"),
            decay_floor=self.spec.decay_floor,
        )
        return fused_delta_step(inputs, self.arrivals, batch.ring(self.index), batch.pending)

    def _decode(self, qkv: Tensor, b: Tensor, f: Tensor, g: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row -> [R, H * d_v]; states updated in place."""
        conv = batch.memory.state(self.index, "conv")
        with batch.gathered(conv) as window:
            q, k, v = self._heads(F.silu(short_conv_step(qkv, self.conv, window)))
        out = delta_step(batch, self.index, q, k, v, self._log_decay(f), b.float().sigmoid())
        return self._gated(out, g)

    def _prefill_fused(self, qkv: Tensor, b: Tensor, f: Tensor, g: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, in kernels, which also write the states that are wanted inside sequences."""
        from denim.layers.kernels.gated_rms_norm import gated_rms_norm
        from denim.recurrence.kernels.delta_pass import largest_chunk
        from denim.recurrence.kernels.kimi_delta_chunks import kimi_delta_chunks
        from denim.recurrence.kernels.short_conv import short_conv_chunks

        spec = self.spec
        table = batch.chunks(min(self.chunk_size, largest_chunk(qkv.dtype)))
        rows = short_conv_chunks(
            qkv,
            self.conv_taps.t(),
            table,
            batch.memory.state(self.index, "conv"),
            silu=True,
            unit_heads=2 * spec.num_heads,
            head_dim=spec.key_dim,
        )
        states = batch.memory.state(self.index, "recurrent")
        out = kimi_delta_chunks(
            rows, b, f, self.A_log, self.dt_bias, table, states, decay_floor=spec.decay_floor
        )
        return gated_rms_norm(out, g, self.norm.scale, self.norm.eps, sigmoid=True)

    def _prefill(self, qkv: Tensor, b: Tensor, f: Tensor, g: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another, in the chunked form -> [T, H * d_v]."""
        cu_seqlens = batch.prefill_cu_seqlens
        conv = batch.memory.state(self.index, "conv")
        states = batch.memory.state(self.index, "recurrent")
        mixed, window = short_conv(qkv, self.conv, cu_seqlens=cu_seqlens, window=batch.starting(conv))
        q, k, v = self._heads(F.silu(mixed))
        out, final = gated_delta_chunked(
            q,
            k,
            v,
            self._log_decay(f),
            b.float().sigmoid(),
            cu_seqlens=cu_seqlens,
            initial_state=batch.starting(states),
            chunk_size=self.chunk_size,
        )
        conv.index_copy_(0, batch.prefill_slots, window)
        states.index_copy_(0, batch.prefill_slots, final.to(states.dtype))
        return self._gated(out, g)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, channels] after the convolution -> normalised q, k [T, H, d_k] and v [T, H, d_v] in fp32."""
        spec = self.spec
        q, k, v = qkv.float().split((self.key_rows, self.key_rows, self.value_rows), dim=-1)
        q, k = (l2norm(part.unflatten(-1, (spec.num_heads, spec.key_dim))) for part in (q, k))
        return q, k, v.unflatten(-1, (spec.num_heads, spec.value_dim))
