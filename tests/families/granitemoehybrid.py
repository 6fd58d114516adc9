"""Granite-4: sparse without positions, dense with RoPE."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tests.families.mamba2 import remembering
from tests.families.row import VOCAB, Row


def save(folder: Path, **changes: Any) -> nn.Module:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
        "embedding_multiplier": 5.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": None,
    }
    config = transformers.GraniteMoeHybridConfig(**values | changes)
    model = remembering(transformers.GraniteMoeHybridForCausalLM(config))
    model.save_pretrained(folder)
    return model


dense = partial(
    save,
    num_local_experts=0,
    shared_intermediate_size=60,
    position_embedding_type="rope",
    tie_word_embeddings=False,
    mamba_n_groups=1,
    time_step_limit=(0.02, 2.0),
)


def pattern(layers: int, attention: set[int]) -> str:
    return "".join("F" if i in attention else "L" for i in range(layers))


USUAL = pattern(40, {5, 15, 25, 35})
ROWS = [
    Row(
        "granitemoehybrid",
        save,
        configs={
            "granite-4.0-h-tiny.json": (USUAL, 6.94),
            "granite-4.0-h-small.json": (USUAL, 32.2),
        },
    ),
    Row(
        "granitemoehybrid_dense",
        dense,
        configs={
            "granite-4.0-h-micro.json": (USUAL, 3.19),
            "granite-4.0-h-1b.json": (USUAL, 1.46),
            "granite-4.0-h-350m.json": (pattern(32, {10, 13, 17, 27}), 0.340),
            "granite-4.0-micro.json": ("F" * 40, 3.40),
        },
    ),
]
