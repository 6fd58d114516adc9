"""Qwen3-Next.

The blocks of Qwen3.5-MoE, MTP head included, with another layout of the published linear projections: they
are fused and grouped by key head. With r value heads a key head, `in_proj_qkvz` holds for each key head the
rows [q | k | v of r heads | z of r heads], and `in_proj_ba` [b of r heads | a of r heads].
"""

from __future__ import annotations

import torch
from torch import Tensor

from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.models.causal_lm import Targets, rows_of
from denim.models.families.qwen3_5 import Qwen3_5
from denim.models.family import Family
from denim.spec.linear import GatedDeltaNet


class Qwen3Next(Qwen3_5):
    """Until `prepare` the rows of `in_proj` stand as they are published: [qkvz | ba]."""

    def linear_targets(self, mixer: GatedDeltaNetLayer) -> Targets:
        heads = mixer.spec.num_value_heads
        rows = [("qkvz", mixer.spec.conv_channels + mixer.value_rows), ("ba", 2 * heads)]
        named = [(f"linear_attn.in_proj_{name}.weight", n) for name, n in rows]
        targets = super().linear_targets(mixer)
        kept = {name: target for name, target in targets.items() if "in_proj" not in name}
        return rows_of(mixer.in_proj.weight, named) | kept

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, GatedDeltaNetLayer):
                module.in_proj.reorder_rows(published_rows(module.spec))
        super().prepare()


def published_rows(spec: GatedDeltaNet) -> Tensor:
    """For each row of [q | k | v | z | b | a], its place in the published order [qkvz | ba]: int64."""
    group = spec.num_value_heads // spec.num_key_heads
    values = group * spec.value_dim
    grouped = spec.num_key_heads * (2 * spec.key_dim + 2 * values)
    rows = torch.arange(grouped + 2 * spec.num_value_heads)
    qkvz = rows[:grouped].view(spec.num_key_heads, -1).split((spec.key_dim, spec.key_dim, values, values), 1)
    ba = rows[grouped:].view(spec.num_key_heads, -1).split(group, 1)
    return torch.cat([part.flatten() for part in (*qkvz, *ba)])


FAMILIES = {
    "qwen3_next": Family(
        Qwen3Next, title="Qwen3-Next", note="Gated DeltaNet, gated attention, sparse experts, MTP"
    )
}
