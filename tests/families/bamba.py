"""Bamba."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tests.families.mamba2 import remembering
from tests.families.row import VOCAB, Row


def save(folder: Path) -> nn.Module:
    import transformers

    config = transformers.BambaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1, 3],
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=3,
        mamba_d_state=20,
        mamba_proj_bias=True,
        time_step_limit=(0.02, 2.0),
        max_position_embeddings=4096,
        dtype="float32",
        eos_token_id=None,
    )
    model = remembering(transformers.BambaForCausalLM(config))
    model.save_pretrained(folder)
    return model


def full_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """With positions: the model counts from zero in every call that has none."""
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        return model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0].float()


ATTENTION = {9, 18, 27}
ROWS = [
    Row(
        "bamba",
        save,
        full_logits=full_logits,
        configs={"bamba-9b.json": ("".join("F" if i in ATTENTION else "L" for i in range(32)), 9.78)},
    )
]
