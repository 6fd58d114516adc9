"""What surrounds the blocks in every model: embedding, final norm, head, positions.

Owns the way tokens -> hidden states -> logits and the weights that all families have in common. A family's
file makes the blocks and names the tensors.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.attention import Attention
from denim.layers.batch import StepBatch
from denim.layers.ffn import GatedFFN
from denim.layers.linear import Linear
from denim.layers.mamba1 import Mamba1Layer
from denim.layers.mamba2 import Mamba2Layer
from denim.layers.moe import SparseMoE
from denim.layers.norm import RMSNorm
from denim.layers.rotary import Rotary
from denim.spec.model import ModelSpec

Targets = dict[str, Tensor]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


class CausalLM(nn.Module):
    """A stack of blocks, each called as block(x [T, hidden], batch) -> [T, hidden].

    Targets of every family use the names `EMBEDDING` and `HEAD`; a family that publishes others renames
    them in its `canonical_name`. `embedding_scale` multiplies embeddings, `logit_scale` the logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device | str,
        zero_centred: bool = False,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
    ):
        super().__init__()
        self.spec = spec
        self.embedding_scale = embedding_scale
        self.logit_scale = logit_scale
        dtype = getattr(torch, spec.dtype)
        self.embedding = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(
            spec.hidden_size, spec.norm_eps, zero_centred=zero_centred, dtype=dtype, device=device
        )
        self.head = Linear(spec.hidden_size, spec.vocab_size, dtype=dtype, device=device)
        if spec.tie_embeddings:
            self.head.weight = self.embedding
        turned = max((layer.mixer.turned_dim for layer in spec.layers), default=0)
        self.rotary = Rotary(spec.rope, turned, device) if spec.rope is not None and turned else None

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: StepBatch) -> Tensor:
        """tokens [T] int64 -> hidden states [T, hidden] after the final norm; pages and slots are written."""
        x = F.embedding(tokens, self.embedding)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.rotary is not None:
            batch.cos, batch.sin = self.rotary.angles(batch.positions, x.dtype)
        return self.norm(self.through_blocks(x, batch)).to(self.embedding.dtype)

    def through_blocks(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Embeddings [T, hidden] -> hidden states before the final norm."""
        for block in self.blocks:
            x = block(x, batch)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in fp32."""
        logits = self.head.wide(hidden)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def prepare(self) -> None:
        """Fix what is derived from weights. Call once after they are loaded."""
        for module in self.modules():
            if module is not self and hasattr(module, "prepare"):
                module.prepare()
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(keep=module is self.head and self.spec.tie_embeddings)

    def targets(self, published: Container[str] = ()) -> Targets:
        """Published tensor name -> the memory that it is copied into, with the published shape.

        `published`, the names in the files, tells which form to expect where there are several.
        """
        names: Targets = {EMBEDDING: self.embedding, FINAL_NORM: self.norm.weight}
        if not self.spec.tie_embeddings:
            names[HEAD] = self.head.weight
        for i, block in enumerate(self.blocks):
            prefix = f"model.layers.{i}."
            names.update(
                {prefix + name: t for name, t in self.block_targets(block, prefix, published).items()}
            )
        return {name: tensor.data for name, tensor in names.items()}

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        """Targets of one block by their names behind `prefix`. The family's own."""
        raise NotImplementedError


def rows_of(weight: Tensor, names_and_rows: Sequence[tuple[str, int]]) -> Targets:
    """Consecutive row ranges of a fused weight, by name."""
    parts = weight.data.split([rows for _, rows in names_and_rows])
    return {name: part for (name, _), part in zip(names_and_rows, parts, strict=True)}


def swiglu_targets(
    ffn: GatedFFN, prefix: str, names_of: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Targets:
    """A gated network whose projections are published as `names_of` calls gate, up and down."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names_of)
    rows = [(gate, ffn.intermediate), (up, ffn.intermediate)]
    return rows_of(ffn.gate_up.weight, rows) | {down: ffn.down.weight}


def attention_targets(mixer: Attention, prefix: str) -> Targets:
    """Attention that is published as q_proj, k_proj, v_proj and o_proj."""
    rows = [("q_proj", mixer.q_rows), ("k_proj", mixer.kv_rows), ("v_proj", mixer.kv_rows)]
    names = rows_of(mixer.qkv.weight, [(f"{prefix}{name}.weight", n) for name, n in rows])
    names[f"{prefix}o_proj.weight"] = mixer.out.weight
    if mixer.spec.qk_norm:
        names[f"{prefix}q_norm.weight"] = mixer.q_norm.weight
        names[f"{prefix}k_norm.weight"] = mixer.k_norm.weight
    return names


def expert_targets(
    ffn: SparseMoE,
    prefix: str,
    *,
    one_by_one: bool,
    names_of: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Targets:
    """Gated experts, published one projection a tensor (`one_by_one`, as `names_of` calls gate, up and down)
    or all experts of a layer in one."""
    if not one_by_one:
        return {f"{prefix}gate_up_proj": ffn.up, f"{prefix}down_proj": ffn.down}
    names: Targets = {}
    for i, (gate_up, down) in enumerate(zip(ffn.up.data, ffn.down.data, strict=True)):
        gate, up = gate_up.chunk(2)
        each = zip(names_of, (gate, up, down), strict=True)
        names.update({f"{prefix}{i}.{name}.weight": tensor for name, tensor in each})
    return names


def mamba2_targets(mixer: Mamba2Layer, prefix: str) -> Targets:
    """A Mamba2 layer, which every family publishes under the names of the first release."""
    names: Targets = {
        "in_proj.weight": mixer.in_proj.weight,
        "conv1d.weight": mixer.conv.unsqueeze(1),
        "A_log": mixer.A_log,
        "D": mixer.D,
        "dt_bias": mixer.dt_bias,
        "out_proj.weight": mixer.out.weight,
    }
    names |= _biases(mixer)
    if mixer.norm is not None:
        names["norm.weight"] = mixer.norm.weight
    return {prefix + name: tensor for name, tensor in names.items()}


def mamba1_targets(mixer: Mamba1Layer, prefix: str) -> Targets:
    """A Mamba1 layer, which every family publishes under the names of the first release."""
    names: Targets = {
        "in_proj.weight": mixer.in_proj.weight,
        "conv1d.weight": mixer.conv.unsqueeze(1),
        "x_proj.weight": mixer.x_proj.weight,
        "dt_proj.weight": mixer.dt_proj.weight,
        "dt_proj.bias": mixer.dt_bias,
        "A_log": mixer.A_log,
        "D": mixer.D,
        "out_proj.weight": mixer.out.weight,
    }
    names |= _biases(mixer)
    if mixer.spec.inner_norms:
        norms = (("dt", mixer.dt_norm), ("b", mixer.b_norm), ("c", mixer.c_norm))
        names.update({f"{part}_layernorm.weight": norm.weight for part, norm in norms})
    return {prefix + name: tensor for name, tensor in names.items()}


def _biases(mixer: Mamba1Layer | Mamba2Layer) -> Targets:
    """Those that the layer has."""
    biases = {
        "in_proj.bias": mixer.in_bias,
        "conv1d.bias": mixer.conv_bias,
        "out_proj.bias": mixer.out_bias,
    }
    return {name: tensor for name, tensor in biases.items() if tensor is not None}
