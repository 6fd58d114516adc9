"""Mamba2, with one group of B and C and with several, as Mamba-Codestral has them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.families.row import VOCAB, Row, randomise


def save(folder: Path, **changes: Any) -> nn.Module:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "num_heads": 6,
        "head_dim": 12,
        "state_size": 20,
        "n_groups": 3,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": None,
        "time_step_limit": (0.02, 2.0),
        "use_bias": True,
    }
    model = remembering(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**values | changes)))
    model.save_pretrained(folder)
    return model


def remembering(model: nn.Module) -> nn.Module:
    """Random weights, with heads that forget within a few tokens and heads that keep hundreds."""
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-6.0, 1.0, len(parameter)))
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.linspace(0.5, -0.5, len(parameter)))
    return model


one_group = partial(
    save,
    n_groups=1,
    conv_kernel=3,
    tie_word_embeddings=True,
    use_bias=False,
    use_conv_bias=False,
    residual_in_fp32=False,
    time_step_limit=(0.0, float("inf")),
)

ROWS = [
    Row(
        "mamba2",
        one_group,
        configs={
            "mamba2-130m-hf.json": ("L" * 24, 0.129),
            "mamba2-2.7b-hf.json": ("L" * 64, 2.70),
        },
    ),
    Row(
        "mamba2_groups",
        save,
        configs={"mamba-codestral-7b.json": ("L" * 64, 7.29)},
    ),
]
