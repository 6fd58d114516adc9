"""Sums over the programs of a cluster (`cluster`), on Hopper: a number of each warp, brought to all of them.

Every warp has a word in the place of every program: `give` writes it there; `take` waits there for all words
and adds them. One sum a launch.

Instructions: PTX ISA, `st.async`, `mapa`. Gluon has no names for them in Triton 3.6.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from denim.recurrence.kernels.cluster import open_place


@constexpr_function
def _giving(programs, warps):
    return f"""{{
        .reg .pred sends;
        .reg .b32 lane, word, there;
        mov.u32 lane, %laneid;
        setp.lt.u32 sends, lane, {programs};
        mov.u32 word, %tid.x;
        shr.u32 word, word, 5;
        mov.u32 there, %cluster_ctarank;
        mad.lo.u32 word, there, {warps}, word;
        shl.b32 word, word, 2;
        add.u32 word, word, $2;
        mapa.shared::cluster.u32 word, word, lane;
        mapa.shared::cluster.u32 there, $3, lane;
        @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [word], $1, [there];
        bar.warp.sync 0xffffffff;
        mov.u32 $0, $1;
        }}"""


@constexpr_function
def _taking(warps, addends):
    readers = addends // 4  # lanes with four words each
    text = f"""{{
        .reg .pred there;
        .reg .b32 lane, word;
        .reg .f32 a, b, c, d;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, {readers - 1};
        mov.u32 word, %tid.x;
        shr.u32 word, word, 5;
        mov.u32 $0, %cluster_ctarank;
        mad.lo.u32 word, $0, {warps}, word;
        and.b32 word, word, {-addends};
        mad.lo.u32 word, lane, 4, word;
        shl.b32 word, word, 2;
        add.u32 word, word, $2;
        waiting:
        mbarrier.try_wait.parity.shared::cta.b64 there, [$3], 0;
        @!there bra waiting;
        ld.volatile.shared.v4.f32 {{a, b, c, d}}, [word];
        add.f32 a, a, b;
        add.f32 c, c, d;
        add.f32 a, a, c;
        """
    distance = readers // 2
    while distance:
        text += f"shfl.sync.bfly.b32 b, a, {distance}, 0x1f, 0xffffffff;\nadd.f32 a, a, b;\n"
        distance //= 2
    return text + "mov.f32 $0, a;\n}"


@gluon.jit
def open_sum(programs: gl.constexpr):
    """A place for a sum over a cluster of so many programs, for `give` and `take`; see `open_place`."""
    return open_place(4 * programs * gl.num_warps())


@gluon.jit
def give(x, place, programs: gl.constexpr):
    """x: [programs x warps] fp32, one number a warp, the same in all of its lanes."""
    words, barrier = place
    giving: gl.constexpr = _giving(programs, gl.num_warps())
    gl.inline_asm_elementwise(giving, "=r,r,r,r", [x, words, barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def take(x, place, programs: gl.constexpr, sums: gl.constexpr):
    """[programs x warps] fp32: the sum of what all warps gave; with several `sums`, which divide the warps of
    the cluster into runs, of those of the warp's own run. At least 4 a run; powers of two. x: what was
    given."""
    words, barrier = place
    taking: gl.constexpr = _taking(gl.num_warps(), programs * gl.num_warps() // sums)
    return gl.inline_asm_elementwise(
        taking, "=r,r,r,r", [x, words, barrier], gl.float32, is_pure=False, pack=1
    )
