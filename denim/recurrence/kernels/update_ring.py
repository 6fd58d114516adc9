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
from denim.recurrence.kernels.delta_tile import outer


def ring_arguments(ring: Ring | None) -> tuple[Any, ...]:
    """Pointer and slot stride of each of a ring's tensors, as kernels take them; Nones without a ring."""
    if ring is None:
        return (None, 0) * 3
    assert all(part[0].is_contiguous() for part in ring)
    return tuple(argument for part in ring for argument in (part, part.stride(0)))


def ring_lengths(ring: Ring | None) -> dict[str, int]:
    """The length of a ring, 0 without one, and a power of two that holds it."""
    length = 0 if ring is None else ring.keys.shape[1]
    return {"length": length, "padded_length": triton.next_power_of_2(max(length, 1))}


@triton.jit
def record_weights(
    keys_ptr,
    decays_ptr,
    pending,
    log_decay,
    k_at,
    q,
    k,
    keys: tl.constexpr,
    decays: tl.constexpr,
    key_dim: tl.constexpr,
    vector_decay: tl.constexpr,
    padded: tl.constexpr,
):
    """(log-decay of S_0, weights of the u_j in S' k [padded], the same in S' q).

    Pointers: a slot's ring at this head; `keys`, `decays`: elements from a record to the next. `pending`: how
    many; padded: a power of two, at least the length. k_at, q, k: [d_k]; log_decay of the step: a number, or
    [d_k].
    """
    at = tl.arange(0, padded)
    k_mask = k_at < key_dim
    kj = tl.load(keys_ptr + at[:, None] * keys + k_at, mask=(at < pending)[:, None] & k_mask, other=0.0)
    behind = at + 1 < pending
    if vector_decay:
        first = tl.load(decays_ptr + k_at, mask=k_mask & (pending > 0), other=0.0)
        later = decays_ptr + decays + at[:, None] * decays + k_at
        gj = tl.load(later, mask=behind[:, None] & k_mask, other=0.0)
        kj *= tl.exp(tl.cumsum(gj, 0, reverse=True) + log_decay[None, :])
        total = log_decay + tl.sum(gj, 0) + first
        with_k = tl.sum(kj * k[None, :], 1)
        with_q = tl.sum(kj * q[None, :], 1)
    else:
        first = tl.load(decays_ptr, mask=pending > 0, other=0.0)
        gj = tl.load(decays_ptr + decays + at * decays, mask=behind, other=0.0)
        fade = tl.exp(tl.sum(tl.where(at[None, :] >= at[:, None], gj[None, :], 0.0), 1) + log_decay)
        total = log_decay + tl.sum(gj, 0) + first
        with_k = tl.sum(kj * k[None, :], 1) * fade
        with_q = tl.sum(kj * q[None, :], 1) * fade
    return total, with_k, with_q


@triton.jit
def recorded(
    updates_ptr,
    pending,
    v_at,
    with_k,
    with_q,
    values: tl.constexpr,
    value_dim: tl.constexpr,
    padded: tl.constexpr,
):
    """What the records add to S' k and to S' q, each [rows]; weights from `record_weights`."""
    at = tl.arange(0, padded)
    mask = (at < pending)[:, None] & (v_at < value_dim)
    uj = tl.load(updates_ptr + at[:, None] * values + v_at, mask=mask, other=0.0)
    return tl.sum(with_k[:, None] * uj, 0), tl.sum(with_q[:, None] * uj, 0)


@triton.jit
def with_records(
    s,
    keys_ptr,
    updates_ptr,
    decays_ptr,
    pending,
    log_decay,
    k_at,
    v_at,
    keys: tl.constexpr,
    values: tl.constexpr,
    decays: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    vector_decay: tl.constexpr,
):
    """S' from s = S_0 diag(e^{g + sum g_i}): the records are added, from the last to the first. k_at: [1,
    parts, inner]; log_decay of the step: a number, or like k_at."""
    k_mask = k_at < key_dim
    for i in tl.range(pending):
        j = pending - 1 - i
        kj = tl.load(keys_ptr + j * keys + k_at, mask=k_mask, other=0.0)
        uj = tl.load(updates_ptr + j * values + v_at, mask=v_at < value_dim, other=0.0)
        s += outer(uj, kj * tl.exp(log_decay))
        if vector_decay:
            log_decay += tl.load(decays_ptr + j * decays + k_at, mask=k_mask, other=0.0)
        else:
            log_decay += tl.load(decays_ptr + j * decays)
    return s
