"""Weights on their way into L2 before the product that reads them begins.

A kernel of a chain of small products begins with its launch and first loads and ends with sums; the memory
bus is idle for longer than the data take. So a kernel asks L2 for the weight that a later one will read, and
the bus works while programs wait for each other, add up and hand over. The kernels of such a chain also begin
before their predecessor's end, see `denim.recurrence.kernels.overlap`.

Asking is all: nothing waits for the answer, and a weight that is not there in time is read as ever. Devices
before compute capability 9.0 do not know the instruction.
"""

from __future__ import annotations

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
