"""Qwen3-Next: projections fused by key head, sparse and dense layers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tests.families.row import Row, randomise
from tests.tiny import config_values


def save(folder: Path) -> nn.Module:
    """Layer 1 is dense."""
    import transformers

    config = transformers.Qwen3NextConfig(
        **config_values(
            intermediate_size=80,
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=28,
            mlp_only_layers=[1],
        )
    )
    model = randomise(transformers.Qwen3NextForCausalLM(config))
    model.save_pretrained(folder)
    return model


ROWS = [
    Row(
        "qwen3_next",
        save,
        configs={
            "qwen3_next_80b_a3b.json": ("LLLF" * 12, 81.3),
            "qwen3_next_80b_a3b_fp8.json": ("LLLF" * 12, 81.3),
        },
    )
]
