"""How many parameters a model has, and how many of them each token meets.

Owns the counts of what surrounds the layers (embedding, head, norms, MTP head). Knows the spec only.
"""

from __future__ import annotations

from typing import NamedTuple

from denim.ledger.fp8_blocks import fp8_saving
from denim.spec.ffn import NoFFN
from denim.spec.mixers import DTYPE_BYTES, NoMixer
from denim.spec.model import Layer, ModelSpec


class Parameters(NamedTuple):
    """`head` is 0 where it is the embedding matrix (tied). `mtp` is the MTP head without what it shares."""

    embedding: int
    layers: int
    head: int
    mtp: int

    @property
    def total(self) -> int:
        return sum(self)


def count_parameters(spec: ModelSpec) -> Parameters:
    hidden = spec.hidden_size
    table = spec.vocab_size * hidden
    mtp = 0
    if spec.mtp_layers:
        # One projection of [embedding | hidden state], a norm for each of the two and one at the end.
        mtp = 2 * hidden * hidden + 3 * hidden + sum(_layer(layer, hidden) for layer in spec.mtp_layers)
    return Parameters(
        embedding=table,
        layers=sum(_layer(layer, hidden) for layer in spec.layers) + hidden,
        head=0 if spec.tie_embeddings else table,
        mtp=mtp,
    )


def weight_bytes(spec: ModelSpec, *, fp8_blocks: bool = False) -> int:
    """Bytes of all weights in the model's dtype, MTP head included. `fp8_blocks`: on a device that takes the
    FP8 blocks of a quantised checkpoint as they are."""
    saved = fp8_saving(spec) if fp8_blocks else 0
    return count_parameters(spec).total * DTYPE_BYTES[spec.dtype] - saved


def multiplied_parameters(spec: ModelSpec) -> int:
    """Parameters of the layers' matrices that one token is multiplied with; of experts only the chosen."""
    hidden = spec.hidden_size
    return sum(
        layer.mixer.projection_parameters(hidden) + layer.ffn.active_parameters(hidden)
        for layer in spec.layers
    )


def _layer(layer: Layer, hidden: int) -> int:
    norms = hidden * (2 - isinstance(layer.mixer, NoMixer) - isinstance(layer.ffn, NoFFN))
    return layer.mixer.parameters(hidden) + layer.ffn.parameters(hidden) + norms
