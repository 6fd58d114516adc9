"""Kimi Linear, in the published form of config and weight names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.families.row import VOCAB, Row, randomise

# Unequal wherever the family allows it: KDA's keys and values have one width. Latent attention goes over from
# the absorbed to the expanded form at 30 queries, 20 · (10 + 14) / (2 · 20 − 10 − 14).
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "num_local_experts": 6,
    "n_shared_experts": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


def oracle() -> nn.Module:
    """A random transformers model: three layers of KDA, one of latent attention; the first dense."""
    import transformers

    config = transformers.KimiLinearConfig(
        **SIZES,
        linear_head_dim=16,
        linear_num_heads=3,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    )
    return randomised(transformers.KimiLinearForCausalLM, config)


def randomised(build: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """`randomise` over an initialisation that is the same each time, and the routers' correction biases,
    which transformers keeps as buffers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "kv_a_proj" in name:
                parameter.mul_(0.02)  # latents so small that the norm's epsilon shows
    return model


def save(folder: Path) -> nn.Module:
    """The published form: `mlp` in the dense layer, linear layers by number in a section of their own."""
    model = oracle()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    assert any(name.startswith(dense) for name in weights), "transformers saves other names than it did"
    published = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in weights.items()}
    save_file(published, folder / "model.safetensors")

    config = json.loads((folder / "config.json").read_text())
    kinds = config.pop("layer_types")
    config["linear_attn_config"] = {
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
    }
    del config["mlp_layer_types"]
    config["first_k_dense_replace"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return model


ROWS = [
    Row(
        "kimi_linear",
        save,
        configs={"kimi_linear_48b_a3b.json": ("LLLF" * 6 + "LLF", 49.12)},
    )
]
