"""OLMo-hybrid.

Gated DeltaNet layers norm what goes into mixer and feed-forward network, attention layers what comes out.
Queries and keys are normed over all heads together.

Three forms of names and cuts are read. The published one: separate projections, and a convolution each for
q, k and v. What transformers' `save_pretrained` writes: the norm behind attention under the name that the
published form gives to the other layers' second norm, and one convolution cut into three equal parts,
whatever belongs to q, k and v. What it writes with `save_original_format=False`: transformers' own names, and
the convolution in one.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import CausalLM, Targets, attention_targets, rows_of, swiglu_targets
from denim.models.family import Family
from denim.spec.attention import FullAttention
from denim.spec.model import Layer, ModelSpec

# No config states it: the published layer norms its output with fla's default.
LINEAR_NORM_EPS = 1e-5


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)); with attention x + norm(mixer(x)), then x + norm(ffn(x))."""

    def __init__(
        self, layer: Layer, spec: ModelSpec, index: int, chunk_size: int, device: torch.device | str
    ):
        super().__init__()
        dtype, hidden = getattr(torch, spec.dtype), spec.hidden_size
        place = {"dtype": dtype, "device": device}
        plain = {"zero_centred": False, **place}
        self.mixer_norm = RMSNorm(hidden, spec.norm_eps, **plain)
        self.ffn_norm = RMSNorm(hidden, spec.norm_eps, **plain)
        self.norms_behind = isinstance(layer.mixer, FullAttention)
        if self.norms_behind:
            self.mixer = Attention(layer.mixer, hidden, index, norm_eps=spec.norm_eps, **plain)
        else:
            self.mixer = GatedDeltaNetLayer(
                layer.mixer, hidden, index, norm_eps=LINEAR_NORM_EPS, chunk_size=chunk_size, **place
            )
        self.ffn = GatedFFN(hidden, layer.ffn.intermediate, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        if self.norms_behind:
            x = x + self.mixer_norm(self.mixer(x, batch))
            return x + self.ffn_norm(self.ffn(x))
        x = x + self.mixer(self.mixer_norm(x), batch)
        return self.ffn(x, norm=self.ffn_norm, add=x)


class OlmoHybrid(CausalLM):
    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        blocks = [Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)]
        super().__init__(spec, blocks, device=device)

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        mixer = block.mixer
        if isinstance(mixer, Attention):
            saved = prefix + "feedforward_layer_norm.weight" in published
            names = attention_targets(mixer, "self_attn.")
            before = "feedforward_layer_norm" if saved else "post_attention_layernorm"
            after = "post_feedforward_layernorm"
        else:
            own = prefix + "input_layernorm.weight" in published
            names = self._linear_targets(mixer, published, prefix)
            before = "input_layernorm" if own else "attention_layer_norm"
            after = "post_attention_layernorm" if own else "feedforward_layer_norm"
        names[f"{before}.weight"] = block.mixer_norm.weight
        names[f"{after}.weight"] = block.ffn_norm.weight
        return names | swiglu_targets(block.ffn, "mlp.")

    def _linear_targets(self, mixer: GatedDeltaNetLayer, published: Container[str], prefix: str) -> Targets:
        heads, keys, values = mixer.spec.num_value_heads, mixer.key_rows, mixer.value_rows
        rows = [("q", keys), ("k", keys), ("v", values), ("g", values), ("b", heads), ("a", heads)]
        names = rows_of(mixer.in_proj.weight, [(f"linear_attn.{name}_proj.weight", n) for name, n in rows])
        names |= {
            "linear_attn.A_log": mixer.A_log,
            "linear_attn.dt_bias": mixer.dt_bias,
            "linear_attn.o_norm.weight": mixer.norm.weight,
            "linear_attn.o_proj.weight": mixer.out.weight,
        }
        conv = mixer.conv.unsqueeze(1)
        if f"{prefix}linear_attn.conv1d.weight" in published:
            return names | {"linear_attn.conv1d.weight": conv}
        parts = conv.chunk(3) if self._saved_by_transformers(published) else conv.split((keys, keys, values))
        return names | {
            f"linear_attn.{name}_conv1d.weight": part for name, part in zip("qkv", parts, strict=True)
        }

    def _saved_by_transformers(self, published: Container[str]) -> bool:
        first = self.spec.attention_layers[0]
        return f"model.layers.{first}.feedforward_layer_norm.weight" in published


FAMILIES = {
    "olmo_hybrid": Family(
        OlmoHybrid,
        title="OLMo-hybrid",
        note="Gated DeltaNet with β in (0, 2), attention with norms behind it",
    )
}
