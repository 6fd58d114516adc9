"""The least time that a step can take: the bytes it must move and the FLOPs it must do, on a device.

Owns the bytes of a step. Every weight that is needed is read once, every state read and written once, KV read
once; activations stay in caches. No engine is that good: it is what is left when nothing else costs anything.
FLOPs count at bf16's rate, also where weights stay in FP8.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.ledger.cost import Ledger
from denim.ledger.devices import Device
from denim.ledger.flops import CHUNK, decode_flops, prefill_flops
from denim.ledger.fp8_blocks import expert_saving, fp8_saving
from denim.ledger.parameters import count_parameters
from denim.spec.ffn import MoEFFN
from denim.spec.mixers import DTYPE_BYTES
from denim.spec.model import ModelSpec


class StepFloor(NamedTuple):
    """One step of `tokens` tokens in all; `bound` is "memory" or "compute", whichever takes longer."""

    tokens: int
    moved_bytes: int
    flops: int
    seconds: float
    bound: str

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


def decode_floor(spec: ModelSpec, ledger: Ledger, device: Device, context: float, batch: int) -> StepFloor:
    """A decode step of `batch` requests of `context` tokens on average."""
    states = 2 * ledger.bytes_per_request
    moved = weights_read(spec, batch, device) + batch * (states + (context + 1) * ledger.kv_bytes_per_token)
    return _floor(device, batch, round(moved), batch * decode_flops(spec, round(context)))


def prefill_floor(
    spec: ModelSpec, ledger: Ledger, device: Device, tokens: int, chunk: int = CHUNK
) -> StepFloor:
    """A prompt of `tokens` tokens in one step, in chunks of `chunk`, to its first sampled token."""
    moved = weights_read(spec, tokens, device) + ledger.hybrid_bytes(tokens)
    return _floor(device, tokens, moved, prefill_flops(spec, tokens, chunk))


def weights_read(spec: ModelSpec, tokens: int, device: Device) -> int:
    """Bytes of weights that a step of `tokens` tokens reads, head included; of experts those that some token
    chooses, on average, were every choice equally likely.

    Of E experts with k chosen a token, E (1 - k/E)^n are untouched by n tokens.
    """
    hidden = spec.hidden_size
    idle = 0.0
    saved: float = fp8_saving(spec, mtp=False) if device.fp8_blocks else 0
    for layer in spec.layers:
        ffn = layer.ffn
        if isinstance(ffn, MoEFFN):
            left_by_one = ffn.parameters(hidden) - ffn.active_parameters(hidden)
            idle += left_by_one * (1 - ffn.top_k / ffn.num_experts) ** (tokens - 1)
            if device.fp8_blocks:
                saved -= expert_saving(spec, ffn) * (1 - ffn.top_k / ffn.num_experts) ** tokens
    head = hidden * spec.vocab_size
    return round((count_parameters(spec).layers - idle + head) * DTYPE_BYTES[spec.dtype] - saved)


def _floor(device: Device, tokens: int, moved_bytes: int, flops: int) -> StepFloor:
    memory_bound = moved_bytes / device.bandwidth >= flops / device.flops
    seconds = device.seconds(moved_bytes, flops)
    return StepFloor(tokens, moved_bytes, flops, seconds, "memory" if memory_bound else "compute")
