"""Kimi Linear: KDA layers, latent attention without positions, a dense layer and then sparse experts.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes. The
published checkpoints call the experts' part of a layer `block_sparse_moe` and the first, dense layer's
`mlp`; transformers saves both as `block_sparse_moe`.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.kimi_delta import KimiDeltaLayer
from denim.layers.latent_attention import LatentAttentionLayer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import CausalLM, Targets, expert_targets, rows_of, swiglu_targets
from denim.models.family import Family
from denim.spec.attention import LatentAttention
from denim.spec.ffn import DenseFFN
from denim.spec.model import Layer, ModelSpec

# The published code makes the norms inside latent attention without the config's eps.
LATENT_NORM_EPS = 1e-6

EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        hidden = spec.hidden_size
        place = {"dtype": getattr(torch, spec.dtype), "device": device}
        self.mixer_norm = RMSNorm(hidden, spec.norm_eps, zero_centred=False, **place)
        self.ffn_norm = RMSNorm(hidden, spec.norm_eps, zero_centred=False, **place)
        if isinstance(layer.mixer, LatentAttention):
            self.mixer = LatentAttentionLayer(
                layer.mixer, hidden, index, turned=spec.rope is not None, norm_eps=LATENT_NORM_EPS, **place
            )
        else:
            self.mixer = KimiDeltaLayer(
                layer.mixer, hidden, index, norm_eps=spec.norm_eps, chunk_size=chunk_size, **place
            )
        if isinstance(layer.ffn, DenseFFN):
            self.ffn = GatedFFN(hidden, layer.ffn.intermediate, **place)
        else:
            self.ffn = SparseMoE(layer.ffn, hidden, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class KimiLinear(CausalLM):
    """`decay_shape` is the published shape of A_log. Ling-3.0 is built in the same way."""

    decay_shape: tuple[int, ...] = (1, 1, -1, 1)

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        names: Targets = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.ffn_norm.weight,
        }
        mixer, ffn = block.mixer, block.ffn
        if isinstance(mixer, LatentAttentionLayer):
            parts = _latent_attention(mixer)
        else:
            parts = _kimi_delta(mixer) | {"A_log": mixer.A_log.view(self.decay_shape)}
        names.update({f"self_attn.{name}": tensor for name, tensor in parts.items()})
        names.update(_experts(ffn) if isinstance(ffn, SparseMoE) else swiglu_targets(ffn, "mlp."))
        return names


def canonical_name(name: str) -> str:
    """`mlp` for all layers, and the usual names of an expert's projections."""
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    if ".mlp.experts." not in name:
        return name
    front, projection, kind = name.rsplit(".", 2)
    return f"{front}.{EXPERT_NAMES.get(projection, projection)}.{kind}"


def _latent_attention(mixer: LatentAttentionLayer) -> Targets:
    queries, latent, shared, gates = mixer.rows
    query = "q_proj.weight" if mixer.query_up is None else "q_a_proj.weight"
    rows = [(query, queries), ("kv_a_proj_with_mqa.weight", latent + shared)]
    if gates:
        rows.append(("g_proj.weight", gates))
    names = rows_of(mixer.in_proj.weight, rows) | {
        "kv_a_layernorm.weight": mixer.latent_norm.weight,
        "kv_b_proj.weight": mixer.up.flatten(0, 1),
        "o_proj.weight": mixer.out.weight,
    }
    if mixer.query_norm is not None and mixer.query_up is not None:
        names["q_a_layernorm.weight"] = mixer.query_norm.weight
        names["q_b_proj.weight"] = mixer.query_up.weight
    return names


def _kimi_delta(mixer: KimiDeltaLayer) -> Targets:
    keys, values = mixer.key_rows, mixer.value_rows
    _, heads, decay, gate = mixer.rows
    qkv = [("q", keys), ("k", keys), ("v", values)]
    rows = [(f"{part}_proj.weight", n) for part, n in qkv]
    rows.append(("b_proj.weight", heads))
    rows.append(("f_proj.weight" if mixer.decay_up is None else "f_a_proj.weight", decay))
    rows.append(("g_proj.weight" if mixer.gate_up is None else "g_a_proj.weight", gate))
    names = rows_of(mixer.in_proj.weight, rows)
    names |= rows_of(mixer.conv.unsqueeze(1), [(f"{part}_conv1d.weight", n) for part, n in qkv])
    if mixer.decay_up is not None:
        names["f_b_proj.weight"] = mixer.decay_up.weight
    if mixer.gate_up is not None:
        names["g_b_proj.weight"] = mixer.gate_up.weight
    return names | {
        "dt_bias": mixer.dt_bias,
        "o_norm.weight": mixer.norm.weight,
        "o_proj.weight": mixer.out.weight,
    }


def _experts(ffn: SparseMoE) -> Targets:
    assert ffn.bias is not None and ffn.shared is not None, (
        "the family's routers are biased, its experts shared"
    )
    return {
        "mlp.gate.weight": ffn.router.weight,
        "mlp.gate.e_score_correction_bias": ffn.bias,
        **expert_targets(ffn, "mlp.experts.", one_by_one=True),
        **swiglu_targets(ffn.shared, "mlp.shared_experts."),
    }


FAMILIES = {
    "kimi_linear": Family(
        KimiLinear,
        canonical_name,
        "Kimi Linear",
        "KDA, latent attention (MLA) without positions, sigmoid-routed experts behind a dense layer",
    ),
}
