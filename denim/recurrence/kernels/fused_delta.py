"""What the fused decode steps of the delta rule share: convolution, norms, and several programs to a head.

A head's state is spread over programs (`delta_tile.Tiling`), and the value heads of a key head are taken by
programs of their own. They all read the q and k columns of one convolution window, which has to move on by
one token, and each has some rows of an output that is normalised as a whole. Both wait for the last: a
program, when it has read all that it needs and stored its part of the output, raises the key head's counter
of arrivals; the one that finds all others there moves the window, normalises the output and resets the
counter. Where one program has the key head for itself there is no counter.

Knows the decode row of a layer: [q | k | v] behind a short convolution, an output gate. No rule, no decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from denim.recurrence.kernels.delta_tile import Tiling, load

# States of all rows from which whole heads are enough programs; with fewer, each is spread over several.
MANY_STATES = 256


def tiling_of(states: int) -> Tiling:
    """For so many states [d_v, d_k] of all rows together, as measured on an H200."""
    return Tiling(16, 2) if states < MANY_STATES else WHOLE_HEAD


WHOLE_HEAD = Tiling(128, 4)


@triton.jit
def fetch(ptr):
    """Brings the cache lines at these addresses to the second level of cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def convolve(x_ptr, window_ptr, taps_ptr, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """(silu of the causal convolution at `channels` in fp32, the columns of the window moved on by one token).

    x: [total], the token; window: [width - 1, total]; taps: [width, total].
    """
    x = load(x_ptr + channels, mask)
    acc = x.to(tl.float32) * load(taps_ptr + channels + (width - 1) * total, mask).to(tl.float32)
    columns = ()
    for j in tl.static_range(width - 1):
        column = load(window_ptr + channels + j * total, mask)
        acc += column.to(tl.float32) * load(taps_ptr + channels + j * total, mask).to(tl.float32)
        if j > 0:
            columns = columns + (column,)  # noqa: RUF005 (Triton knows no other way)
    columns = columns + (x,)  # noqa: RUF005
    acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)  # the plain form returns the model's dtype here
    return acc * tl.sigmoid(acc), columns


@triton.jit
def store_window(window_ptr, columns, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """The window of `channels` one token on. Behind a barrier: a short vector lies in several warps at once,
    and all have to have read a column before one overwrites it."""
    for j in tl.static_range(width - 1):
        tl.store(window_ptr + channels + j * total, columns[j], mask=mask)


@triton.jit
def arrive(arrivals_ptr, readers: tl.constexpr, sem: tl.constexpr):
    """True in the last of `readers` programs to come here, which then sees all that the others stored before.

    The barrier puts the reads and stores of all of a program's threads before its arrival, and the atomic
    (release and acquire) puts them before what the last one does. It leaves the counter at zero.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr, 1, sem=sem) == readers - 1
    if last:
        tl.store(arrivals_ptr, 0)
    return last


@triton.jit
def gated_norm(o, scale, gate, dim: tl.constexpr, eps, sigmoid: tl.constexpr):
    """o / rms(o) * scale * silu(gate), or sigmoid(gate); all [d_v] fp32."""
    y = o * tl.rsqrt(tl.sum(o * o, 0) / dim + eps) * scale * tl.sigmoid(gate)
    return y if sigmoid else y * gate


@triton.jit
def norm_stored(
    out_ptr,
    partial_ptr,
    gate_ptr,
    scale_ptr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    eps,
    sigmoid: tl.constexpr,
):
    """`gated_norm` of a head's output, whose parts were stored in `partial` [d_v] fp32 by several tiles."""
    at = tl.arange(0, padded)
    mask = None if padded == dim else at < dim
    # Not through the first level of cache, which other programs' stores do not reach.
    if padded == dim:
        o = tl.load(partial_ptr + at, cache_modifier=".cg")
    else:
        o = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    scale = load(scale_ptr + at, mask)
    gate = load(gate_ptr + at, mask).to(tl.float32)
    y = gated_norm(o, scale, gate, dim, eps, sigmoid)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
