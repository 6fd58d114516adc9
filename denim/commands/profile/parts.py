"""The parts of a step: what its layers were called with, and the least that each part must move and do.

Owns the record of one forward pass, layer by layer. Knows which class of layer belongs to which part; must
not know how calls are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.ffn import GatedFFN, PlainFFN
from denim.layers.fp8_linear import Fp8Linear
from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.layers.kimi_delta import KimiDeltaLayer
from denim.layers.latent_attention import LatentAttentionLayer
from denim.layers.lightning import LightningLayer
from denim.layers.linear import Linear
from denim.layers.mamba1 import Mamba1Layer
from denim.layers.mamba2 import Mamba2Layer
from denim.layers.moe import SparseMoE
from denim.layers.short_conv_layer import ShortConvLayer
from denim.ledger.cost import ledger_of
from denim.ledger.flops import CHUNK
from denim.models.family import Model
from denim.spec.mixers import DTYPE_BYTES
from denim.spec.model import ModelSpec

ATTENTION, LINEAR, FFN, HEAD, SAMPLING = "attention", "linear layers", "FFN", "head", "sampling"
PARTS = (ATTENTION, LINEAR, FFN, HEAD, SAMPLING)

_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    ATTENTION: (Attention, LatentAttentionLayer),
    LINEAR: (
        GatedDeltaNetLayer,
        KimiDeltaLayer,
        LightningLayer,
        Mamba1Layer,
        Mamba2Layer,
        ShortConvLayer,
    ),
    FFN: (GatedFFN, PlainFFN, SparseMoE),
}


class Call(NamedTuple):
    """One call of a layer in a forward pass, with copies of the tensors that it got."""

    part: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.layer(*self.args, **self.kwargs)


class Work(NamedTuple):
    """What a part must move and do at least: bytes and FLOPs."""

    moved_bytes: float
    flops: float


@contextmanager
def recorded(model: Model) -> Iterator[list[Call]]:
    """The calls of all layers of `model` inside, outermost layers only, in order."""
    calls: list[Call] = []
    handles = []
    for part, layer in _outermost(model):

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = part) -> None:
            copies = tuple(map(_copy, args))
            calls.append(Call(part, module, copies, {name: _copy(value) for name, value in kwargs.items()}))

        handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _outermost(module: Any) -> Iterator[tuple[str, nn.Module]]:
    for child in module.children():
        part = next((part for part, kinds in _LAYERS.items() if isinstance(child, kinds)), None)
        if part is None:
            yield from _outermost(child)
        else:
            yield part, child


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def work_of(
    spec: ModelSpec, calls: Sequence[Call], part: str, tokens: int, rows: int, context: float
) -> Work:
    """The least that `part` moves and does in a step of `tokens` tokens in `rows` spans that attend over
    `context` tokens each on average: every weight once, states read and written, KV read once. Of experts
    those that are chosen, on average. The head and the draw serve one token of each span."""
    ledger = ledger_of(spec)
    if part == HEAD:
        weights = spec.hidden_size * spec.vocab_size
        return Work(weights * DTYPE_BYTES[spec.dtype], 2 * rows * weights)
    if part == SAMPLING:
        return Work(rows * spec.vocab_size * DTYPE_BYTES[spec.dtype], 0)
    moved = flops = 0.0
    for layer in (call.layer for call in calls):
        for module in layer.modules():
            if isinstance(module, Linear):
                weights = module.in_features * module.out_features
                moved += weights * (1 if isinstance(module, Fp8Linear) else DTYPE_BYTES[spec.dtype])
                flops += 2 * tokens * weights
        if isinstance(layer, SparseMoE):
            chosen = layer.spec.top_k / layer.spec.num_experts
            for experts in (layer.up, layer.down):
                moved += experts.nbytes * (1 - (1 - chosen) ** tokens)
                flops += 2 * tokens * chosen * experts.numel()
    if part == FFN:
        return Work(moved, flops)
    one = tokens // rows
    for mixer in (layer.mixer for layer in spec.layers):
        if mixer.parameters(spec.hidden_size) and (part == ATTENTION) == (mixer.kv_elements() > 0):
            decode = one == 1
            of_span = mixer.mixing_flops(round(context)) if decode else mixer.prefill_mixing_flops(one, CHUNK)
            flops += rows * of_span
    if part == ATTENTION:
        moved += rows * context * ledger.kv_bytes_per_token
    else:
        moved += 2 * rows * ledger.bytes_per_request
    return Work(moved, flops)
