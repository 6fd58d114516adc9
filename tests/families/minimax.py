"""MiniMax: as transformers saves it, and as the vendor published it (other keys, partial RoPE)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.families.row import VOCAB, Row, randomise

HEAD_DIM = 24
ROTARY_DIM = 16
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
FACTORS = {
    "linear_attn_alpha_factor": 1.7,
    "linear_attn_beta_factor": 0.8,
    "full_attn_alpha_factor": 1.4,
    "full_attn_beta_factor": 1.2,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.9,
}


def save(folder: Path) -> nn.Module:
    model = oracle()
    model.save_pretrained(folder)
    return model


def oracle() -> nn.Module:
    import transformers

    config = transformers.MiniMaxConfig(
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=36,
        num_hidden_layers=len(KINDS),
        layer_types=KINDS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_local_experts=5,
        num_experts_per_tok=2,
        block_size=48,
        tie_word_embeddings=False,
        dtype="float32",
        eos_token_id=None,
        **FACTORS,
    )
    model = randomise(transformers.MiniMaxForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv_proj" in name:
                parameter.mul_(0.2)  # outputs of lightning attention so small that the norm's epsilon shows
    return model


def save_published(folder: Path) -> nn.Module:
    """The vendor's config, with weights such that the oracle computes what they mean.

    transformers turns whole heads, pairing entry i with i + 12. Leading 16 entries, paired i with i + 8, are
    the same up to the order of a head's entries, which scores do not see, with frequency 0 for the rest.
    """
    model = oracle()
    half = ROTARY_DIM // 2
    turned = 10000.0 ** (-torch.arange(half) / half)
    model.model.rotary_emb.inv_freq = torch.cat((turned, torch.zeros((HEAD_DIM - ROTARY_DIM) // 2)))
    rest = range(ROTARY_DIM, HEAD_DIM)
    order = [*range(half), *rest[: len(rest) // 2], *range(half, ROTARY_DIM), *rest[len(rest) // 2 :]]

    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    derived = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(derived)}
    for name, tensor in weights.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            weights[name] = _put(tensor, order)
    save_file(weights, file, {"format": "pt"})

    values = json.loads((folder / "config.json").read_text())
    for key in FACTORS:
        part, which, _ = key.rsplit("_", 2)
        vendors = {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}[part]
        values[f"layernorm_{vendors}_{which}"] = values.pop(key)
    types = values.pop("layer_types")
    values |= {
        "model_type": "minimax_text_01",
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [int(kind == "full_attention") for kind in types],
        "rope_theta": values.pop("rope_parameters")["rope_theta"],
        "rotary_dim": ROTARY_DIM,
        "postnorm": True,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
    }
    del values["block_size"]
    (folder / "config.json").write_text(json.dumps(values))
    return model


def _put(weight: Tensor, order: list[int]) -> Tensor:
    """Rows of each head moved from place j to place order[j]."""
    heads = weight.unflatten(0, (-1, HEAD_DIM))
    moved = torch.empty_like(heads)
    moved[:, order] = heads
    return moved.flatten(0, 1)


def cache_bytes(model: nn.Module, tokens: list[int]) -> tuple[int, int, int]:
    """From transformers' own cache for this family."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    cache = MiniMaxCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), cache=cache)
    kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
    return kv, sum(state.nbytes for state in cache.linear_cache if len(state)), 0


ROWS = [
    Row(
        "minimax",
        save,
        reference_bytes=cache_bytes,
        configs={"minimax_text_01_hf.json": ("LLLLLLLF" * 10, 456.1)},
    ),
    Row(
        "minimax_text_01",
        save_published,
        reference_bytes=cache_bytes,
        configs={
            "minimax_text_01.json": ("LLLLLLLF" * 10, 456.1),
            "minimax_m1_80k.json": ("LLLLLLLF" * 10, 456.1),
        },
    ),
]
