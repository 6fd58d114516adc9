"""What a family brings to its tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

VOCAB = 199


def cache_bytes(model: nn.Module, tokens: list[int]) -> tuple[int, int, int]:
    """Bytes in transformers' `DynamicCache` after a prompt: KV, recurrent states, convolution windows.

    Windows are stored with `width` columns and counted with the width - 1 that are needed.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokens]), cache=cache)
    kv = state = conv = 0
    for layer in cache.layers:
        kv += sum(
            t.nbytes for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None
        )
        state += sum(t.nbytes for t in getattr(layer, "recurrent_states", {}).values() if t is not None)
        for window in getattr(layer, "conv_states", {}).values():
            if window is not None:
                conv += window.nbytes // window.shape[-1] * (window.shape[-1] - 1)
    return kv, state, conv


@dataclass(frozen=True)
class Row:
    """`save(folder)` writes a small random checkpoint in fp32 and returns the transformers model that it is
    of (eval mode). Head counts and dims are unequal wherever the family allows it.

    full_logits: the oracle's logits [T, vocab] of tokens from one full forward; for families whose forward
        needs other arguments.
    reference_bytes: what transformers' cache holds for a prompt, as Denim counts it: (KV bytes, bytes of
        recurrent states, bytes of convolution windows of width - 1 columns). None: the reference keeps no
        comparable cache; the row says why in `note`.
    configs: published configs (file names in denim/spec/published/) with what must be read from them:
        layer pattern, and number of parameters in billions to 2%.
    """

    name: str
    save: Callable[[Path], nn.Module]
    full_logits: Callable[[nn.Module, list[int]], Tensor] | None = None
    reference_bytes: Callable[[nn.Module, list[int]], tuple[int, int, int]] | None = cache_bytes
    configs: dict[str, tuple[str, float]] = field(default_factory=dict)
    note: str = ""

    def logits(self, model: nn.Module, tokens: list[int]) -> Tensor:
        if self.full_logits is not None:
            return self.full_logits(model, tokens)
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def randomise(model: nn.Module, *, matrix: float = 0.15, vector: float = 0.3, seed: int = 0) -> nn.Module:
    """Fill all parameters so that every part of a layer moves the logits; eval mode.

    Norms and biases are drawn around zero or one as they stand (`vector`), matrices around zero.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * matrix)
            else:
                parameter.add_(noise * vector)
    return model.eval()
