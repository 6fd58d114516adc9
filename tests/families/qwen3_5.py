"""Qwen3.5, dense and MoE."""

from __future__ import annotations

from functools import partial

from tests.families.row import Row
from tests.tiny import checkpoint

ROWS = [Row("qwen3_5", checkpoint), Row("qwen3_5_moe", partial(checkpoint, moe=True))]
