"""The matrices inside the chunks of a gated delta rule on Hopper: gates, T = (I + A)^-1 diag(beta), scores.

Owns the kernel; it makes what `gated_delta_chunks` makes elsewhere, for heads of 128, chunks of 64 tokens and
16-bit rows. A program takes one chunk of one head: TMA brings q and k while the gates are made, and every
product is one of 64 x 64 by wgmma. Four programs share a multiprocessor, so that one computes while another
waits.

The inverse grows by diagonal blocks of twice the size (`denim.recurrence.kernels.triangular`). Blocks of 16
rows belong to one warp each and are inverted in its registers; the last two steps multiply A as a whole and
take the wanted blocks out of the product, since the inverse has nothing outside its own blocks yet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from denim.recurrence.kernels.delta_walk import TABLE

SIZE = gl.constexpr(64)  # tokens of a chunk: the height of wgmma
DIM = gl.constexpr(128)  # d_k and d_v
LOG2_E = gl.constexpr(1.4426950408889634)
LINEAR = gl.constexpr(20.0)  # above it softplus(x) = x in fp32

# The barrier of a program's warps has another name in Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _where_equal(a, b, x):
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
def _turned(x, right: gl.constexpr):
    """x^T as a right operand: a warp's registers hold of it what they hold of x."""
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), right, assert_trivial=True)


