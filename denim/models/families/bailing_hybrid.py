"""Ling-3.0 (bailing_hybrid): KDA with a floor under its decay, gated latent attention with RoPE, experts.

Built of the same parts as Kimi Linear; owns the names. The published checkpoints call latent attention's
output projection `dense` and KDA's `o_proj`, transformers calls both `dense`.
"""

from __future__ import annotations

from denim.models.causal_lm import EMBEDDING
from denim.models.families.kimi_linear import KimiLinear
from denim.models.family import Family

RENAMED = {
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}


class BailingHybrid(KimiLinear):
    decay_shape = (-1,)


def canonical_name(name: str) -> str:
    if name == "model.word_embeddings.weight":
        return EMBEDDING
    for part, ours in RENAMED.items():
        name = name.replace(part, ours, 1)
    return name


FAMILIES = {
    "bailing_hybrid": Family(
        BailingHybrid,
        canonical_name,
        "Ling-3.0",
        "KDA with a floor under its decay, gated latent attention (MLA), experts in groups; no MTP head",
    ),
}
