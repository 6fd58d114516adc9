"""The model folder: config, generation defaults and weights of denim-tiny, as transformers reads them.

Owns the shape of denim-tiny and the files. Knows nothing of how the weights came about.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.model import Model

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 6144,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GENERATION = {
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
}


def save(model: Model, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model of a folder that `save` wrote; weights in fp32."""
    model = Model(json.loads((folder / "config.json").read_text()), dtype)
    model.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    return model