@gluon.jit
def _diagonal_inverse(alike, since, beta, square: gl.constexpr):
    """The inverses of the diagonal blocks of 16 rows of I + A, [64, 64], zeros elsewhere; each in one warp.

    alike: k k^T; since, beta: [64]. The products of a level need T and A as left and as right operands. What
    a warp holds of a matrix as a result is what it needs of it as a left operand, and of its transpose as a
    right one: so T and T^T are carried on together, and nothing goes from thread to thread.
    """
    blocks: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, blocks, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, blocks, 2)
    squares = gl.reshape(alike, [4, 16, 4, 16])
    spread: gl.constexpr = squares.type.layout
    of_row = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, spread))))
    of_column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, spread))))
    own = of_row[:, None, None, None] == of_column[None, None, :, None]
    alike = gl.convert_layout(gl.sum(gl.where(own, squares, 0.0), 2), blocks, assert_trivial=True)
    since_row = gl.convert_layout(gl.reshape(since, [4, 16]), gl.SliceLayout(2, blocks))[:, :, None]
    since_column = gl.convert_layout(gl.reshape(since, [4, 16]), gl.SliceLayout(1, blocks))[:, None, :]
    beta_row = gl.convert_layout(gl.reshape(beta, [4, 16]), gl.SliceLayout(2, blocks))[:, :, None]
    beta_column = gl.convert_layout(gl.reshape(beta, [4, 16]), gl.SliceLayout(1, blocks))[:, None, :]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, blocks)))[None, :, None]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks)))[None, None, :]
    decay = gl.exp2(-gl.abs(since_row - since_column))
    lower = gl.where(row > column, -alike * beta_row * decay, 0.0)
    upper = gl.where(row < column, -alike * beta_column * decay, 0.0)
    one = gl.where(row == column, 1.0, 0.0)
    inverse = one + gl.where((row ^ column) == 1, lower, 0.0)
    turned = one + gl.where((row ^ column) == 1, upper, 0.0)
    zero = gl.zeros([4, 16, 16], gl.float32, layout=blocks)
    lower = lower.to(gl.float16)
    upper = upper.to(gl.float16)
    for level in gl.static_range(1, 4):
        beside = ((row ^ column) >> level) == 1
        now = inverse.to(gl.float16)
        now_turned = turned.to(gl.float16)
        product = mma_v2(gl.convert_layout(now, left), _turned(upper, right), zero)
        product_turned = mma_v2(gl.convert_layout(upper, left), _turned(now, right), zero)
        product = gl.where(beside, product, 0.0).to(gl.float16)
        product_turned = gl.where(beside, product_turned, 0.0).to(gl.float16)
        inverse = mma_v2(gl.convert_layout(product, left), _turned(now_turned, right), inverse)
        turned = mma_v2(gl.convert_layout(now_turned, left), _turned(product, right), turned)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, spread), assert_trivial=True)
    whole = gl.where(own, inverse[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(whole, [64, 64]), square, assert_trivial=True)


@gluon.jit(do_not_specialize_on_alignment=TABLE)
def chunk_matrices(
    rows_desc,
    solve_desc,
    scores_desc,
    a_ptr,
    b_ptr,
    gate_stride,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    since_ptr,
    until_ptr,
    scale,
    beta_limit,
    least,
    heads: gl.constexpr,
    key_heads: gl.constexpr,
):
    """rows: [T, channels]; solve, scores: [chunks * heads * 64, 64], all three in tiles of 64 x 64; since,
    until: e^{G_t} and e^{G_C - G_t}, [chunks, heads, 64]."""
    # The last chunks first: the walk begins with the first ones, which then are still in the cache.
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    chunk = place // heads
    head = place % heads
    if gl.load(chunks_ptr + chunk * 3) < 0:
        return
    first = gl.load(chunks_ptr + chunk * 3 + 1)
    count = gl.load(chunks_ptr + chunk * 3 + 2)

    dtype: gl.constexpr = rows_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp has all tokens
    k_smem = gl.allocate_shared_memory(dtype, [2, SIZE, 64], shared)
    q_smem = gl.allocate_shared_memory(dtype, [2, SIZE, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    barrier()
    key_head = head // (heads // key_heads)
    mbarrier.expect(full.index(0), 4 * SIZE * 64 * 2)
    for c in gl.static_range(2):
        column = key_head * DIM + c * 64
        tma.async_copy_global_to_shared(rows_desc, [first, column], full.index(0), q_smem.index(c))
        column = (key_heads + key_head) * DIM + c * 64
        tma.async_copy_global_to_shared(rows_desc, [first, column], full.index(0), k_smem.index(c))

    token = gl.arange(0, SIZE, layout=line)
    live = token < count
    at = (first.to(gl.int64) + token) * gate_stride + head
    a = gl.load(a_ptr + at, mask=live, other=0.0).to(gl.float32) + gl.load(dt_bias_ptr + head).to(gl.float32)
    b = gl.load(b_ptr + at, mask=live, other=0.0).to(gl.float32)
    softplus = gl.where(a > LINEAR, a, gl.log(1.0 + gl.exp(gl.minimum(a, LINEAR))))
    log_decay = gl.maximum(-gl.exp(gl.load(a_log_ptr + head).to(gl.float32)) * softplus, least)
    log_decay = gl.where(live, log_decay * LOG2_E, 0.0)
    beta = gl.where(live, beta_limit / (1.0 + gl.exp(-b)), 0.0)
    since = gl.associative_scan(log_decay, 0, _add)
    until = gl.sum(log_decay, 0) - since
    at = place.to(gl.int64) * SIZE + token
    gl.store(since_ptr + at, gl.exp2(since))
    gl.store(until_ptr + at, gl.exp2(gl.minimum(until, 0.0)))
    since_row = gl.convert_layout(since, gl.SliceLayout(1, square))
    since_column = gl.convert_layout(since, gl.SliceLayout(0, square))
    beta_row = gl.convert_layout(beta, gl.SliceLayout(1, square))
    beta_column = gl.convert_layout(beta, gl.SliceLayout(0, square))
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, square))[:, None]
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, square))[None, :]
    decay = gl.where(row >= column, gl.exp2(since_row[:, None] - since_column[None, :]), 0.0)

    mbarrier.wait(full.index(0), 0)
    if count < SIZE:  # what lies behind the chunk may be NaN, which products with zero do not undo
        n = gl.arange(0, SIZE, layout=gl.SliceLayout(1, plain))
        for c in gl.static_range(2):
            piece = k_smem.index(c)
            piece.store(gl.where((n < count)[:, None], piece.load(plain), 0.0))
        fence_async_shared()
        barrier()
    zero = gl.zeros([SIZE, SIZE], gl.float32, layout=square)
    k = k_smem._reinterpret(dtype, [1, SIZE, DIM], shared).index(0)
    q = q_smem._reinterpret(dtype, [1, SIZE, DIM], shared).index(0)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    barrier()  # all have read q, whose place is taken by what is made of it
    q_smem.index(0).store((scores * (decay * scale)).to(dtype))
    alike = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    alike = warpgroup_mma_wait(0, deps=(alike,))
    barrier()
    # Its diagonal is not 0: of the products only blocks beside the diagonal ones are taken.
    minus = alike * (-beta_row)[:, None] * decay
    work = k_smem._reinterpret(gl.float16, [2, SIZE, SIZE], shared)
    work.index(0).store(minus.to(gl.float16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(scores_desc, [place * SIZE, 0], q_smem.index(0))
    inverse = _diagonal_inverse(alike, since, beta, square)
    for level in gl.static_range(4, 6):
        work.index(1).store(inverse.to(gl.float16))
        fence_async_shared()
        barrier()
        product = warpgroup_mma(work.index(1), work.index(0), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        beside = _where_equal((row >> level) ^ 1, column >> level, product).to(gl.float16)
        inverse = warpgroup_mma(gl.convert_layout(beside, left), work.index(1), inverse, is_async=True)
        inverse = warpgroup_mma_wait(0, deps=(inverse,))
        barrier()
    q_smem.index(1).store((inverse * beta_column[None, :]).to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(solve_desc, [place * SIZE, 0], q_smem.index(1))
    tma.store_wait(0)
