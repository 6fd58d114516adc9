"""Which tokens chose which expert, sorted by expert, on CUDA and without asking the device.

Owns the order that the experts' product works through. A sort is several launches; a few pairs are placed by
one, in which every pair is compared with every other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs up to which all are compared with all, and pairs of a program.
COMPARED_PAIRS = 1024
COMPARED_BLOCK = 16


class Choices(NamedTuple):
    """Who chose whom: P = T · top_k pairs (token, choice), numbered token by token.

    order   [P] int64, pairs sorted by expert, those of one expert in the order of their tokens
    starts  [E + 1] int64, place in `order` of each expert's first pair
    top_k   choices of a token
    """

    order: Tensor
    starts: Tensor
    top_k: int


@triton.jit
def _compare(chosen_ptr, order_ptr, starts_ptr, pairs, experts, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """A pair's place is the number of those before it: of lower experts, and of its own by earlier tokens."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    others = tl.arange(0, PAIRS)
    expert = tl.load(chosen_ptr + mine, mask=mine < pairs, other=experts)[:, None]
    other = tl.load(chosen_ptr + others, mask=others < pairs, other=experts)[None, :]
    before = (other < expert) | ((other == expert) & (others[None, :] < mine[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), mine, mask=mine < pairs)
    tl.store(starts_ptr + mine, tl.sum((other < mine[:, None]).to(tl.int32), 1), mask=mine <= experts)


def sort_choices(chosen: Tensor, num_experts: int) -> Choices:
    """chosen: [T, top_k] expert ids, int64."""
    pairs = chosen.numel()
    if pairs > COMPARED_PAIRS:
        sorted_ids, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=chosen.device))
        return Choices(order, starts, chosen.shape[1])
    order = torch.empty(pairs, dtype=torch.int64, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int64, device=chosen.device)
    _compare[(triton.cdiv(max(pairs, num_experts + 1), COMPARED_BLOCK),)](
        chosen.contiguous(),
        order,
        starts,
        pairs,
        num_experts,
        PAIRS=triton.next_power_of_2(pairs),
        BLOCK=COMPARED_BLOCK,
    )
    return Choices(order, starts, chosen.shape[1])
