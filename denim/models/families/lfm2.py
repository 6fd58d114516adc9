"""LFM2: gated short convolutions, grouped-query attention between them, dense feed-forward networks.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes.
Layout of the published checkpoints (Hugging Face `Lfm2ForCausalLM`): `operator_norm` before the mixer,
`ffn_norm` before the feed-forward network w2(silu(w1 x) · w3 x), `embedding_norm` behind the last layer;
the convolution's `in_proj` is [B | C | x] by rows.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.layers.short_conv_layer import ShortConvLayer
from denim.models.causal_lm import FINAL_NORM, CausalLM, Targets, rows_of, swiglu_targets
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN
from denim.spec.model import Layer, ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, layer: Layer, spec: ModelSpec, index: int, device: torch.device | str):
        super().__init__()
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        if isinstance(layer.mixer, FullAttention):
            self.mixer = Attention(
                layer.mixer, spec.hidden_size, index, norm_eps=spec.norm_eps, zero_centred=False, **place
            )
        else:
            self.mixer = ShortConvLayer(layer.mixer, spec.hidden_size, index, **place)
        if isinstance(layer.ffn, DenseFFN):
            self.ffn = GatedFFN(spec.hidden_size, layer.ffn.intermediate, **place)
        else:
            self.ffn = SparseMoE(layer.ffn, spec.hidden_size, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class Lfm2(CausalLM):
    """LFM2. The chunk does not matter to it: there is no rule to compute by chunks."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        names: Targets = {
            "operator_norm.weight": block.mixer_norm.weight,
            "ffn_norm.weight": block.ffn_norm.weight,
        }
        mixer = block.mixer
        names.update(_attention(mixer) if isinstance(mixer, Attention) else _short_conv(mixer))
        names.update(self.ffn_targets(block.ffn, prefix, published))
        return names

    def ffn_targets(self, ffn: Any, prefix: str, published: Container[str]) -> Targets:
        """Targets of a feed-forward network by their names behind the block's prefix."""
        return swiglu_targets(ffn, "feed_forward.", ("w1", "w3", "w2"))


def canonical_name(name: str) -> str | None:
    """The final norm goes by the name that all families share."""
    return FINAL_NORM if name == "model.embedding_norm.weight" else name


def _attention(mixer: Attention) -> Targets:
    rows = [("q_proj", mixer.q_rows), ("k_proj", mixer.kv_rows), ("v_proj", mixer.kv_rows)]
    fused = rows_of(mixer.qkv.weight, [(f"self_attn.{name}.weight", n) for name, n in rows])
    return fused | {
        "self_attn.out_proj.weight": mixer.out.weight,
        "self_attn.q_layernorm.weight": mixer.q_norm.weight,
        "self_attn.k_layernorm.weight": mixer.k_norm.weight,
    }


def _short_conv(mixer: ShortConvLayer) -> Targets:
    names: Targets = {
        "conv.in_proj.weight": mixer.in_proj.weight,
        "conv.conv.weight": mixer.conv.unsqueeze(1),
        "conv.out_proj.weight": mixer.out.weight,
    }
    if mixer.spec.bias:
        names["conv.in_proj.bias"] = mixer.in_bias
        names["conv.conv.bias"] = mixer.conv_bias
        names["conv.out_proj.bias"] = mixer.out_bias
    return names


FAMILIES = {
    "lfm2": Family(
        Lfm2, canonical_name, "LFM2", "gated short convolutions, whose window is all the state; GQA"
    )
}
