"""Jamba, with experts and dense."""

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
        "intermediate_size": 20,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 7,
        "mamba_expand": 2,
        "mamba_dt_rank": 5,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
        "eos_token_id": None,
    } | changes
    model = randomise(transformers.JambaForCausalLM(transformers.JambaConfig(**values)), matrix=0.25)
    model.save_pretrained(folder)
    return model


DENSE = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
}

ROWS = [
    Row(
        "jamba",
        save,
        configs={
            "jamba-v0.1.json": ("LLLLFLLL" * 4, 51.57),
            "jamba-1.5-large.json": ("LLLLFLLL" * 9, 398.6),
        },
    ),
    Row(
        "jamba_dense",
        partial(save, **DENSE),
        configs={"jamba-reasoning-3b.json": (("L" * 7 + "F" + "L" * 6) * 2, 3.03)},
    ),
]
