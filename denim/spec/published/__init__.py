"""The `config.json` of published models, as their vendors wrote them, so that a plan needs no download.

Owns the files beside this one and the names that people know the models by. A config says nothing of weights;
what it means the readers know.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent

GROUPS: dict[str, dict[str, str]] = {
    "Qwen": {
        "Qwen3.5-0.8B": "qwen3_5_0_8b",
        "Qwen3.5-27B-FP8": "qwen3_5_27b_fp8",
        "Qwen3.5-35B-A3B": "qwen3_5_35b_a3b",
        "Qwen3.5-122B-A10B": "qwen3_5_122b_a10b",
        "Qwen3.5-397B-A17B": "qwen3_5_397b_a17b",
        "Qwen3-Next-80B-A3B": "qwen3_next_80b_a3b",
        "Qwen3-Next-80B-A3B-FP8": "qwen3_next_80b_a3b_fp8",
    },
    "Kimi, Ling": {
        "Kimi-Linear-48B-A3B": "kimi_linear_48b_a3b",
        "Ling-3.0-tiny": "ling_3.0_tiny",
        "Ling-3.0-flash": "ling_3.0_flash",
    },
    "Nemotron": {
        "Nemotron-H-8B": "nemotron-h-8b",
        "Nemotron-H-47B": "nemotron-h-47b",
        "Nemotron-H-56B": "nemotron-h-56b",
        "Nemotron-Nano-9B-v2": "nemotron-nano-9b-v2",
        "Nemotron-Nano-12B-v2": "nemotron-nano-12b-v2",
        "Nemotron-3-Nano-30B-A3B": "nemotron-3-nano-30b-a3b",
        "Nemotron-3-Super-120B-A12B": "nemotron-3-super-120b-a12b",
    },
    "Jamba": {
        "Jamba-v0.1": "jamba-v0.1",
        "Jamba-1.5-mini": "jamba-v0.1",  # the same dims
        "Jamba-1.5-large": "jamba-1.5-large",
        "Jamba-Reasoning-3B": "jamba-reasoning-3b",
    },
    "MiniMax": {
        "MiniMax-Text-01": "minimax_text_01",
        "MiniMax-M1-80k": "minimax_m1_80k",
    },
    "Bamba, Granite": {
        "Bamba-9B": "bamba-9b",
        "Granite-4.0-H-350M": "granite-4.0-h-350m",
        "Granite-4.0-H-1B": "granite-4.0-h-1b",
        "Granite-4.0-H-Micro": "granite-4.0-h-micro",
        "Granite-4.0-H-Tiny": "granite-4.0-h-tiny",
        "Granite-4.0-H-Small": "granite-4.0-h-small",
        "Granite-4.0-Micro": "granite-4.0-micro",
    },
    "Falcon": {
        "Falcon-H1-Tiny-90M": "falcon-h1-tiny-90m",
        "Falcon-H1-0.5B": "falcon-h1-0.5b",
        "Falcon-Mamba-7B": "falcon-mamba-7b",
    },
    "LFM2": {
        "LFM2-350M": "lfm2_350m",
        "LFM2-700M": "lfm2_700m",
        "LFM2-1.2B": "lfm2_1.2b",
        "LFM2-2.6B": "lfm2_2.6b",
        "LFM2.5-2.6B": "lfm2.5_2.6b",
        "LFM2-8B-A1B": "lfm2_8b_a1b",
        "LFM2.5-8B-A1B": "lfm2.5_8b_a1b",
        "LFM2-24B-A2B": "lfm2_24b_a2b",
    },
    "OLMo, Zamba": {
        "OLMo-hybrid-7B": "olmo_hybrid_7b",
        "Zamba2-1.2B": "zamba2-1.2b",
        "Zamba2-2.7B": "zamba2-2.7b",
        "Zamba2-7B": "zamba2-7b",
    },
    "Mamba": {
        "Mamba-130M": "mamba-130m-hf",
        "Mamba-2.8B": "mamba-2.8b-hf",
        "Mamba2-130M": "mamba2-130m-hf",
        "Mamba2-2.7B": "mamba2-2.7b-hf",
        "Mamba-Codestral-7B": "mamba-codestral-7b",
    },
}
"""Names by maker -> the file's name without ".json"."""


def published_configs() -> dict[str, Path]:
    """Name of a model -> its config, in the order of `GROUPS`."""
    return {name: FOLDER / f"{stem}.json" for group in GROUPS.values() for name, stem in group.items()}
