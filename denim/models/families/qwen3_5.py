"""Qwen3.5 text models, dense and mixture of experts.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes.
Layout of the published checkpoints (Hugging Face `Qwen3_5ForCausalLM` and the vision-language wrapper,
whose text weights carry the prefix `model.language_model.`): separate qkv, z, b, a projections in linear
layers; `q_proj` per head [q | gate]; zero-centred norms except the gated one; the multi-token-prediction
head under `mtp.`, loaded and kept.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.layers.linear import Linear
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import (
    CausalLM,
    Targets,
    attention_targets,
    expert_targets,
    rows_of,
    swiglu_targets,
)
from denim.models.family import Family
from denim.models.fp8_kept import experts_in_fp8
from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.model import Layer, ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        dtype = getattr(torch, spec.dtype)
        place = {"dtype": dtype, "device": device}
        self.mixer_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=True, **place)
        self.ffn_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=True, **place)
        if isinstance(layer.mixer, FullAttention):
            self.mixer = Attention(layer.mixer, spec.hidden_size, index, norm_eps=spec.norm_eps, **place)
        else:
            self.mixer = GatedDeltaNetLayer(
                layer.mixer, spec.hidden_size, index, norm_eps=spec.norm_eps, chunk_size=chunk_size, **place
            )
        if isinstance(layer.ffn, DenseFFN):
            self.ffn = GatedFFN(spec.hidden_size, layer.ffn.intermediate, **place)
        else:
            in_fp8 = experts_in_fp8(spec, layer.ffn, device)
            self.ffn = SparseMoE(layer.ffn, spec.hidden_size, fp8_experts=in_fp8, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = self.mixer(x, batch, norm=self.mixer_norm, add=x)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class MTPHead(nn.Module):
    """The multi-token-prediction head: one block over [norm(embedding) | norm(hidden)]."""

    def __init__(self, spec: ModelSpec, chunk_size: int, device: torch.device | str):
        super().__init__()
        dtype = getattr(torch, spec.dtype)
        norm = {"zero_centred": True, "dtype": dtype, "device": device}
        self.embedding_norm = RMSNorm(spec.hidden_size, spec.norm_eps, **norm)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.norm_eps, **norm)
        self.join = Linear(2 * spec.hidden_size, spec.hidden_size, dtype=dtype, device=device)
        first = len(spec.layers)
        self.blocks = nn.ModuleList(
            Block(layer, spec, first + i, chunk_size, device) for i, layer in enumerate(spec.mtp_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, **norm)


class Qwen3_5(CausalLM):
    """Qwen3.5 and Qwen3.5-MoE."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device, zero_centred=True)
        self.mtp = MTPHead(spec, chunk_size, device) if spec.mtp_layers else None

    def targets(self, published: Container[str] = ()) -> Targets:
        names = super().targets(published)
        if self.mtp is not None:
            names["mtp.fc.weight"] = self.mtp.join.weight.data
            names["mtp.pre_fc_norm_embedding.weight"] = self.mtp.embedding_norm.weight.data
            names["mtp.pre_fc_norm_hidden.weight"] = self.mtp.hidden_norm.weight.data
            names["mtp.norm.weight"] = self.mtp.norm.weight.data
            for i, block in enumerate(self.mtp.blocks):
                prefix = f"mtp.layers.{i}."
                parts = self.block_targets(block, prefix, published)
                names.update({prefix + name: tensor.data for name, tensor in parts.items()})
        return names

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        """Experts are published as one tensor a layer, or as one a projection of each expert."""
        names: Targets = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.ffn_norm.weight,
        }
        mixer, ffn = block.mixer, block.ffn
        if isinstance(mixer, Attention):
            names.update(attention_targets(mixer, "self_attn."))
        else:
            names.update(self.linear_targets(mixer))
        if isinstance(ffn, SparseMoE):
            one_by_one = f"{prefix}mlp.experts.0.gate_proj.weight" in published
            names["mlp.gate.weight"] = ffn.router.weight
            names.update(expert_targets(ffn, "mlp.experts.", one_by_one=one_by_one))
            if ffn.shared is not None:
                names.update(swiglu_targets(ffn.shared, "mlp.shared_expert."))
                names["mlp.shared_expert_gate.weight"] = ffn.shared_gate.weight
        else:
            names.update(swiglu_targets(ffn, "mlp."))
        return names

    def linear_targets(self, mixer: GatedDeltaNetLayer) -> Targets:
        heads = mixer.spec.num_value_heads
        rows = [("qkv", mixer.spec.conv_channels), ("z", mixer.value_rows), ("b", heads), ("a", heads)]
        named = [(f"linear_attn.in_proj_{name}.weight", n) for name, n in rows]
        return rows_of(mixer.in_proj.weight, named) | {
            "linear_attn.conv1d.weight": mixer.conv.unsqueeze(1),
            "linear_attn.A_log": mixer.A_log,
            "linear_attn.dt_bias": mixer.dt_bias,
            "linear_attn.norm.weight": mixer.norm.weight,
            "linear_attn.out_proj.weight": mixer.out.weight,
        }


def canonical_name(name: str) -> str | None:
    """The text-only form's name of a published tensor; None for the vision tower's, which are not used."""
    if name.startswith("model.visual."):
        return None
    return name.replace("model.language_model.", "model.", 1)


FAMILIES = {
    "qwen3_5": Family(
        Qwen3_5, canonical_name, "Qwen3.5", "Gated DeltaNet, gated attention; text part of the VL form"
    ),
    "qwen3_5_moe": Family(Qwen3_5, canonical_name, "Qwen3.5-MoE", "the same with sparse experts"),
}
