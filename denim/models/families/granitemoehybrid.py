"""Granite-4: Mamba2 with a few attention layers, dense or with sparse experts, every part with a multiplier.

Names of the published checkpoints (Hugging Face `GraniteMoeHybridForCausalLM`): `mamba` or `self_attn`;
`shared_mlp.input_linear` is [gate | up] by rows; a layer's experts lie in `block_sparse_moe.input_linear`
and `output_linear`, the router in `router.layer`. transformers 5 holds the last three under other names.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import CausalLM, Targets, attention_targets, mamba2_targets
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.families.granitemoehybrid import Details
from denim.spec.ffn import MoEFFN, NoFFN
from denim.spec.linear import Mamba2
from denim.spec.model import Layer, ModelSpec

# The end of a name as transformers 5 holds it -> as it is published.
PUBLISHED = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


class Block(nn.Module):
    """x + m · mixer(norm(x)), then x + m · ffn(norm(x)), m being the residual multiplier."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        mixer, ffn, details = layer.mixer, layer.ffn, spec.details
        assert isinstance(details, Details) and not isinstance(ffn, NoFFN)
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.scale = details.residual_scale
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        if isinstance(mixer, FullAttention):
            self.mixer = Attention(mixer, hidden, index, norm_eps=eps, scale=details.attention_scale, **place)
        else:
            assert isinstance(mixer, Mamba2)
            self.mixer = Mamba2Layer(
                mixer,
                hidden,
                index,
                gate_norm=GateNorm(eps, groups=mixer.num_groups),
                chunk_size=chunk_size,
                time_step_limit=details.time_step_limit,
                **place,
            )
        sparse = isinstance(ffn, MoEFFN)
        self.ffn = SparseMoE(ffn, hidden, **place) if sparse else GatedFFN(hidden, ffn.intermediate, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.scale * self.mixer(self.mixer_norm(x), batch)
        return x + self.scale * self.ffn(self.ffn_norm(x))


class GraniteMoeHybrid(CausalLM):
    """Granite-4 language models."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        details = spec.details
        assert isinstance(details, Details)
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(
            spec,
            blocks,
            device=device,
            embedding_scale=details.embedding_scale,
            logit_scale=details.logit_scale,
        )

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        mixer, ffn = block.mixer, block.ffn
        attends = isinstance(mixer, Attention)
        names = attention_targets(mixer, "self_attn.") if attends else mamba2_targets(mixer, "mamba.")
        names["input_layernorm.weight"] = block.mixer_norm.weight
        names["post_attention_layernorm.weight"] = block.ffn_norm.weight
        if isinstance(ffn, SparseMoE):
            names["block_sparse_moe.input_linear.weight"] = ffn.up
            names["block_sparse_moe.output_linear.weight"] = ffn.down
            names["block_sparse_moe.router.layer.weight"] = ffn.router.weight
        shared = ffn.shared if isinstance(ffn, SparseMoE) else ffn
        names["shared_mlp.input_linear.weight"] = shared.gate_up.weight
        names["shared_mlp.output_linear.weight"] = shared.down.weight
        return names


def canonical_name(name: str) -> str:
    for ending, published in PUBLISHED.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + published
    return name


FAMILIES = {
    "granitemoehybrid": Family(
        GraniteMoeHybrid, canonical_name, "Granite-4", "Mamba2, GQA with or without RoPE, dense or MoE"
    )
}
