"""MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention every eighth layer, sparse experts.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes.
Layout of the published checkpoints: `qkv_proj` of a linear layer holds (q | k | v) head by head, experts are
`block_sparse_moe.experts.N.{w1,w3,w2}` (gate, up, down). transformers 5 saves the same names; in its modules
the block is called `mlp` and the experts of a layer lie in one tensor, which is read too.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.lightning import LightningLayer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import CausalLM, Targets, attention_targets, expert_targets, rows_of
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.families.minimax import MiniMaxDetails
from denim.spec.model import Layer, ModelSpec

# Tables that transformers saves beside the weights; all of them follow from the layer's place.
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


class Block(nn.Module):
    """x = norm(x), then alpha · x + beta · mixer(x); the same with the experts."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        assert isinstance(spec.details, MiniMaxDetails)
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        self.ffn_residual = spec.details.ffn
        if isinstance(layer.mixer, FullAttention):
            self.mixer_residual = spec.details.full
            self.mixer = Attention(layer.mixer, spec.hidden_size, index, norm_eps=spec.norm_eps, **place)
        else:
            self.mixer_residual = spec.details.linear
            self.mixer = LightningLayer(
                layer.mixer,
                spec.hidden_size,
                index,
                num_layers=len(spec.layers),
                chunk_size=chunk_size,
                **place,
            )
        self.ffn = SparseMoE(layer.ffn, spec.hidden_size, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = self.mixer_norm(x)
        x = x * self.mixer_residual.alpha + self.mixer(x, batch) * self.mixer_residual.beta
        x = self.ffn_norm(x)
        return x * self.ffn_residual.alpha + self.ffn(x) * self.ffn_residual.beta


class MiniMax(CausalLM):
    """MiniMax-Text-01 and MiniMax-M1."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        mixer, ffn = block.mixer, block.ffn
        names: Targets = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.ffn_norm.weight,
            "block_sparse_moe.gate.weight": ffn.router.weight,
        }
        if isinstance(mixer, Attention):
            names.update(attention_targets(mixer, "self_attn."))
        else:
            names.update(_lightning(mixer))
        experts = "block_sparse_moe.experts."
        one_by_one = f"{prefix}{experts}gate_up_proj" not in published
        names.update(expert_targets(ffn, experts, one_by_one=one_by_one, names_of=("w1", "w3", "w2")))
        return names


def canonical_name(name: str) -> str | None:
    """The published name; None for tables of decays."""
    if name.endswith(DERIVED):
        return None
    return name.replace(".mlp.", ".block_sparse_moe.", 1)


def _lightning(mixer: LightningLayer) -> Targets:
    rows = [("self_attn.qkv_proj.weight", 3 * mixer.inner), ("self_attn.output_gate.weight", mixer.inner)]
    return rows_of(mixer.in_proj.weight, rows) | {
        "self_attn.norm.weight": mixer.norm.weight,
        "self_attn.out_proj.weight": mixer.out.weight,
    }


FAMILIES = {
    "minimax": Family(
        MiniMax,
        canonical_name,
        "MiniMax-Text-01",
        "lightning attention with a constant decay, GQA with partial RoPE, MoE; MiniMax-M1 too",
    )
}
