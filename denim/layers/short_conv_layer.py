"""The gated short convolution of LFM2: out(C · conv(B · x)), B, C and x being projections of the input.

Owns the weights of one layer. Its only state is the convolution's window, the last width - 1 products B · x,
which lies in the slots that the batch names. Layout of the published checkpoints: `in_proj` is [B | C | x].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.recurrence.backend import AUTO, TRITON, rule_backend
from denim.recurrence.short_conv import short_conv, short_conv_step
from denim.spec.linear import ShortConv

# Of the table along which kernels convolve; other layers take chunks of as many.
CHUNK_TOKENS = 64


class ShortConvLayer(nn.Module):
    """`in_proj.weight` is [B | C | x] by rows; `conv` is [channels, width]. Biases are None where the spec
    has none."""

    recurrence_backend: str = AUTO

    def __init__(
        self, spec: ShortConv, hidden: int, index: int, *, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.spec = spec
        self.index = index
        self.in_proj = Linear(hidden, 3 * spec.channels, dtype=dtype, device=device)
        self.out = Linear(spec.channels, hidden, dtype=dtype, device=device)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.conv = empty(spec.channels, spec.conv_width)
        self.in_bias = empty(3 * spec.channels) if spec.bias else None
        self.conv_bias = empty(spec.channels) if spec.bias else None
        self.out_bias = empty(hidden) if spec.bias else None

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """x: [T, hidden] -> [T, hidden]; reads every span's slot, writes its `slot_out`."""
        projected = self.in_proj(x)
        if self.in_bias is not None:
            projected = projected + self.in_bias
        b, c, values = projected.chunk(3, dim=-1)
        fused = rule_backend(x.device.type, self.recurrence_backend) == TRITON
        forms = (self._decode_fused, self._prefill_fused) if fused else (self._decode, self._prefill)
        out = self.out(batch.by_form(*forms, b, c, values))
        return out if self.out_bias is None else out + self.out_bias

    def _decode_fused(self, b: Tensor, c: Tensor, x: Tensor, batch: StepBatch) -> Tensor:
        """What `_decode` does, as one kernel."""
        from denim.recurrence.kernels.short_conv_step import short_conv_step_slots

        windows = batch.memory.state(self.index, "conv")
        slots = batch.decode_slots
        return short_conv_step_slots(x, self.conv, self.conv_bias, slots, windows, before=b, behind=c)

    def _decode(self, b: Tensor, c: Tensor, x: Tensor, batch: StepBatch) -> Tensor:
        """One token for each decode row, [R, channels]; windows move in place."""
        windows = batch.memory.state(self.index, "conv")
        with batch.gathered(windows) as window:
            mixed = short_conv_step(b * x, self.conv, window)
        return c * (mixed if self.conv_bias is None else mixed + self.conv_bias)

    def _prefill_fused(self, b: Tensor, c: Tensor, x: Tensor, batch: StepBatch) -> Tensor:
        """What `_prefill` does, with the convolution as a kernel, which also writes the windows that are
        wanted inside sequences."""
        from denim.recurrence.kernels.short_conv import short_conv_chunks

        windows = batch.memory.state(self.index, "conv")
        table = batch.chunks(CHUNK_TOKENS)
        return c * short_conv_chunks(b * x, self.conv, table, windows, bias=self.conv_bias)

    def _prefill(self, b: Tensor, c: Tensor, x: Tensor, batch: StepBatch) -> Tensor:
        """Sequences of any length behind one another, [T, channels]."""
        windows = batch.memory.state(self.index, "conv")
        mixed, window = short_conv(
            b * x, self.conv, cu_seqlens=batch.prefill_cu_seqlens, window=batch.starting(windows)
        )
        windows.index_copy_(0, batch.prefill_slots, window)
        return c * (mixed if self.conv_bias is None else mixed + self.conv_bias)
