"""The lightning attention layer: projections, gated accumulation with a constant decay, norm, sigmoid gate.

Owns the weights of one layer; its state lies in the slots that the batch names. MiniMax 2025 (arXiv
2501.08313) after Qin et al. 2024 (arXiv 2401.04658). There is no convolution, and q and k are not normed:
SiLU is all that is done to q, k and v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.recurrence.backend import AUTO, TRITON, rule_backend
from denim.recurrence.gated_accumulation import gated_accumulation_chunked, gated_accumulation_step
from denim.spec.linear import Lightning

# The published code builds this norm without the config's epsilon.
NORM_EPS = 1e-6

# Keeps the decay of the last layer, and the division for a model of one layer, from vanishing (published).
SLOPE_GUARD = 1e-5


def log_decay_of(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Log of each head's decay, [num_heads] fp32, constant over tokens.

    ALiBi's slopes (arXiv 2108.12409) for a number of heads that is a power of two, 2 ** (-8 h / H) for
    h = 1 .. H, weakened layer by layer until almost nothing fades in the last.
    """
    share = 1 - layer / (num_layers - 1 + SLOPE_GUARD) + SLOPE_GUARD
    slopes = [2 ** (-8 * (head + 1) / num_heads) * share for head in range(num_heads)]
    return -torch.tensor(slopes, dtype=torch.float32)


class LightningLayer(nn.Module):
    """`in_proj.weight` is [(q | k | v) of every head | gate] by rows."""

    recurrence_backend: str = AUTO

    def __init__(
        self,
        spec: Lightning,
        hidden: int,
        index: int,
        *,
        num_layers: int,
        chunk_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.chunk_size = chunk_size
        self.inner = spec.num_heads * spec.head_dim
        self.in_proj = Linear(hidden, 4 * self.inner, dtype=dtype, device=device)
        self.out = Linear(self.inner, hidden, dtype=dtype, device=device)
        self.norm = RMSNorm(self.inner, NORM_EPS, zero_centred=False, dtype=dtype, device=device)
        decay = log_decay_of(spec.num_heads, index, num_layers).to(device)
        self.register_buffer("log_decay", decay, persistent=False)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; reads every span's slot, writes its `slot_out`."""
        projected = self.in_proj(x)
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        return self.out(batch.by_form(*forms, projected))

    def _decode_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, as two kernels."""
        from denim.recurrence.kernels.lightning_step import lightning_step_fused

        states = batch.memory.state(self.index, "recurrent")
        norm = (self.norm.scale, self.norm.eps)
        return lightning_step_fused(projected, self.log_decay, *norm, batch.decode_slots, states)

    def _decode(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row, [R, 4·inner] -> [R, inner]; states updated in place."""
        states = batch.memory.state(self.index, "recurrent")
        q, k, v, gate = self._terms(projected)
        with batch.in_place(states) as rows:
            out = gated_accumulation_step(q, k, v, self.log_decay, rows, scale=1.0)
        return self._gated(out, gate)

    def _prefill_fused(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, in kernels, which also write the states that are wanted inside sequences."""
        from denim.recurrence.kernels.accumulation_chunks import accumulation_chunks, chunk_tokens
        from denim.recurrence.kernels.gated_norm import gated_norm
        from denim.recurrence.kernels.silu_rows import silu_rows

        qkv, gate = projected.split((3 * self.inner, self.inner), dim=-1)
        q, k, v = silu_rows(qkv).unflatten(-1, (self.spec.num_heads, -1)).chunk(3, dim=-1)
        table = batch.chunks(min(self.chunk_size, chunk_tokens(projected.dtype)))
        states = batch.memory.state(self.index, "recurrent")
        y = accumulation_chunks(q, k, v, self.log_decay, table, states).flatten(1)
        return gated_norm(y, gate, self.norm.scale, self.norm.eps, before_gate=True, sigmoid=True)

    def _prefill(self, projected: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another, in the chunked form: [T, 4·inner] -> [T, inner]."""
        states = batch.memory.state(self.index, "recurrent")
        q, k, v, gate = self._terms(projected)
        out, final = gated_accumulation_chunked(
            q,
            k,
            v,
            self.log_decay,
            cu_seqlens=batch.prefill_cu_seqlens,
            initial_state=batch.starting(states),
            chunk_size=self.chunk_size,
            scale=1.0,
        )
        states.index_copy_(0, batch.prefill_slots, final.to(states.dtype))
        return self._gated(out, gate)

    def _terms(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [T, H, d], fp32 as sums over the whole past are taken of them; the gate [T, inner]."""
        qkv, gate = projected.split((3 * self.inner, self.inner), dim=-1)
        heads = F.silu(qkv.float()).unflatten(-1, (self.spec.num_heads, -1))
        return *heads.chunk(3, dim=-1), gate

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """[T, H, d] -> [T, inner] in gate's dtype."""
        return self.norm.normed(out.flatten(1)).mul_(gate.float().sigmoid()).to(gate.dtype)
