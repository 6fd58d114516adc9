"""Configs as their vendors publish them, for the tests of readers and ledger."""

from __future__ import annotations

import json
from typing import Any

from denim.spec.published import FOLDER


def qwen3_5_0_8b_text() -> dict[str, Any]:
    """The text part of Qwen3.5-0.8B."""
    return qwen3_5_0_8b()["text_config"]


def qwen3_5_0_8b() -> dict[str, Any]:
    """The vision-language form, in which Qwen3.5-0.8B is published."""
    return json.loads((FOLDER / "qwen3_5_0_8b.json").read_text())


def qwen3_5_35b_a3b_text() -> dict[str, Any]:
    """The text part of Qwen3.5-35B-A3B."""
    config = qwen3_5_0_8b_text()
    del config["intermediate_size"]
    return config | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    }
