"""What an engine is, in plain values that travel between processes.

Owns the list of facts that stay the same while the engine runs. Knows nothing of how they came about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineFacts:
    """model: the folder's name. max_model_len: tokens of prompt and output. The values are those in force,
    after clamping and rounding.
    """

    model: str
    device: str
    dtype: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    chunk_size: int
    checkpoint_policy: str
    strip_lines: tuple[str, ...]
    weight_bytes: int
    arena_bytes: int
    slot_bytes: int
    page_bytes: int
