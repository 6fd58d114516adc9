"""OLMo-hybrid: β in (0, 2), three convolutions, norms in front of linear layers and behind attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tests.families.row import Row, randomise
from tests.tiny import VOCAB


def save(folder: Path, **changes: Any) -> nn.Module:
    """What transformers writes; tests/models/test_olmo_hybrid.py renames it to the published form."""
    import transformers

    values = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "max_position_embeddings": 4096,
        "rope_theta": None,
        "dtype": "float32",
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = randomise(transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**values | changes)))
    model.save_pretrained(folder)
    return model


ROWS = [
    Row("olmo_hybrid", save, configs={"olmo_hybrid_7b.json": ("LLLF" * 8, 7.4)}),
    Row("olmo_hybrid_rope", partial(save, rope_theta=10000.0, linear_allow_neg_eigval=False)),
]
