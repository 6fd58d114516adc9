"""The programs of a cluster, on Hopper: how they divide tensors, and places for what they send each other.

The programs of a cluster (`num_ctas`) run at the same time and reach each other's shared memory. To Gluon
they are one program with larger tensors; `over` says how they divide one. A program opens a place in its
shared memory and says how many bytes will come; every write to it from another program (`st.async`) itself
counts at a barrier beside it. So bytes need one way between multiprocessors, no fence, and nothing in memory
that a launch could leave behind. One place a launch.

Who has all bytes knows that all others have sent theirs, and so that they have loaded whatever those depend
on. It may end then: nobody writes to it any more.

Instructions: PTX ISA, `mbarrier`, `barrier.cluster`. Gluon has no names for them in Triton 3.6.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What Triton places in shared memory lies behind a program's place, and TMA writes to whole KiB of it.
ALIGNMENT = 1024


@constexpr_function
def over(programs, dims, dim=None):
    """How a cluster divides a tensor of `dims` dimensions: along `dim`, or every program has all of it."""
    bits = programs.bit_length() - 1
    return [[2**bit if i == dim else 0 for i in range(dims)] for bit in range(bits)]


@constexpr_function
def _opening(size):
    room = -(-size // ALIGNMENT) * ALIGNMENT
    return f"""{{
        .shared .align {ALIGNMENT} .b8 cluster_place[{room + ALIGNMENT}];
        .reg .pred first;
        .reg .b32 thread;
        .reg .b64 phase;
        mov.u32 $0, cluster_place;
        add.u32 $1, $0, {room};
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$1], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 phase, [$1], {size};
        barrier.cluster.arrive.relaxed.aligned;
        }}"""


@gluon.jit
def rank():
    """Which program of its cluster this one is."""
    number: gl.constexpr = "mov.u32 $0, %cluster_ctarank;"
    return gl.inline_asm_elementwise(number, "=r", [], gl.int32, is_pure=True, pack=1)


@gluon.jit
def open_place(size: gl.constexpr):
    """A place for `size` bytes, which all programs open alike: its address in shared memory and that of its
    barrier. `meet` must follow."""
    opening: gl.constexpr = _opening(size)
    return gl.inline_asm_elementwise(opening, "=r,=r", [], (gl.int32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def meet():
    """Wait until all programs of the cluster have opened: before the first sends, and before any ends."""
    met: gl.constexpr = "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(met, "=r", [], gl.int32, is_pure=False, pack=1)
