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
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import SparseMoE, SwiGLU
from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.layers.linear import Linear
from denim.layers.norm import RMSNorm
from denim.layers.rotary import Rotary
from denim.spec.model import DenseFFN, FullAttention, Layer, ModelSpec

Targets = dict[str, Tensor]


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
            self.ffn = SwiGLU(spec.hidden_size, layer.ffn.intermediate, **place)
        else:
            self.ffn = SparseMoE(layer.ffn, spec.hidden_size, **place)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch)
        return x + self.ffn(self.ffn_norm(x))


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


class Qwen3_5(nn.Module):
    """tokens -> hidden states -> logits, over the pages and slots of a `StepBatch`."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        super().__init__()
        self.spec = spec
        dtype = getattr(torch, spec.dtype)
        self.embedding = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.blocks = nn.ModuleList(
            Block(layer, spec, i, chunk_size, device) for i, layer in enumerate(spec.layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=True, dtype=dtype, device=device)
        self.head = Linear(spec.hidden_size, spec.vocab_size, dtype=dtype, device=device)
        if spec.tie_embeddings:
            self.head.weight = self.embedding
        self.mtp = MTPHead(spec, chunk_size, device) if spec.mtp_layers else None
        rotary_dim = next((m.rotary_dim for m in (x.mixer for x in spec.layers) if m.letter == "F"), 0)
        self.rotary = Rotary(spec.rope, rotary_dim, device) if rotary_dim else None

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: StepBatch) -> Tensor:
        """tokens [T] int64 -> hidden states [T, hidden] after the final norm; pages and slots are written."""
        x = F.embedding(tokens, self.embedding)
        if self.rotary is not None:
            batch.cos, batch.sin = self.rotary.angles(batch.positions, x.dtype)
        for block in self.blocks:
            x = block(x, batch)
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in fp32."""
        return self.head(hidden).float()

    def prepare(self) -> None:
        """Fix what is derived from weights. Call once after they are loaded."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.prepare()
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(keep=module is self.head and self.spec.tie_embeddings)

    def targets(self, published: Container[str] = ()) -> Targets:
        """Published tensor name -> the memory that it is copied into, with the published shape.

        Experts are published as one tensor a layer or as one a projection of each expert: `published`,
        the names in the files, tells which form to expect.
        """
        names = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.spec.tie_embeddings:
            names["lm_head.weight"] = self.head.weight
        for i, block in enumerate(self.blocks):
            names.update(_block_targets(block, f"model.layers.{i}.", published))
        if self.mtp is not None:
            names["mtp.fc.weight"] = self.mtp.join.weight
            names["mtp.pre_fc_norm_embedding.weight"] = self.mtp.embedding_norm.weight
            names["mtp.pre_fc_norm_hidden.weight"] = self.mtp.hidden_norm.weight
            names["mtp.norm.weight"] = self.mtp.norm.weight
            for i, block in enumerate(self.mtp.blocks):
                names.update(_block_targets(block, f"mtp.layers.{i}.", published))
        return {name: tensor.data for name, tensor in names.items()}


def canonical_name(name: str) -> str | None:
    """The text-only form's name of a published tensor; None for the vision tower's, which are not used."""
    if name.startswith("model.visual."):
        return None
    return name.replace("model.language_model.", "model.", 1)


def _rows(weight: Tensor, names_and_rows: list[tuple[str, int]]) -> Targets:
    """Consecutive row ranges of a fused weight, by name."""
    parts = weight.data.split([rows for _, rows in names_and_rows])
    return {name: part for (name, _), part in zip(names_and_rows, parts, strict=True)}


def _block_targets(block: Block, prefix: str, published: Container[str]) -> Targets:
    names: Targets = {
        "input_layernorm.weight": block.mixer_norm.weight,
        "post_attention_layernorm.weight": block.ffn_norm.weight,
    }
    mixer = block.mixer
    if isinstance(mixer, Attention):
        rows = [("q_proj", mixer.q_rows), ("k_proj", mixer.kv_rows), ("v_proj", mixer.kv_rows)]
        for name, part in _rows(mixer.qkv.weight, rows).items():
            names[f"self_attn.{name}.weight"] = part
        names["self_attn.o_proj.weight"] = mixer.out.weight
        names["self_attn.q_norm.weight"] = mixer.q_norm.weight
        names["self_attn.k_norm.weight"] = mixer.k_norm.weight
    else:
        heads = mixer.spec.num_value_heads
        rows = [("qkv", mixer.spec.conv_channels), ("z", mixer.value_rows), ("b", heads), ("a", heads)]
        for name, part in _rows(mixer.in_proj.weight, rows).items():
            names[f"linear_attn.in_proj_{name}.weight"] = part
        names["linear_attn.conv1d.weight"] = mixer.conv.unsqueeze(1)
        names["linear_attn.A_log"] = mixer.A_log
        names["linear_attn.dt_bias"] = mixer.dt_bias
        names["linear_attn.norm.weight"] = mixer.norm.weight
        names["linear_attn.out_proj.weight"] = mixer.out.weight
    ffn = block.ffn
    if isinstance(ffn, SwiGLU):
        names.update(_swiglu_targets(ffn, "mlp."))
    else:
        names["mlp.gate.weight"] = ffn.router.weight
        if f"{prefix}mlp.experts.0.gate_proj.weight" in published:
            for i, (gate_up, down) in enumerate(zip(ffn.gate_up.data, ffn.down.data, strict=True)):
                gate, up = gate_up.chunk(2)
                names[f"mlp.experts.{i}.gate_proj.weight"] = gate
                names[f"mlp.experts.{i}.up_proj.weight"] = up
                names[f"mlp.experts.{i}.down_proj.weight"] = down
        else:
            names["mlp.experts.gate_up_proj"] = ffn.gate_up
            names["mlp.experts.down_proj"] = ffn.down
        if ffn.shared is not None:
            names.update(_swiglu_targets(ffn.shared, "mlp.shared_expert."))
            names["mlp.shared_expert_gate.weight"] = ffn.shared_gate.weight
    return {prefix + name: tensor for name, tensor in names.items()}


def _swiglu_targets(ffn: SwiGLU, prefix: str) -> Targets:
    rows = [(f"{prefix}gate_proj.weight", ffn.intermediate), (f"{prefix}up_proj.weight", ffn.intermediate)]
    return _rows(ffn.gate_up.weight, rows) | {f"{prefix}down_proj.weight": ffn.down.weight}
