"""Nemotron-H: every layer is one part, Mamba2, attention without positions, or a network of relu squared.

Names of the published checkpoints: `backbone.embeddings`, `backbone.layers.N.norm` and `.mixer`, which is
whatever the layer is, `backbone.norm_f`; experts one by one. transformers 5 holds `model.` for `backbone.`
and the experts of a layer in one tensor. MTP heads (`mtp.`) are left out.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import PlainFFN
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import EMBEDDING, CausalLM, Targets, attention_targets, mamba2_targets
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.families.mamba2 import Details
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.linear import Mamba2
from denim.spec.model import Layer, ModelSpec

PLACES = {"model.embeddings.weight": EMBEDDING, "model.norm_f.weight": "model.norm.weight"}


class Block(nn.Module):
    """x + part(norm(x)); the sum is fp32 if the details say so."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        mixer, ffn, details = layer.mixer, layer.ffn, spec.details
        assert isinstance(details, Details)
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.dtype = getattr(torch, spec.dtype)
        self.residual_dtype = torch.float32 if details.fp32_residual else self.dtype
        place = {"dtype": self.dtype, "device": device}
        self.norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.mixes = True
        if isinstance(mixer, FullAttention):
            self.part = Attention(mixer, hidden, index, norm_eps=eps, **place)
        elif isinstance(mixer, Mamba2):
            self.part = Mamba2Layer(
                mixer,
                hidden,
                index,
                gate_norm=GateNorm(eps, groups=mixer.num_groups),
                chunk_size=chunk_size,
                time_step_limit=details.time_step_limit,
                **place,
            )
        else:
            self.mixes = False
            self.part = _network(ffn, hidden, place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        normed = self.norm.normed(x).to(self.dtype)
        return x.to(self.residual_dtype) + (self.part(normed, batch) if self.mixes else self.part(normed))


def _network(ffn: DenseFFN | MoEFFN, hidden: int, place: dict) -> PlainFFN | SparseMoE:
    if isinstance(ffn, MoEFFN):
        return SparseMoE(ffn, hidden, **place)
    return PlainFFN(hidden, ffn.intermediate, activation=ffn.activation, **place)


class NemotronH(CausalLM):
    """Nemotron-H, Nemotron Nano and Nemotron 3 language models."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        part = block.part
        if isinstance(part, Attention):
            names = attention_targets(part, "mixer.")
        elif isinstance(part, Mamba2Layer):
            names = mamba2_targets(part, "mixer.")
        elif isinstance(part, SparseMoE):
            names = _moe(part, one_by_one=f"{prefix}mixer.experts.0.up_proj.weight" in published)
        else:
            names = _plain(part, "mixer.")
        names["norm.weight"] = block.norm.weight
        return names


def _plain(ffn: PlainFFN, prefix: str) -> Targets:
    return {f"{prefix}up_proj.weight": ffn.up.weight, f"{prefix}down_proj.weight": ffn.down.weight}


def _moe(ffn: SparseMoE, *, one_by_one: bool) -> Targets:
    assert ffn.bias is not None and ffn.shared is not None
    names: Targets = {
        "mixer.gate.weight": ffn.router.weight,
        "mixer.gate.e_score_correction_bias": ffn.bias,
    }
    if one_by_one:
        for i, (up, down) in enumerate(zip(ffn.up.data, ffn.down.data, strict=True)):
            names[f"mixer.experts.{i}.up_proj.weight"] = up
            names[f"mixer.experts.{i}.down_proj.weight"] = down
    else:
        names |= {"mixer.experts.up_proj": ffn.up, "mixer.experts.down_proj": ffn.down}
    if ffn.to_latent is not None:
        names["mixer.fc1_latent_proj.weight"] = ffn.to_latent.weight
        names["mixer.fc2_latent_proj.weight"] = ffn.from_latent.weight
    return names | _plain(ffn.shared, "mixer.shared_experts.")


def canonical_name(name: str) -> str | None:
    if name.startswith("mtp."):
        return None
    name = name.replace("backbone.", "model.", 1)
    return PLACES.get(name, name)


FAMILIES = {
    "nemotron_h": Family(
        NemotronH, canonical_name, "Nemotron-H", "Mamba2, GQA without positions, relu² networks, LatentMoE"
    )
}
