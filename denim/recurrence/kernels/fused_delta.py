"""What the fused decode step of the delta rule does around the rule: convolution, norms, and several programs
to a head.

With few rows a head's state is spread over programs, and the value heads of a key head are taken by programs
of their own. They all read the q and k columns of one convolution window, which has to move on by one token,
and each has some rows of an output that is normalised as a whole. Both wait for the last: a program, when it
has read all that it needs and stored its part of the output, raises the key head's counter of arrivals; the
one that finds all others there moves the window, normalises the output and resets the counter. With many rows
one program has a key head for itself, and there is no counter; nor is there in Hopper's own kernels
(`hopper_decode`).

Where kernels may overlap, a program first asks for what the projection before it does not write (its state,
the window, the convolution's taps) and only then waits for it.

Knows the decode row of a layer: [q | k | v] behind a short convolution, an output gate. No rule, no decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from denim.recurrence.arrivals import SPREAD_BELOW
from denim.recurrence.kernels.delta_tile import Tiling, load

# As measured on an H200, for heads of 128 x 128: tilings of so many states of all rows together at most.
SPREAD = ((132, Tiling(16, 2)), (SPREAD_BELOW - 1, Tiling(32, 4)))
# Steps that record have more to do beside a state, and less to move.
SPREAD_RECORDING = ((255, Tiling(64, 4)),)
WHOLE = Tiling(128, 4)
# With records, or a decay a channel, a program has no registers left for wider pieces of a state.
WHOLE_WIDE = Tiling(128, 4, inner=64)

LINE = tl.constexpr(32)  # numbers of a cache line of 128 bytes in fp32; a narrower dtype is asked for twice


def tiling_of(states: int, value_dim: int, *, recording: bool, vector_decay: bool) -> Tiling:
    """How a step lays out so many states [d_v, d_k]. More than are spread are taken by one program each, with
    more warps where d_v has more rows."""
    for most, tiling in SPREAD_RECORDING if recording else SPREAD:
        if states <= most:
            return tiling.within(value_dim)
    whole = WHOLE if recording or vector_decay else WHOLE_WIDE
    padded = triton.next_power_of_2(value_dim)
    return whole._replace(rows=padded, warps=whole.warps * max(1, padded // whole.rows))


@triton.jit
def fetch(ptr, at, stride: tl.constexpr, rows: tl.constexpr):
    """Brings the cache lines of elements `at` of some rows to the second level of cache."""
    for j in tl.static_range(rows):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(ptr + j * stride + at).to(tl.int64)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def lines(first, dim: tl.constexpr, padded: tl.constexpr):
    """An element of each cache line of `dim` elements from `first` on; dim padded to a power of two."""
    count: tl.constexpr = (padded + LINE - 1) // LINE
    return first + tl.minimum(tl.arange(0, count) * LINE, dim - 1)


@triton.jit
def convolve(x_ptr, window_ptr, taps_ptr, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """(silu of the causal convolution at `channels`, fp32; the columns of the window moved on by one token).

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
def arrive(arrivals_ptr, readers: tl.constexpr):
    """True in the last of `readers` programs to come here, which then sees all that the others stored before.

    The barrier puts the reads and stores of all of a program's threads before its arrival, and the atomic
    (release and acquire) puts them before what the last one does. It leaves the counter at zero.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == readers - 1
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
    heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    eps,
    sigmoid: tl.constexpr,
):
    """`gated_norm` of the outputs of `heads` heads, parts of which several programs stored in `partial`
    [heads, d_v] fp32. All are asked for before the first is stored, which waits for them."""
    at = tl.arange(0, padded)
    mask = at < dim
    scale = load(scale_ptr + at, mask)
    outputs = ()
    gates = ()
    for i in tl.static_range(heads):
        # Not through the first level of cache, which other programs' stores do not reach.
        o = tl.load(partial_ptr + i * dim + at, mask=mask, other=0.0, cache_modifier=".cg")
        outputs = outputs + (o,)  # noqa: RUF005 (Triton knows no other way)
        gates = gates + (load(gate_ptr + i * dim + at, mask).to(tl.float32),)  # noqa: RUF005
    for i in tl.static_range(heads):
        y = gated_norm(outputs[i], scale, gates[i], dim, eps, sigmoid)
        tl.store(out_ptr + i * dim + at, y.to(out_ptr.dtype.element_ty), mask=mask)
