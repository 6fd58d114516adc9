"""Token ids of a captured step, some of which only the device knows yet, and where their KV goes in a page.

Owns the one small kernel at the head of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _inputs(
    tokens_ptr,
    sources_ptr,
    positions_ptr,
    drawn_ptr,
    ids_ptr,
    offsets_ptr,
    count,
    page_size,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    token = tl.load(tokens_ptr + at, mask=mask, other=0)
    source = tl.load(sources_ptr + at, mask=mask, other=-1)
    drawn = tl.load(drawn_ptr + source, mask=mask & (source >= 0), other=0)
    # A row without an answer drew a negative token; its request has failed, whatever comes of it here.
    token = tl.where(source >= 0, tl.maximum(drawn, 0), token)
    tl.store(ids_ptr + at, token, mask=mask)
    position = tl.load(positions_ptr + at, mask=mask, other=0)
    tl.store(offsets_ptr + at, position % page_size, mask=mask)


def inputs_of(
    tokens: Tensor, sources: Tensor, positions: Tensor, drawn: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Token ids and places in a page, both int64 [T]. tokens, sources, positions: int64 [T]; where a source
    is not negative, the token is `drawn[source]`."""
    ids, offsets = torch.empty_like(tokens), torch.empty_like(tokens)
    count = len(tokens)
    _inputs[(triton.cdiv(count, _BLOCK),)](
        tokens, sources, positions, drawn, ids, offsets, count, page_size, block=_BLOCK
    )
    return ids, offsets
