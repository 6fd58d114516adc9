"""How kernels that follow one another keep the memory bus busy in between.

In a chain of small kernels each begins with launch and first loads, and ends with sums: the bus is idle for
longer than the data take. Two things help on devices that can (compute capability 9.0, Hopper, and later):

* a kernel is launched while its predecessor still runs (programmatic dependent launch), loads what no kernel
  in flight writes, weights above all, and waits for its predecessor before anything else: `gdc_wait`;
* a kernel asks L2 for the weight that a later product will read (`fetch_ahead`), so that the bus works while
  programs wait, add up and hand over.

A kernel launched this way must wait before it writes or reads anything but weights: then all kernels before
it have ended. Weights must not be written by a kernel right before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Bytes that one thread asks for at once.
PIECE_BYTES = tl.constexpr(4096)
ASK_L2 = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0; }"
)


@triton.jit
def fetch_ahead(ahead_ptr, pieces, WARPS: tl.constexpr):
    """This program's share of the first `pieces` pieces behind `ahead_ptr`, at most one a thread.

    A warp asks for its threads' pieces one after another, so they are dealt out to one warp after another.
    """
    program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    thread = tl.arange(0, 32 * WARPS)
    piece = (thread % 32 * WARPS + thread // 32) * programs + program
    elements: tl.constexpr = PIECE_BYTES * 8 // ahead_ptr.dtype.element_ty.primitive_bitwidth
    address = ahead_ptr + tl.minimum(piece, pieces - 1).to(tl.int64) * elements
    wanted = (piece < pieces).to(tl.int32)
    tl.inline_asm_elementwise(ASK_L2, "=r,l,r", [address, wanted], dtype=tl.int32, is_pure=False, pack=1)


def pieces_of(ahead: torch.Tensor, most_bytes: int) -> int:
    """Pieces of the first `most_bytes` bytes of `ahead`, the last incomplete one left out."""
    return min(ahead.numel() * ahead.element_size(), most_bytes) // PIECE_BYTES.value


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` may begin before their predecessor's end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(overlap: bool) -> dict[str, Any]:
    """What a kernel that waits is launched with; Triton on other devices does not know the option."""
    return {"launch_pdl": True} if overlap else {}
