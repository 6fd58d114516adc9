"""Random inputs of a delta-rule layer's decode step, and the plain parts that its kernels stand for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.deferred import Ring
from denim.recurrence.gated_delta import gated_delta_step, l2norm
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.delta_tile import Tiling
from denim.recurrence.kernels.fused_delta_step import fused_delta_step
from denim.recurrence.short_conv import short_conv_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
SLOTS = 9


def eighths(*shape: int) -> Tensor:
    """Random multiples of 1/8. A convolution of such numbers is exact in any order, so that none of its
    results is rounded to bf16 in two ways; where k . q is small, an output makes much of that."""
    return (torch.randn(*shape) * 8).round() / 8


class Case:
    """One layer's inputs for the rows of `slots`, on the CPU. Slots hold NaN where no row lives."""

    def __init__(
        self,
        key_heads: int,
        group: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        slots: list[int],
        *,
        vector_decay: bool = False,
        **gates: float | None,
    ):
        torch.manual_seed(0)
        heads = key_heads * group
        channels = 2 * key_heads * key_dim + heads * value_dim
        biases = heads * key_dim if vector_decay else heads
        # Views with gaps, as an arena gives them.
        window = torch.full((SLOTS, 5, channels), float("nan"), dtype=dtype)[:, 1:4]
        state = torch.full((SLOTS, heads + 2, value_dim, key_dim), float("nan"))[:, 1 : 1 + heads]
        for slot in slots:
            if slot >= 0:
                window[slot] = eighths(3, channels).to(dtype)
                state[slot] = torch.randn(heads, value_dim, key_dim)
        self.inputs = DeltaInputs(
            *[torch.empty(0, dtype=dtype)] * 4,
            eighths(4, channels).to(dtype),
            torch.randn(heads),
            torch.randn(biases).to(torch.float32 if vector_decay else dtype),
            1 + 0.3 * torch.randn(value_dim),
            EPS,
            torch.tensor(slots),
            window,
            state,
            **gates,
        )
        self.new_token()

    def new_token(self) -> None:
        """Inputs of another step, parts of one projection's rows, but for the gate of KDA."""
        inputs = self.inputs
        rows, (heads, value_dim) = len(inputs.slots), inputs.state.shape[1:3]
        widths = (inputs.window.shape[2], heads * value_dim, heads, len(inputs.dt_bias))
        qkv, z, b, a = eighths(rows, sum(widths)).to(inputs.qkv.dtype).split(widths, dim=1)
        if inputs.vector_decay:
            z = z.contiguous()
        self.change(qkv=qkv, z=z, b=b, a=a)

    def change(self, **values: Any) -> None:
        self.inputs = self.inputs._replace(**values)

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, windows and states by the plain parts; rows of padding are left out."""
        inputs, key_heads = self.inputs, self.inputs.key_heads
        live = inputs.slots >= 0
        slots = inputs.slots[live]
        qkv, z, b, a = (part[live] for part in inputs[:4])
        heads, value_dim, key_dim = inputs.state.shape[1:]
        window, state = inputs.window.clone(), inputs.state.clone()
        rows = window[slots]
        mixed = F.silu(short_conv_step(qkv, inputs.conv_taps.t(), rows).float())
        window[slots] = rows
        keys = key_heads * key_dim
        q, k, v = mixed.split((keys, keys, heads * value_dim), dim=-1)
        q, k = (l2norm(part.reshape(-1, key_heads, key_dim)) for part in (q, k))
        biased = (a.float() + inputs.dt_bias.float()).view(len(a), heads, -1)
        rate = inputs.a_log.exp().unsqueeze(-1)
        if inputs.decay_floor is None:
            log_decay = -rate * F.softplus(biased)
        else:
            log_decay = inputs.decay_floor * torch.sigmoid(rate * biased)
        if not inputs.vector_decay:
            log_decay = log_decay.squeeze(-1)
        current = state[slots]
        beta = inputs.beta_limit * b.float().sigmoid()
        out = gated_delta_step(q, k, v.reshape(-1, heads, value_dim), log_decay, beta, current)
        state[slots] = current
        gate = z.float().view_as(out)
        gate = gate.sigmoid() if inputs.vector_decay else F.silu(gate)
        out = F.rms_norm(out, (value_dim,), inputs.norm_scale, EPS) * gate
        return out.flatten(1).to(qkv.dtype), window, state

    def new_ring(self, length: int) -> Ring:
        """Records of the case's slots, none of them written yet."""
        heads, value_dim, key_dim = self.inputs.state.shape[1:]
        decay = (key_dim,) if self.inputs.vector_decay else ()
        parts = ((self.inputs.key_heads, key_dim), (heads, value_dim), (heads, *decay))
        return Ring(*(torch.full((SLOTS, length, *part), float("nan"), device=DEVICE) for part in parts))

    def on(self, device: str) -> DeltaInputs:
        moved = (value.to(device) if isinstance(value, Tensor) else value for value in self.inputs)
        return DeltaInputs(*moved)

    def fused(
        self, tiling: Tiling | None = None, ring: Ring | None = None, pending: Tensor | None = None
    ) -> Tensor:
        """The kernel's output; windows, states and the ring are updated in place."""
        inputs = self.on(DEVICE)
        arrivals = torch.zeros(len(inputs.slots), inputs.key_heads, dtype=torch.int32, device=DEVICE)
        out = fused_delta_step(inputs, arrivals, ring, pending, tiling)
        assert not arrivals.any()
        self.change(window=inputs.window.cpu(), state=inputs.state.cpu())
        return out.cpu()

    def check(self, tolerance: float, tiling: Tiling | None = None) -> None:
        """A step of the kernel gives what the plain parts give in every live row, and leaves all else."""
        live = self.inputs.slots >= 0
        expected, window, state = self.plain()
        out = self.fused(tiling)
        near: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(out[live], expected, **near)
        torch.testing.assert_close(self.inputs.window, window, equal_nan=True, atol=0, rtol=0)
        torch.testing.assert_close(self.inputs.state, state, equal_nan=True, **near)
