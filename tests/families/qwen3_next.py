"""Qwen3-Next: projections fused by key head, sparse and dense layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.families.row import Row, randomise
from tests.tiny import config_values


def save(folder: Path, **changes: Any) -> nn.Module:
    """Layer 1 is dense. Decays are drawn weak: where heads forget all at once, the norms behind them magnify
    rounding in both implementations alike, by 10 times here."""
    import transformers

    config = transformers.Qwen3NextConfig(
        **config_values(
            **{
                "intermediate_size": 80,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 20,
                "shared_expert_intermediate_size": 28,
                "mlp_only_layers": [1],
            }
            | changes
        )
    )
    model = randomise(transformers.Qwen3NextForCausalLM(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.normal_(-1.5, 0.5, generator=generator)
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
