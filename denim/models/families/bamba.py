"""Bamba: Mamba2 with a few attention layers that turn half of each head, and a SwiGLU behind every mixer.

Names of the published checkpoints (Hugging Face `BambaForCausalLM`): `mamba` or `self_attn`, `feed_forward`,
`pre_ff_layernorm`, and `final_layernorm` at the end.
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
from denim.models.causal_lm import CausalLM, Targets, attention_targets, mamba2_targets, swiglu_targets
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.families.bamba import Details
from denim.spec.ffn import DenseFFN
from denim.spec.linear import Mamba2
from denim.spec.model import Layer, ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        mixer, ffn = layer.mixer, layer.ffn
        assert isinstance(spec.details, Details) and isinstance(ffn, DenseFFN)
        hidden, eps = spec.hidden_size, spec.norm_eps
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        if isinstance(mixer, FullAttention):
            self.mixer = Attention(mixer, hidden, index, norm_eps=eps, **place)
        else:
            assert isinstance(mixer, Mamba2)
            self.mixer = Mamba2Layer(
                mixer,
                hidden,
                index,
                gate_norm=GateNorm(eps, groups=mixer.num_groups),
                chunk_size=chunk_size,
                time_step_limit=spec.details.time_step_limit,
                **place,
            )
        self.ffn = GatedFFN(hidden, ffn.intermediate, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class Bamba(CausalLM):
    """Bamba language models."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        mixer = block.mixer
        attends = isinstance(mixer, Attention)
        names = attention_targets(mixer, "self_attn.") if attends else mamba2_targets(mixer, "mamba.")
        norms = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "pre_ff_layernorm.weight": block.ffn_norm.weight,
        }
        return names | norms | swiglu_targets(block.ffn, "feed_forward.")


def canonical_name(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.", 1)


FAMILIES = {
    "bamba": Family(Bamba, canonical_name, "Bamba", "Mamba2, GQA with RoPE on half of a head, dense"),
}
