"""(I + A)^-1 of a chunk of 64 tokens on Hopper, A strictly lower triangular, and blocks on the diagonal.

The inverse grows by diagonal blocks of twice the size (`denim.recurrence.kernels.triangular`). Blocks of 16
rows belong to one warp each and are inverted in its registers; the last two steps multiply A as a whole and
take the wanted blocks out of the product, since the inverse has nothing outside its own blocks yet. Knows
tensor cores; must not know what A is made of.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from denim.recurrence.kernels.program_barrier import barrier

SIZE = gl.constexpr(64)  # tokens of a chunk: the height of wgmma
BLOCK = gl.constexpr(16)  # of them for a warp
BLOCKS = gl.constexpr(4)
# Layouts of four warps: of [64, 64] as wgmma leaves it, of [4, 16, 16] as one block for each warp.
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
NEAR = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
NEAR_LEFT = gl.constexpr(gl.DotOperandLayout(0, NEAR.value, 2))
NEAR_RIGHT = gl.constexpr(gl.DotOperandLayout(1, NEAR.value, 2))


def matrix(x: Tensor) -> TensorDescriptor:
    """A matrix as TMA sees it, in tiles of 64 rows of 128 bytes."""
    tile = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [SIZE.value, 64], tile)


@gluon.jit
def where_equal(a, b, x):
    """x where a = b, else 0. As one piece, which the compiler cannot move behind the conversion to 16 bits:
    that converts two numbers at once only while they are side by side."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, $2; selp.f32 $0, $3, 0f00000000, p; }",
        "=f,r,r,f",
        [a, b, x],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def turned(x):
    """[4, 16, 16 n] transposed, as a right operand: a warp's registers hold of it what they hold of x."""
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), NEAR_RIGHT, assert_trivial=True)


@gluon.jit
def near_places():
    """(row, column) of [4, 16, 16]: [1, 16, 1], [1, 1, 16]."""
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, NEAR)))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, NEAR)))
    return row[None, :, None], column[None, None, :]


@gluon.jit
def near_of(x):
    """The diagonal blocks [4, 16, 16] of [64, 64]."""
    squares = gl.reshape(x, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    spread: gl.constexpr = squares.type.layout
    own = _own_block(spread)
    return gl.convert_layout(gl.sum(gl.where(own, squares, 0.0), 2), NEAR, assert_trivial=True)


@gluon.jit
def on_diagonal(x):
    """[4, 16, 16] as the diagonal blocks of [64, 64], zeros elsewhere."""
    zeros = gl.zeros([SIZE, SIZE], gl.float32, layout=SQUARE)
    spread: gl.constexpr = gl.reshape(zeros, [BLOCKS, BLOCK, BLOCKS, BLOCK]).type.layout
    x = gl.convert_layout(x, gl.SliceLayout(2, spread), assert_trivial=True)
    whole = gl.where(_own_block(spread), x[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(whole, [SIZE, SIZE]), SQUARE, assert_trivial=True)


@gluon.jit
def _own_block(spread: gl.constexpr):
    of_row = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, spread))))
    of_column = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, spread))))
    return of_row[:, None, None, None] == of_column[None, None, :, None]


@gluon.jit
def _near_inverse(near, beta):
    """The inverses [4, 16, 16] of the diagonal blocks of I + A, each in one warp.

    near: A's, before beta, and their transposes above the diagonal; beta: [64], of A's columns. The
    products of a level need T and A as left and as right operands. What a warp holds of a matrix as a result
    is what it needs of it as a left operand, and of its transpose as a right one: so T and T^T are carried on
    together, and nothing goes from thread to thread.
    """
    row, column = near_places()
    beta = gl.reshape(beta, [BLOCKS, BLOCK])
    lower = -near * gl.convert_layout(beta, gl.SliceLayout(1, NEAR))[:, None, :]
    upper = -near * gl.convert_layout(beta, gl.SliceLayout(2, NEAR))[:, :, None]
    lower = gl.where(row > column, lower, 0.0)
    upper = gl.where(row < column, upper, 0.0)
    one = gl.where(row == column, 1.0, 0.0)
    inverse = one + gl.where((row ^ column) == 1, lower, 0.0)
    inverse_turned = one + gl.where((row ^ column) == 1, upper, 0.0)
    zero = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, layout=NEAR)
    upper = upper.to(gl.float16)
    for level in gl.static_range(1, 4):
        beside = ((row ^ column) >> level) == 1
        now = inverse.to(gl.float16)
        now_turned = inverse_turned.to(gl.float16)
        product = mma_v2(gl.convert_layout(now, NEAR_LEFT), turned(upper), zero)
        product_turned = mma_v2(gl.convert_layout(upper, NEAR_LEFT), turned(now), zero)
        product = gl.where(beside, product, 0.0).to(gl.float16)
        product_turned = gl.where(beside, product_turned, 0.0).to(gl.float16)
        inverse = mma_v2(gl.convert_layout(product, NEAR_LEFT), turned(now_turned), inverse)
        inverse_turned = mma_v2(gl.convert_layout(now_turned, NEAR_LEFT), turned(product), inverse_turned)
    return inverse


@gluon.jit
def inverse_of_unit_lower(near, beta, work):
    """(I + A)^-1, [64, 64]. near: [4, 16, 16], A's diagonal blocks before beta, and their transposes above
    the diagonal; beta: [64], of A's columns; work: [2, 64, 64] fp16 in shared memory, the first -A, of
    which nothing is taken but what lies below the diagonal blocks, visible to all threads and to wgmma."""
    left: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, SQUARE))[:, None]
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, SQUARE))[None, :]
    zero = gl.zeros([SIZE, SIZE], gl.float32, layout=SQUARE)
    inverse = on_diagonal(_near_inverse(near, beta))
    for level in gl.static_range(4, 6):
        work.index(1).store(inverse.to(gl.float16))
        fence_async_shared()
        barrier()
        product = warpgroup_mma(work.index(1), work.index(0), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        beside = where_equal((row >> level) ^ 1, column >> level, product).to(gl.float16)
        inverse = warpgroup_mma(gl.convert_layout(beside, left), work.index(1), inverse, is_async=True)
        inverse = warpgroup_mma_wait(0, deps=(inverse,))
        barrier()
    return inverse
