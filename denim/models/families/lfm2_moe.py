"""LFM2-MoE: the blocks of LFM2 with sparse experts behind the first layers.

Owns the names of the experts' tensors. Layout of the published checkpoints (Hugging Face
`Lfm2MoeForCausalLM`): `feed_forward.gate`, `feed_forward.expert_bias`, `feed_forward.experts.N.{w1,w3,w2}`
(gate, up, down); in transformers 5's modules the experts of a layer lie in one tensor, which is read too.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from denim.layers.moe import SparseMoE
from denim.models.causal_lm import Targets, expert_targets
from denim.models.families.lfm2 import Lfm2, canonical_name
from denim.models.family import Family


class Lfm2Moe(Lfm2):
    """LFM2-MoE."""

    def ffn_targets(self, ffn: Any, prefix: str, published: Container[str]) -> Targets:
        if not isinstance(ffn, SparseMoE):
            return super().ffn_targets(ffn, prefix, published)
        experts = "feed_forward.experts."
        one_by_one = f"{prefix}{experts}gate_up_proj" not in published
        names = expert_targets(ffn, experts, one_by_one=one_by_one, names_of=("w1", "w3", "w2"))
        names["feed_forward.gate.weight"] = ffn.router.weight
        if ffn.bias is not None:
            names["feed_forward.expert_bias"] = ffn.bias
        return names


FAMILIES = {
    "lfm2_moe": Family(Lfm2Moe, canonical_name, "LFM2-MoE", "the same with sparse experts, sigmoid-routed")
}
