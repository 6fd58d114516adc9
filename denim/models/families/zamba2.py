"""Zamba2: Mamba2 layers, some with a shared transformer block before them.

Assembles the blocks of a `ModelSpec` from `denim.layers` and says where each published tensor goes (Hugging
Face `Zamba2ForCausalLM`). A shared block reads [hidden state | embedding]; its output, through a matrix of
the layer's own, joins the input of the layer's Mamba2, not the hidden state. Layers take turns with the
blocks and bring adapters (low-rank additions to the block's projections), which are published within the
block, in lists with one place for each layer that has a block.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from denim.layers.attention import attend, prepare
from denim.layers.batch import StepBatch
from denim.layers.linear import Linear
from denim.layers.mamba2 import GateNorm, Mamba2Layer
from denim.layers.norm import RMSNorm
from denim.models.causal_lm import FINAL_NORM, CausalLM, Targets, mamba2_targets, rows_of
from denim.models.family import Family
from denim.spec.families.zamba2 import SharedAttention, Zamba2Details
from denim.spec.linear import Mamba2
from denim.spec.model import ModelSpec

GATE_NORM_EPS = 1e-5  # of transformers' Zamba2, whatever the config's rms_norm_eps


class Adapter(nn.Module):
    """up(down(x)), what is added to a projection."""

    def __init__(self, width: int, rank: int, rows: int, place: dict[str, Any]):
        super().__init__()
        self.down = Linear(width, rank, **place)
        self.up = Linear(rank, rows, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SharedBlock(nn.Module):
    """The weights that layers share: a norm over [hidden | embedding], attention, a norm, a gated network."""

    def __init__(self, spec: SharedAttention, hidden: int, eps: float, place: dict[str, Any]):
        super().__init__()
        self.rows = (spec.query_rows, spec.kv_rows, spec.kv_rows)
        self.input_norm = RMSNorm(2 * hidden, eps, zero_centred=False, **place)
        self.qkv = Linear(2 * hidden, sum(self.rows), **place)
        self.out = Linear(spec.query_rows, hidden, **place)
        self.ffn_norm = RMSNorm(hidden, eps, zero_centred=False, **place)
        self.gate_up = Linear(hidden, 2 * spec.intermediate, **place)
        self.down = Linear(spec.intermediate, hidden, **place)


class MambaBlock(nn.Module):
    """x + mamba(norm(x + added)); `added` [T, hidden] is what a shared block says, if there is one."""

    def __init__(self, mixer: Mamba2, spec: ModelSpec, index: int, chunk_size: int, place: dict[str, Any]):
        super().__init__()
        assert isinstance(spec.details, Zamba2Details)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, zero_centred=False, **place)
        self.mamba = Mamba2Layer(
            mixer,
            spec.hidden_size,
            index,
            gate_norm=GateNorm(GATE_NORM_EPS, groups=mixer.num_groups),
            chunk_size=chunk_size,
            time_step_limit=spec.details.time_step_limit,
            **place,
        )

    def forward(self, x: Tensor, embedded: Tensor, batch: StepBatch, added: Tensor | None = None) -> Tensor:
        return x + self.mamba(self.norm(x if added is None else x + added), batch)


class HybridBlock(nn.Module):
    """A shared block with the layer's adapters and its own KV, then the layer's Mamba2."""

    def __init__(
        self,
        mixer: SharedAttention,
        shared: SharedBlock,
        spec: ModelSpec,
        index: int,
        chunk_size: int,
        place: dict[str, Any],
    ):
        super().__init__()
        assert isinstance(mixer.linear, Mamba2)
        hidden, rank = spec.hidden_size, mixer.adapter_rank
        self.spec = mixer.attention
        self.number = mixer.block
        self.index = index
        self.shared = shared
        self.qkv_adapters = None
        if mixer.attention_adapters:
            self.qkv_adapters = nn.ModuleList(Adapter(2 * hidden, rank, rows, place) for rows in shared.rows)
        self.ffn_adapter = Adapter(hidden, rank, 2 * mixer.intermediate, place)
        self.linear = Linear(hidden, hidden, **place)
        self.mamba = MambaBlock(mixer.linear, spec, index, chunk_size, place)

    def forward(self, x: Tensor, embedded: Tensor, batch: StepBatch) -> Tensor:
        y = self.shared.input_norm(torch.cat((x, embedded), dim=-1))
        y = self.shared.ffn_norm(self._attention(y, batch))
        gate, up = (self.shared.gate_up(y) + self.ffn_adapter(y)).chunk(2, dim=-1)
        added = self.linear(self.shared.down(F.gelu(gate) * up))
        return self.mamba(x, embedded, batch, added)

    def _attention(self, x: Tensor, batch: StepBatch) -> Tensor:
        """[T, 2 hidden] -> [T, hidden]. Scores are scaled as for heads of half the size: the published code's
        reading of the doubled input."""
        q, k, v = self.shared.qkv(x).split(self.shared.rows, dim=-1)
        if self.qkv_adapters is not None:
            q, k, v = (part + adapter(x) for part, adapter in zip((q, k, v), self.qkv_adapters, strict=True))
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in (q, k, v))
        kv = batch.memory.kv(self.index)
        q = prepare(q, k, v, kv, batch, turned=self.spec.rotary_dim > 0)
        return self.shared.out(attend(q, kv, batch, (self.spec.head_dim / 2) ** -0.5).flatten(1))


class Zamba2(CausalLM):
    """Zamba2 models of all sizes."""

    def __init__(self, spec: ModelSpec, *, chunk_size: int, device: torch.device | str):
        place: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "device": device}
        shared: dict[int, SharedBlock] = {}
        blocks: list[nn.Module] = []
        for i, layer in enumerate(spec.layers):
            mixer = layer.mixer
            if isinstance(mixer, SharedAttention):
                if mixer.first:
                    shared[mixer.block] = SharedBlock(mixer, spec.hidden_size, spec.norm_eps, place)
                blocks.append(HybridBlock(mixer, shared[mixer.block], spec, i, chunk_size, place))
            else:
                assert isinstance(mixer, Mamba2)
                blocks.append(MambaBlock(mixer, spec, i, chunk_size, place))
        super().__init__(spec, blocks, device=device)

    def through_blocks(self, x: Tensor, batch: StepBatch) -> Tensor:
        embedded = x
        for block in self.blocks:
            x = block(x, embedded, batch)
        return x

    def targets(self, published: Container[str] = ()) -> Targets:
        """A shared block is published under its first layer, with the adapters of all its layers."""
        names = super().targets(published)
        hybrids = [(i, block) for i, block in enumerate(self.blocks) if isinstance(block, HybridBlock)]
        first: dict[int, int] = {}
        for place, (i, block) in enumerate(hybrids):
            new = block.number not in first
            prefix = f"model.layers.{first.setdefault(block.number, i)}.shared_transformer."
            parts = adapter_targets(block, place) | (shared_targets(block.shared) if new else {})
            names |= {prefix + name: tensor.data for name, tensor in parts.items()}
        return names

    def block_targets(self, block: nn.Module, prefix: str, published: Container[str]) -> Targets:
        if isinstance(block, HybridBlock):
            return {"linear.weight": block.linear.weight, **mamba_targets(block.mamba, "mamba_decoder.")}
        return mamba_targets(block, "")


def mamba_targets(block: Any, prefix: str) -> Targets:
    """What a `MambaBlock` holds."""
    norm = {f"{prefix}input_layernorm.weight": block.norm.weight}
    return norm | mamba2_targets(block.mamba, f"{prefix}mamba.")


def shared_targets(shared: SharedBlock) -> Targets:
    rows = zip(("q_proj", "k_proj", "v_proj"), shared.rows, strict=True)
    return rows_of(shared.qkv.weight, [(f"self_attn.{name}.weight", n) for name, n in rows]) | {
        "input_layernorm.weight": shared.input_norm.weight,
        "pre_ff_layernorm.weight": shared.ffn_norm.weight,
        "self_attn.o_proj.weight": shared.out.weight,
        "feed_forward.gate_up_proj.weight": shared.gate_up.weight,
        "feed_forward.down_proj.weight": shared.down.weight,
    }


def adapter_targets(block: HybridBlock, place: int) -> Targets:
    """The adapters of the layer that is the `place`-th with a block."""
    adapters = {f"feed_forward.gate_up_proj_adapter_list.{place}": block.ffn_adapter}
    if block.qkv_adapters is not None:
        for part, adapter in zip("qkv", block.qkv_adapters, strict=True):
            adapters[f"self_attn.linear_{part}_adapter_list.{place}"] = adapter
    names: Targets = {}
    for name, adapter in adapters.items():
        names[f"{name}.0.weight"] = adapter.down.weight
        names[f"{name}.1.weight"] = adapter.up.weight
    return names


def canonical_name(name: str) -> str:
    """The name that Denim's targets have for a published tensor."""
    return FINAL_NORM if name == "model.final_layernorm.weight" else name


FAMILIES = {
    "zamba2": Family(
        Zamba2,
        canonical_name,
        "Zamba2",
        "Mamba2, before some layers a shared transformer block with adapters",
    )
}
