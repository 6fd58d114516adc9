"""Multiplying states where they lie in slots, in any order: the practical floor of a decode step on slots.

Owns a kernel that does nothing else. In order it takes what `clock.in_place_multiply` does; in no order it
takes longer, since written memory then lies in more places at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bench.rules.clock import microseconds

PIECE = 512  # numbers of a program of one warp: the fastest of what was tried on an H200


@triton.jit
def _multiply(slots_ptr, state_ptr, state_stride, piece: tl.constexpr):
    slot = tl.load(slots_ptr + tl.program_id(1))
    at = state_ptr + slot * state_stride + tl.program_id(0) * piece + tl.arange(0, piece)
    tl.store(at, tl.load(at) * 1.0, cache_modifier=".cs")


def slot_multiply(states: Tensor, slots: Tensor) -> float:
    """Microseconds of one pass over B states. slots: [sets, B] int64; states: [slots, ...] fp32, each dense
    and of a multiple of `PIECE` numbers."""
    pieces = states[0].numel() // PIECE

    def work(i: int) -> None:
        grid = (pieces, slots.shape[1])
        _multiply[grid](slots[i], states, states.stride(0), piece=PIECE, num_warps=1)

    return microseconds(work, len(slots))
