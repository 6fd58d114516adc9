"""Zamba2, with two shared blocks, adapters and RoPE, and with one block and neither."""

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
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "num_attention_heads": 6,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 5,
        "mamba_d_state": 7,
        "mamba_expand": 2,
        "mamba_ngroups": 3,
        "n_mamba_heads": 6,
        # Large enough for Δ to meet it: the least step is part of the model.
        "time_step_min": 0.3,
        "max_position_embeddings": 4096,
        "dtype": "float32",
        "eos_token_id": None,
    } | changes
    model = randomise(transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**values)), matrix=0.15)
    model.save_pretrained(folder)
    return model


PLAIN = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_mem_blocks": 1,
    "num_key_value_heads": 2,
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
}


def pattern(layers: int, hybrid: list[int]) -> str:
    return "".join("P" if i in hybrid else "L" for i in range(layers))


ROWS = [
    Row(
        "zamba2",
        save,
        configs={
            "zamba2-1.2b.json": (pattern(38, [5, 11, 17, 23, 29, 35]), 1.215),
            "zamba2-2.7b.json": (pattern(54, [6, 12, 18, 24, 30, 36, 42, 47, 51]), 2.66),
            "zamba2-7b.json": (
                pattern(81, [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77]),
                7.36,
            ),
        },
    ),
    Row("zamba2_plain", partial(save, **PLAIN)),
]
