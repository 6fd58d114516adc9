"""Small random models in published form, and what is needed to run one without an engine.

Head counts and dims are all unequal, so that no layout fault can hide. Weights are large enough that
every part of a layer moves the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from denim.memory.layout import ArenaLayout
from denim.memory.storage import Storage
from denim.spec.model import ModelSpec
from tests.batches import batch_of, span_of

VOCAB = 199


def config_values(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 2, 2],
        },
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": None,
    } | changes


def oracle(*, moe: bool = False, seed: int = 0, **changes: Any) -> nn.Module:
    """A random transformers model in fp32, eval mode."""
    import transformers

    if moe:
        extra = {
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_experts": 7,
            "num_experts_per_tok": 3,
        }
        config = transformers.Qwen3_5MoeTextConfig(**config_values(**extra | changes))
        model = transformers.Qwen3_5MoeForCausalLM(config)
    else:
        config = transformers.Qwen3_5TextConfig(**config_values(**{"intermediate_size": 80} | changes))
        model = transformers.Qwen3_5ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = "norm" in name or "bias" in name
            parameter.normal_(std=0.3 if small else 0.15, generator=generator)
    return model.eval()


def checkpoint(folder: Path, *, moe: bool = False, seed: int = 0, **changes: Any) -> nn.Module:
    """Save a random model to `folder` in transformers' form; returns the model."""
    model = oracle(moe=moe, seed=seed, **changes)
    model.save_pretrained(folder)
    return model


def full_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """The oracle's logits [T, vocab] from one full forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


class Bench:
    """One sequence on pages and slots of its own, poisoned before use: the model without an engine."""

    def __init__(self, model: nn.Module, spec: ModelSpec, page_size: int = 16, num_slabs: int = 40):
        self.model = model
        self.device = str(next(model.parameters()).device)
        layout = ArenaLayout.of(spec, page_size)
        self.storage = Storage(layout, num_slabs, self.device, debug_poison=True)
        self.page_size = page_size

    def run(self, tokens: list[int], start: int, end: int, slot_in: int, slot_out: int) -> Tensor:
        """Logits [end - start, vocab] of tokens[start:end] after slot_in's state; writes slot_out."""
        layout = self.storage.layout
        first_page = layout.size_class("page").count * 4 if layout.has("page") else 0
        pages = range(first_page, first_page + -(-end // self.page_size)) if layout.has("page") else ()
        span = span_of(start, end, slot_in, slot_out, pages)
        batch = batch_of([span], self.storage, page_size=self.page_size, device=self.device)
        return self.model.logits(self.model(torch.tensor(tokens[start:end], device=self.device), batch)).cpu()
