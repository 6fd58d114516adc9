"""Falcon-H1: attention and Mamba2 side by side over one normed input, then a dense network.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes (Hugging
Face `FalconH1ForCausalLM`).

Every projection has its muP multiplier. None is worth a pass over the tokens: products with several factors
carry them as one. With a the factor of attention's input and k that of its keys, scores are scaled
by a² k, and values by a, which joins the factor of the output; that of Mamba2's input joins those of the five
parts of its projection; factors of outputs are those with which they are added.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import (
    FINAL_NORM,
    CausalLM,
    Targets,
    attention_targets,
    mamba2_targets,
    swiglu_targets,
)
from denim.models.family import Family
from denim.spec.families.falcon_h1 import FalconH1Details
from denim.spec.ffn import DenseFFN
from denim.spec.linear import Mamba2
from denim.spec.model import Layer, ModelSpec
from denim.spec.parallel import Parallel


class Block(nn.Module):
    """x + attention(norm(x)) + mamba(norm(x)), then x + ffn(norm(x)), each with its factor."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        assert isinstance(layer.mixer, Parallel) and isinstance(layer.ffn, DenseFFN)
        assert isinstance(layer.mixer.linear, Mamba2) and isinstance(spec.details, FalconH1Details)
        details, attention, linear = spec.details, layer.mixer.attention, layer.mixer.linear
        hidden, eps = spec.hidden_size, spec.norm_eps
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.attention_factor = details.attention_in * details.attention_out
        self.mamba_factor = details.ssm_out
        self.ffn_factor = details.mlp_down

        self.mixer_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        scale = attention.head_dim**-0.5 * details.key * details.attention_in**2
        self.attention = Attention(attention, hidden, index, norm_eps=eps, scale=scale, **place)
        norm = GateNorm(eps, groups=linear.num_groups, before_gate=details.norm_before_gate)
        self.mamba = Mamba2Layer(
            linear,
            hidden,
            index,
            gate_norm=norm if linear.gate_norm else None,
            chunk_size=chunk_size,
            time_step_limit=details.time_step_limit,
            projection_scales=tuple(details.ssm_in * part for part in details.ssm_parts),
            **place,
        )
        self.ffn = GatedFFN(hidden, layer.ffn.intermediate, gate_scale=details.mlp_gate, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        normed = self.mixer_norm(x)
        x = x.add(self.attention(normed, batch), alpha=self.attention_factor)
        x = x.add(self.mamba(normed, batch), alpha=self.mamba_factor)
        return x.add(self.ffn(self.ffn_norm(x)), alpha=self.ffn_factor)


class FalconH1(CausalLM):
    """Falcon-H1 models of all sizes."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        assert isinstance(spec.details, FalconH1Details)
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(
            spec,
            blocks,
            device=device,
            embedding_scale=spec.details.embedding,
            logit_scale=spec.details.lm_head,
        )

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        return {
            "input_layernorm.weight": block.mixer_norm.weight,
            "pre_ff_layernorm.weight": block.ffn_norm.weight,
            **attention_targets(block.attention, "self_attn."),
            **mamba2_targets(block.mamba, "mamba."),
            **swiglu_targets(block.ffn, "feed_forward."),
        }


def canonical_name(name: str) -> str:
    """The name that Denim's targets have for a published tensor."""
    return FINAL_NORM if name == "model.final_layernorm.weight" else name


FAMILIES = {
    "falcon_h1": Family(
        FalconH1, canonical_name, "Falcon-H1", "attention and Mamba2 side by side in every layer"
    )
}
