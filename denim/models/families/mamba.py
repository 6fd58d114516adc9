"""Mamba and Falcon-Mamba: Mamba1 layers alone, without attention and without feed-forward networks.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes.
Layout of the published checkpoints (Hugging Face `MambaForCausalLM` and `FalconMambaForCausalLM`): all under
`backbone.`; early ones call the embedding `embedding` instead of `embeddings`.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.mamba1 import Mamba1Layer
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import EMBEDDING, FINAL_NORM, CausalLM, Targets, mamba1_targets
from denim.models.family import Family
from denim.spec.families.mamba import MambaDetails
from denim.spec.linear import Mamba1
from denim.spec.model import Layer, ModelSpec

PLACES = {
    "backbone.embeddings.weight": EMBEDDING,
    "backbone.embedding.weight": EMBEDDING,
    "backbone.norm_f.weight": FINAL_NORM,
}


class Block(nn.Module):
    """x + mixer(norm(x)); the sum is fp32 if the details say so."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        assert isinstance(layer.mixer, Mamba1) and isinstance(spec.details, MambaDetails)
        self.dtype = getattr(torch, spec.dtype)
        self.sum_dtype = torch.float32 if spec.details.wide_residual else self.dtype
        self.norm = RMSNorm(
            spec.hidden_size, spec.norm_eps, zero_centred=False, dtype=self.dtype, device=device
        )
        self.mixer = Mamba1Layer(
            layer.mixer,
            spec.hidden_size,
            index,
            inner_norm_eps=spec.details.mixer_norm_eps,
            chunk_size=chunk_size,
            dtype=self.dtype,
            device=device,
        )

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        return x.to(self.sum_dtype) + self.mixer(self.norm.normed(x).to(self.dtype), batch)


class Mamba(CausalLM):
    """Mamba and Falcon-Mamba."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        return {"norm.weight": block.norm.weight} | mamba1_targets(block.mixer, "mixer.")


def canonical_name(name: str) -> str:
    """The name that Denim's targets have for a published tensor."""
    if name in PLACES:
        return PLACES[name]
    return name.replace("backbone.", "model.", 1) if name.startswith("backbone.") else name


FAMILIES = {
    "mamba": Family(Mamba, canonical_name, "Mamba", "Mamba1 alone: state only, no KV"),
    "falcon_mamba": Family(
        Mamba, canonical_name, "Falcon-Mamba", "Mamba1 with norms without weights: state only, no KV"
    ),
}
