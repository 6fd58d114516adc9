"""Falcon-H1, with every multiplier, without and with the gated norm."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tests.families.row import VOCAB, Row, randomise


def save(folder: Path, **changes: Any) -> nn.Module:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "mamba_d_ssm": 36,
        "mamba_n_heads": 6,
        "mamba_d_head": 6,
        "mamba_n_groups": 3,
        "mamba_d_state": 7,
        "mamba_expand": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "embedding_multiplier": 3.5,
        "lm_head_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.7,
        "key_multiplier": 0.8,
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 1.2,
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.1, 0.7],
        "mlp_multipliers": [1.4, 0.6],
        "dtype": "float32",
        "eos_token_id": None,
    } | changes
    config = transformers.FalconH1Config(**values)
    model = randomise(transformers.FalconH1ForCausalLM(config), matrix=0.25)
    model.save_pretrained(folder)
    return model


NORMED = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_conv_bias": False,
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
}

ROWS = [
    Row(
        "falcon_h1",
        save,
        configs={
            "falcon-h1-tiny-90m.json": ("P" * 24, 0.091),
            "falcon-h1-0.5b.json": ("P" * 36, 0.521),
        },
    ),
    Row("falcon_h1_normed", partial(save, **NORMED)),
]
