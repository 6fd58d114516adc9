"""Weights on their way into L2 before the product that reads them begins.

A kernel of a chain of small products begins with its launch and first loads and ends with sums; the memory
bus is idle for longer than the data take. So a kernel asks L2 for the weight that a later one will read, and
the bus works while programs wait for each other, add up and hand over. The kernels of such a chain also begin
before their predecessor's end, see `denim.recurrence.kernels.overlap`.

Asking is all: nothing waits for the answer, and a weight that is not there in time is read as ever. Devices
before compute capability 9.0 do not know the instruction.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ASK_L2 = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }")


@triton.jit
def fetch_ahead(ahead_ptr, lines, LINE: tl.constexpr, PER_THREAD: tl.constexpr, WARPS: tl.constexpr):
    """This program's share of the first `lines` lines of LINE bytes behind `ahead_ptr`, at most PER_THREAD a
    thread. All programs together walk through them once, a warp asking for neighbours."""
    program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    threads: tl.constexpr = 32 * WARPS
    at = tl.arange(0, PER_THREAD * threads)
    line = (at // threads * programs + program) * threads + at % threads
    elements: tl.constexpr = LINE * 8 // ahead_ptr.dtype.element_ty.primitive_bitwidth
    address = ahead_ptr + tl.minimum(line, lines - 1).to(tl.int64) * elements
    wanted = (line < lines).to(tl.int32)
    tl.inline_asm_elementwise(ASK_L2, "=r,l,r", [address, wanted], dtype=tl.int32, is_pure=False, pack=1)


# What a thread asks for at most: more would keep it from its own work.
MOST_PER_THREAD = 16


class Ahead(NamedTuple):
    """What a product asks for: the first `lines` lines of `line` bytes of a weight."""

    weight: Tensor
    lines: int
    line: int

    @classmethod
    def of(cls, weight: Tensor, most_bytes: int, line: int) -> Ahead:
        return cls(weight, min(weight.numel() * weight.element_size(), most_bytes) // line, line)

    def options(self, programs: int, warps: int) -> dict[str, int]:
        """Constants of a kernel with so many programs."""
        share = triton.cdiv(self.lines, programs * warps * 32)
        return {"LINE": self.line, "PER_THREAD": min(triton.next_power_of_2(share), MOST_PER_THREAD)}


NOTHING_AHEAD = {"LINE": 0, "PER_THREAD": 0}
