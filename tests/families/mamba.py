"""Mamba and Falcon-Mamba."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tests.families.row import VOCAB, Row, randomise


def save(folder: Path, falcon: bool = False) -> nn.Module:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "state_size": 6,
        "num_hidden_layers": 3,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": 5,
        "tie_word_embeddings": not falcon,
        "dtype": "float32",
        "eos_token_id": None,
    }
    if falcon:
        model = transformers.FalconMambaForCausalLM(
            transformers.FalconMambaConfig(**values, mixer_rms_eps=1e-3)
        )
    else:
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**values, use_bias=True))
    model = randomise(model, matrix=0.25)
    model.save_pretrained(folder)
    return model


def save_falcon(folder: Path) -> nn.Module:
    return save(folder, falcon=True)


ROWS = [
    Row(
        "mamba",
        save,
        configs={
            "mamba-130m-hf.json": ("L" * 24, 0.129),
            "mamba-2.8b-hf.json": ("L" * 64, 2.77),
        },
    ),
    Row("falcon_mamba", save_falcon, configs={"falcon-mamba-7b.json": ("L" * 64, 7.27)}),
]
