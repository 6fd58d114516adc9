"""Updates of a state that are recorded and not yet written to it: what they add to a read, and to the state.

With S_0 in memory and p records (k_j, u_j, log-decay g_j), j = 0 .. p - 1, a step with log-decay g has before
its own update

    S' = S_0 diag(e^{g + sum_i g_i}) + sum_j u_j (e^{g + sum_{i > j} g_i} k_j)^T

so S' x needs S_0 once, the products of x with p keys and a sum of p vectors u_j, and no replay of states. The
u_j are final when they are recorded, so no system of equations is left to solve. Sums of log-decays are taken
from the latest back: a strong decay then hides nothing of the weak ones behind it.

A ring lies in the slot beside its state: keys [length, Hk, d_k], updates [length, Hv, d_v], log-decays
[length, Hv] or [length, Hv, d_k], all fp32. Knows neither layers nor tags.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_tile import in_parts, outer


def ring_arguments(ring: Ring | None) -> tuple[Any, ...]:
    """Pointer and slot stride of each of a ring's tensors, as kernels take them; Nones without a ring."""
    if ring is None:
        return (None, 0) * 3
    assert all(part[0].is_contiguous() for part in ring)
    return tuple(argument for part in ring for argument in (part, part.stride(0)))


def ring_lengths(ring: Ring | None) -> dict[str, int]:
    """The length of a ring, 0 without one, and the logarithm of a power of two that holds what can be pending
    when a step begins, length - 1."""
    length = 0 if ring is None else ring.keys.shape[1]
    return {"length": length, "levels": max(length - 2, 0).bit_length()}


@triton.jit
def load_records(
    ptr, stride: tl.constexpr, at, dim: tl.constexpr, pending, length: tl.constexpr, levels: tl.constexpr
):
    """A tuple of 2^levels vectors [at], zeros from `pending` on. `stride`: elements from a record to the
    next. at: which of `dim` elements. At most length - 1 are ever pending when a step begins."""
    records = ()
    for j in tl.static_range(1 << levels):
        if j < length - 1:
            record = tl.load(ptr + j * stride + at, mask=(at < dim) & (j < pending), other=0.0)
        else:
            record = tl.zeros_like(at).to(tl.float32)
        records = records + (record,)  # noqa: RUF005 (Triton knows no other way)
    return records


@triton.jit
def load_numbers(ptr, stride: tl.constexpr, pending, length: tl.constexpr, levels: tl.constexpr):
    """The same with a number for each record."""
    numbers = ()
    for j in tl.static_range(1 << levels):
        number = 0.0
        if j < length - 1:
            number = tl.load(ptr + j * stride, mask=j < pending, other=0.0)
        numbers = numbers + (number,)  # noqa: RUF005
    return numbers


@triton.jit
def _side_by_side(records, levels: tl.constexpr):
    """2^levels vectors [n] as [n, 2^levels]: a thread holds what it held, and nothing moves."""
    tiles = records
    for level in tl.static_range(levels):
        joined = ()
        for m in tl.static_range(1 << (levels - 1 - level)):
            joined = joined + (tl.join(tiles[m], tiles[m + (1 << (levels - 1 - level))]),)  # noqa: RUF005
        tiles = joined
    return tl.reshape(tiles[0], [records[0].shape[0], 1 << levels])


@triton.jit
def faded(kj, gj, log_decay, levels: tl.constexpr):
    """(the keys, each behind all later decays; the log-decay of S_0). Decays are numbers or like the keys;
    log_decay is the step's own."""
    keys = ()
    for i in tl.static_range(1 << levels):
        keys = (kj[(1 << levels) - 1 - i] * tl.exp(log_decay),) + keys  # noqa: RUF005
        log_decay += gj[(1 << levels) - 1 - i]
    return keys, log_decay


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def recorded(keys, uj, k, q, levels: tl.constexpr):
    """What the records add to S' k and to S' q, each [rows]. keys: `faded`; k, q: [d_k]."""
    keys = _side_by_side(keys, levels)
    with_k, with_q = tl.reduce((keys * k[:, None], keys * q[:, None]), 0, _add2)
    updates = _side_by_side(uj, levels)
    return tl.sum(updates * with_k[None, :], 1), tl.sum(updates * with_q[None, :], 1)


@triton.jit
def with_records(s, keys, uj, parts: tl.constexpr, inner: tl.constexpr, length: tl.constexpr):
    """S' from s = S_0 behind all decays, when all length - 1 records are there."""
    for j in tl.static_range(length - 1):
        s += outer(uj[j], in_parts(keys[j], parts, inner))
    return s
