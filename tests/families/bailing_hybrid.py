"""Ling-3.0, with the config as published: no keys of transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from tests.families.kimi_linear import SIZES, randomised
from tests.families.row import Row

# What transformers derives, writes beside the published keys, and reads back from them.
DERIVED = (
    "layer_types",
    "mlp_layer_types",
    "linear_head_dim",
    "linear_num_heads",
    "linear_conv_kernel_dim",
)
KDA_DIM = 16


def oracle() -> nn.Module:
    """A random transformers model: KDA, KDA, latent attention, twice; the first two layers dense."""
    import transformers

    config = transformers.BailingHybridConfig(
        **SIZES | {"num_hidden_layers": 6}, head_dim=KDA_DIM, layer_group_size=3, q_lora_rank=12
    )
    return randomised(transformers.BailingHybridForCausalLM, config)


def save(folder: Path) -> nn.Module:
    model = oracle()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in DERIVED:
        del config[key]
    config["head_dim"] = KDA_DIM  # transformers has written the width of the turned keys over it
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    return model


ROWS = [
    Row(
        "bailing_hybrid",
        save,
        configs={
            "ling_3.0_tiny.json": ("LLLF" * 6, 7.9),
            "ling_3.0_flash.json": ("LLLLLF" * 7, 124.0),
        },
    )
]
