"""Jamba: Mamba1 with norms on Δ, B and C, attention without positions in one layer of several, experts.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes.
Layout of the published checkpoints (Hugging Face `JambaForCausalLM`): the mixer is `mamba` or `self_attn`,
experts are published one projection a tensor.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.mamba1 import Mamba1Layer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import (
    FINAL_NORM,
    CausalLM,
    Targets,
    attention_targets,
    expert_targets,
    mamba1_targets,
    swiglu_targets,
)
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.linear import Mamba1
from denim.spec.model import Layer, ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        hidden, eps = spec.hidden_size, spec.norm_eps
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.mixer: nn.Module
        if isinstance(layer.mixer, FullAttention):
            self.mixer = Attention(layer.mixer, hidden, index, norm_eps=eps, **place)
        else:
            assert isinstance(layer.mixer, Mamba1)
            self.mixer = Mamba1Layer(
                layer.mixer, hidden, index, inner_norm_eps=eps, chunk_size=chunk_size, **place
            )
        self.ffn: nn.Module
        if isinstance(layer.ffn, DenseFFN):
            self.ffn = GatedFFN(hidden, layer.ffn.intermediate, **place)
        else:
            assert isinstance(layer.ffn, MoEFFN)
            self.ffn = SparseMoE(layer.ffn, hidden, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class Jamba(CausalLM):
    """Jamba models, with or without experts."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        names: Targets = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "pre_ff_layernorm.weight": block.ffn_norm.weight,
        }
        if isinstance(block.mixer, Attention):
            names.update(attention_targets(block.mixer, "self_attn."))
        else:
            names.update(mamba1_targets(block.mixer, "mamba."))
        if isinstance(block.ffn, SparseMoE):
            experts = "feed_forward.experts."
            names["feed_forward.router.weight"] = block.ffn.router.weight
            fused = f"{prefix}{experts}gate_up_proj" in published
            names.update(expert_targets(block.ffn, experts, one_by_one=not fused))
        else:
            names.update(swiglu_targets(block.ffn, "feed_forward."))
        return names


def canonical_name(name: str) -> str:
    """The name that Denim's targets have for a published tensor."""
    return FINAL_NORM if name == "model.final_layernorm.weight" else name


FAMILIES = {
    "jamba": Family(
        Jamba, canonical_name, "Jamba", "Mamba1 with norms on Δ, B, C; attention without positions; experts"
    )
}
