"""LFM2-MoE: with the router's bias and renormalised weights, as published, and without both."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.families.row import VOCAB, Row, randomise


def save(folder: Path, **changes: Any) -> nn.Module:
    import transformers

    values = {
        "vocab_size": VOCAB,
        "hidden_size": 60,
        "intermediate_size": 84,
        "moe_intermediate_size": 28,
        "num_hidden_layers": 5,
        "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
        "num_dense_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 4096,
        "conv_L_cache": 3,
        "dtype": "float32",
        "eos_token_id": None,
    } | changes
    model = randomise(transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**values)), matrix=0.2)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.5, generator=generator)
    model.save_pretrained(folder)
    return model


ROWS = [
    Row(
        "lfm2_moe",
        save,
        configs={
            "lfm2_8b_a1b.json": ("CCFCCCFCCCFCCCFCCCFCCFCC", 8.34),
            "lfm2.5_8b_a1b.json": ("CCFCCCFCCCFCCCFCCCFCCFCC", 8.47),
            "lfm2_24b_a2b.json": ("CCFC" * 10, 23.8),
        },
    ),
    Row(
        "lfm2_moe_plain",
        partial(
            save,
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            num_dense_layers=1,
            conv_L_cache=5,
            tie_word_embeddings=False,
        ),
    ),
]
