"""Qwen3.5, dense and MoE; published inside a vision-language wrapper, of which the text part is served."""

from __future__ import annotations

from functools import partial

from tests.families.row import Row
from tests.tiny import checkpoint

ROWS = [
    Row("qwen3_5", checkpoint, configs={"qwen3_5_27b_fp8.json": ("LLLF" * 16, 27.3)}),
    Row(
        "qwen3_5_moe",
        partial(checkpoint, moe=True),
        configs={
            "qwen3_5_35b_a3b.json": ("LLLF" * 10, 35.5),
            "qwen3_5_122b_a10b.json": ("LLLF" * 12, 124.6),
            "qwen3_5_397b_a17b.json": ("LLLF" * 15, 402.9),
        },
    ),
]
