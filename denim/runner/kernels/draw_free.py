"""A draw without filters, in the order of ids, in two small kernels that fill the chip at any batch size.

Owns the search alone; the definition is `denim.runner.draw.draw`, and weights are the same integers. A row is
cut into parts, one program each, which sum their weights; a second kernel finds the part and the place in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.runner.kernels.draw_filtered import scaled, weight

_BLOCK = 2048  # values of a part


@triton.jit
def _of_part(
    logits_ptr, row_stride, rows_ptr, best_ptr, temperature_ptr, sums_ptr, vocab, unit, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + program)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + program)
    top = scaled(row_ptr, tl.maximum(tl.load(best_ptr + row), 0), vocab, temperature)
    x = scaled(row_ptr, part * block + tl.arange(0, block), vocab, temperature)
    tl.store(sums_ptr + program * tl.num_programs(1) + part, tl.sum(weight(x - top, unit, None), 0))


@triton.jit
def _of_row(
    logits_ptr,
    row_stride,
    rows_ptr,
    best_ptr,
    temperature_ptr,
    uniform_ptr,
    sums_ptr,
    tokens_ptr,
    vocab,
    unit,
    parts,
    most_parts: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + program)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + program)
    best = tl.load(best_ptr + row)
    top = scaled(row_ptr, tl.maximum(best, 0), vocab, temperature)
    lane = tl.arange(0, most_parts)
    sums = tl.load(sums_ptr + program * parts + lane, mask=lane < parts, other=0)
    total = tl.sum(sums, 0)
    target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    # The first part with which the sum passes the target, and the first place in it.
    passed = tl.cumsum(sums, 0) <= target
    part = tl.minimum(tl.sum(passed.to(tl.int32), 0), parts - 1)
    target -= tl.sum(tl.where(lane < part, sums, 0), 0)
    x = scaled(row_ptr, part * block + tl.arange(0, block), vocab, temperature)
    place = tl.sum((tl.cumsum(weight(x - top, unit, None), 0) <= target).to(tl.int32), 0)
    token = tl.minimum(part * block + place, vocab - 1).to(tl.int64)
    tl.store(tokens_ptr + program, tl.where(best < 0, best, token))


def draw_free_rows(
    logits: Tensor, rows: Tensor, best: Tensor, temperature: Tensor, uniforms: Tensor, unit: float
) -> Tensor:
    """Tokens int64 [N] of the `rows` int64 [N] of `logits` [R, V] float32, bfloat16 or float16, dense in V;
    see `denim.runner.draw.draw`.

    best int64 [R]: where each row has its largest logit; a row for which it is negative gets it as its token.
    temperature [N] float32, uniforms [R] float64, both dense. `unit`: the weight of the largest logit, so
    that V of them sum to less than 2^62.
    """
    count, vocab = len(rows), logits.shape[1]
    assert logits.stride(1) == 1
    parts = triton.cdiv(vocab, _BLOCK)
    sums = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    given = logits, logits.stride(0), rows, best, temperature
    _of_part[(count, parts)](*given, sums, vocab, unit, block=_BLOCK)
    _of_row[(count,)](
        *given, uniforms, sums, tokens, vocab, unit, parts, triton.next_power_of_2(parts), block=_BLOCK
    )
    return tokens
