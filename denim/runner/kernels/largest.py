"""The first of the largest values of every row, in two small kernels that fill the chip at any batch size.

Owns the search alone. A row is cut into parts, one program each; a second kernel compares the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # values that a program looks at together
_PART = 8192  # values of a program, where there are rows enough to fill the chip
_PROGRAMS = 528  # wanted in all: four for each of an H200's 132 multiprocessors
_MOST_PARTS = 256  # of a row, so that one small program compares them


@triton.jit
def _of_part(logits_ptr, row_stride, best_ptr, place_ptr, vocab, part_size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    place = tl.full([block], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([block], tl.int32)
    first = part * part_size
    for at in range(first, min(first + part_size, vocab), block):
        here = at + lane
        x = tl.load(logits_ptr + row * row_stride + here, mask=here < vocab, other=float("-inf")).to(
            tl.float32
        )
        broken |= (x != x).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, here, place)
    top = tl.max(best, 0)
    place = tl.min(tl.where(best == top, place, 0x7FFFFFFF), 0)
    top = tl.where(tl.max(broken, 0) > 0, float("nan"), top)
    tl.store(best_ptr + row * tl.num_programs(1) + part, top)
    tl.store(place_ptr + row * tl.num_programs(1) + part, place)


@triton.jit
def _of_parts(best_ptr, place_ptr, tokens_ptr, parts, no_token, block: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, block)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    place = tl.load(place_ptr + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    broken = tl.max((best != best).to(tl.int32), 0) > 0
    top = tl.max(tl.where(best == best, best, float("-inf")), 0)
    place = tl.min(tl.where(best == top, place, 0x7FFFFFFF), 0)
    finite = (top > float("-inf")) & (top < float("inf")) & (not broken)
    tl.store(tokens_ptr + row, tl.where(finite, place, no_token).to(tl.int64))


def largest_of_rows(logits: Tensor, no_token: int) -> Tensor:
    """int64 [R]: where each row of `logits` [R, V], dense in V, has its first largest value.

    `no_token` for a row with a NaN or without a finite largest value.
    """
    rows, vocab = logits.shape
    wanted = max(_PROGRAMS // max(rows, 1), triton.cdiv(vocab, _PART))
    parts = min(_MOST_PARTS, wanted, triton.cdiv(vocab, _BLOCK))
    part_size = triton.cdiv(triton.cdiv(vocab, parts), _BLOCK) * _BLOCK
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    _of_part[(rows, parts)](
        logits, logits.stride(0), best, place, vocab, part_size, block=_BLOCK, num_warps=8
    )
    _of_parts[(rows,)](best, place, tokens, parts, no_token, block=triton.next_power_of_2(parts), num_warps=1)
    return tokens
