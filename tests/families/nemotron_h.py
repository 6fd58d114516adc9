"""Nemotron-H: dense networks, and experts with and without a latent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.families.mamba2 import remembering
from tests.families.row import VOCAB, Row


def save(folder: Path, **changes: Any) -> nn.Module:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
        "intermediate_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 14,
        "ssm_state_size": 20,
        "n_groups": 3,
        "time_step_min": 0.4,  # above some of the steps that come, so that the clamp shows
        "max_position_embeddings": 4096,
        "dtype": "float32",
        "eos_token_id": None,
    }
    config = transformers.NemotronHConfig(**values | changes)
    model = remembering(transformers.NemotronHForCausalLM(config))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    model.save_pretrained(folder)
    return model


sparse = partial(
    save,
    layers_block_type=["mamba", "moe", "attention", "moe", "mamba", "moe"],
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    moe_shared_expert_intermediate_size=28,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
    use_bias=True,
)


def letters(pattern: str) -> str:
    """Denim's letters for the publisher's."""
    return pattern.translate(str.maketrans("M*E-", "LF--"))


PATTERNS = {
    "nemotron-h-8b": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "nemotron-h-47b": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
    "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
    "nemotron-h-56b": "M-M-M-M" + "*-M-M-M-M-M" * 10 + "-",
    "nemotron-nano-9b-v2": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "nemotron-nano-12b-v2": "M-M-M-M" + "*-M-M-M-M" * 6 + "-",
    "nemotron-3-nano-30b-a3b": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "nemotron-3-super-120b-a12b": "MEMEMEM*EMEMEMEM*EMEMEMEM" + "*EMEMEMEMEM" * 4 + "*EMEMEMEM*EMEMEMEME",
}
BILLIONS = {
    "nemotron-h-8b": 8.10,
    "nemotron-h-47b": 46.8,
    "nemotron-h-56b": 56.4,
    "nemotron-nano-9b-v2": 8.89,
    "nemotron-nano-12b-v2": 12.3,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-super-120b-a12b": 120.7,
}
CONFIGS = {f"{name}.json": (letters(PATTERNS[name]), billions) for name, billions in BILLIONS.items()}


def those(sparse: bool) -> dict[str, tuple[str, float]]:
    return {file: values for file, values in CONFIGS.items() if ("-3-" in file) == sparse}


ROWS = [
    Row("nemotron_h", save, configs=those(sparse=False)),
    Row("nemotron_h_moe", sparse, configs=those(sparse=True)),
    Row("nemotron_h_latent_moe", partial(sparse, moe_latent_size=24, n_group=1, norm_topk_prob=False)),
]
