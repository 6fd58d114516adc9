"""FLOPs of prefill and decode, from the spec alone.

Owns the sums; what one mixer costs it says itself (`denim.spec.model`). A multiply and an add count as two.
Norms, activations and sampling are left out: they are bound by memory, not by arithmetic.
"""

from __future__ import annotations

from denim.ledger.parameters import multiplied_parameters
from denim.spec.model import ModelSpec

CHUNK = 64
"""Tokens per chunk of the chunked form where nothing else is said."""


def decode_flops(spec: ModelSpec, context: int) -> int:
    """FLOPs of one decoded token that is the `context`-th of its sequence, head included."""
    mixing = sum(layer.mixer.mixing_flops(context) for layer in spec.layers)
    return 2 * multiplied_parameters(spec) + mixing + _head(spec)


def prefill_flops(spec: ModelSpec, tokens: int, chunk: int = CHUNK) -> int:
    """FLOPs of a prompt of `tokens` tokens from nothing to its first sampled token.

    Linear layers run in the chunked form; the head runs for the last token only.
    """
    mixing = sum(layer.mixer.prefill_mixing_flops(tokens, chunk) for layer in spec.layers)
    return 2 * tokens * multiplied_parameters(spec) + mixing + _head(spec)


def _head(spec: ModelSpec) -> int:
    return 2 * spec.hidden_size * spec.vocab_size
