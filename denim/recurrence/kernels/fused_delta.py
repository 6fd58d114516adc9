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

# Threads of a program with a whole state: 128 x 128 in fp32 takes 64 registers of each of 256 threads.
WHOLE_HEAD_WARPS = 8


@triton.jit
def convolve(x_ptr, window_ptr, taps_ptr, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """silu of the causal convolution at `channels`, fp32. x: [total]; window: [width - 1, total]; taps:
    [width, total]."""
    x = tl.load(x_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    acc = x * tl.load(taps_ptr + channels + (width - 1) * total, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(width - 1):
        column = tl.load(window_ptr + channels + j * total, mask=mask, other=0.0).to(tl.float32)
        acc += column * tl.load(taps_ptr + channels + j * total, mask=mask, other=0.0).to(tl.float32)
    acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)  # the plain form returns the model's dtype here
    return acc * tl.sigmoid(acc)


@triton.jit
def move_window(x_ptr, window_ptr, channels, total: tl.constexpr, width: tl.constexpr, mask):
    """The window of `channels` one token on: its oldest column goes, x's comes.

    A short vector lies in several warps at once, and only one of them stores. So every column is read by all
    before it is overwritten: a barrier stands between its last load and its store.
    """
    window_ptr += channels
    for j in tl.static_range(1, width - 1):
        column = tl.load(window_ptr + j * total, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(window_ptr + (j - 1) * total, column, mask=mask)
    if width > 1:
        x = tl.load(x_ptr + channels, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(window_ptr + (width - 2) * total, x, mask=mask)


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
