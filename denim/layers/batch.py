"""The batch: everything that the layers need to know about one step, as tensors.

Owns the packing of spans into one row of tokens. Made by the runner from a step plan; layers read it and
nothing else: no global context. Knows the device views of pages and slots only through `memory`.

Rows that are plain decode tokens (one token that reads and writes its own slot) come first; the spans
behind them are sequences of any length, which may begin from a slot that they do not write to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Memory(Protocol):
    """The arena's storage as layers see it: strided views indexed by page id and slot id."""

    def kv(self, layer: int) -> Tensor:
        """[pages, 2, page_size, num_kv_heads, head_dim]; 2 is key, value."""
        ...

    def state(self, layer: int, role: str) -> Tensor:
        """[slots, *shape] of one tensor of a layer's state; role is "recurrent" or "conv"."""
        ...


@dataclass
class StepBatch:
    """One step of T tokens in N spans, the first `num_decode` of which are decode rows.

    positions     [T] int64, each token's place in its own sequence
    token_pages   [T] int64, the page that takes the token's KV
    token_offsets [T] int64, its place in that page
    cu_seqlens    N+1 offsets of spans into T (host)
    kv_lengths    N numbers of tokens to attend over, the span's own included (host)
    tables        N page tables, each [ceil(kv_length / page_size)] int64
    slot_in       N slots to begin from, -1 for none (host); slot_out: N slots to write (host)
    cos, sin      [T, 1, rotary_dim / 2], filled by the model
    """

    memory: Memory
    num_decode: int
    positions: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    cu_seqlens: list[int]
    kv_lengths: list[int]
    tables: list[Tensor]
    slot_in: list[int]
    slot_out: list[int]
    decode_slots: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
