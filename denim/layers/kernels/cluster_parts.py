"""Sums of a tile whose parts lie with the programs of a cluster (`denim.recurrence.kernels.cluster`).

Every program has the whole tile, summed over its own part of K, and ends up with the sums of some of its
columns: each sends the others theirs, two fp32 numbers at a time, and adds what it received, always in the
same order.

Instructions: PTX ISA, `st.async`, `mapa`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_SENDING = gl.constexpr("""{
    .reg .b32 there, gate;
    mapa.shared::cluster.u32 there, $4, $6;
    mapa.shared::cluster.u32 gate, $8, $6;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {$2, $3}, [gate];
    mov.u32 $0, 0;
    mov.u32 $1, 0;
    }""")
_WAITING = gl.constexpr("""{
    .reg .pred there;
    waiting:
    mbarrier.try_wait.parity.shared::cta.b64 there, [$1], 0;
    @!there bra waiting;
    mov.u32 $0, $1;
    }""")
_READING = gl.constexpr("ld.volatile.shared.f32 $0, [$1];")


@gluon.jit
def send(x, address, program, barrier):
    """Send x, fp32, to where each of its numbers has its place: at `address` in the shared memory of
    `program`, to be counted at its `barrier`, all int32 of x's shape and layout. A thread has two numbers
    beside each other in x's last dimension, and their places are beside each other too."""
    gl.inline_asm_elementwise(
        _SENDING, "=r,=r,f,f,r,r,r,r,r,r", [x, address, program, barrier], gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def wait_for_all(barrier):
    """Wait until all bytes are there that the place of `barrier` was opened for."""
    gl.inline_asm_elementwise(_WAITING, "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_of(address, parts: gl.constexpr, distance: gl.constexpr):
    """The sums of `parts` fp32 numbers for each address, so many bytes from each other."""
    total = gl.inline_asm_elementwise(_READING, "=f,r", [address], gl.float32, is_pure=False, pack=1)
    for i in gl.static_range(1, parts):
        at = address + i * distance
        total += gl.inline_asm_elementwise(_READING, "=f,r", [at], gl.float32, is_pure=False, pack=1)
    return total
