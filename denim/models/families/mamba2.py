"""Mamba2: one state-space layer after the other, no attention, no feed-forward networks.

Names of the published checkpoints (Hugging Face `Mamba2ForCausalLM`, Mamba-Codestral): those of Mamba, with
`backbone.layers.N.{norm,mixer}`.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import CausalLM, Targets, mamba2_targets
from denim.models.families.mamba import canonical_name
from denim.models.family import Family
from denim.spec.families.mamba2 import Details
from denim.spec.linear import Mamba2
from denim.spec.model import ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x)); the sum is fp32 if the details say so."""

    def __init__(
        self, mixer: Mamba2, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        assert isinstance(spec.details, Details)
        self.dtype = getattr(torch, spec.dtype)
        self.residual_dtype = torch.float32 if spec.details.fp32_residual else self.dtype
        place = {"dtype": self.dtype, "device": device}
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        self.mixer = Mamba2Layer(
            mixer,
            spec.hidden_size,
            index,
            gate_norm=GateNorm(spec.norm_eps, groups=mixer.num_groups),
            chunk_size=chunk_size,
            time_step_limit=spec.details.time_step_limit,
            **place,
        )

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        return x.to(self.residual_dtype) + self.mixer(self.norm(x.to(self.dtype)), batch)


class Mamba2Model(CausalLM):
    """Mamba2 language models."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [
            Block(layer.mixer, spec, i, chunk_size, device)
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, Mamba2)
        ]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        return {"norm.weight": block.norm.weight} | mamba2_targets(block.mixer, "mixer.")


FAMILIES = {"mamba2": Family(Mamba2Model, canonical_name, "Mamba2", "Mamba2 layers alone: no KV at all")}
