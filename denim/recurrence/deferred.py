"""The delta rule with deferred writes: updates are recorded, and reach the state every L steps.

A decode step reads the state and writes it, and the write is half of its traffic. But an update is small:
u_t k_t^T behind a decay. So a step may leave the state S_0 in memory as it is and record (k_t, u_t, log-decay
g_t); with p records, j = 0 .. p - 1, the state that a sequence has reached is

    S_p = S_0 diag(e^{sum_i g_i}) + sum_j u_j (e^{sum_{i > j} g_i} k_j)^T

and a read S_p x is S_0 (e^{sum g} x) + sum_j u_j <e^{sum_{i > j} g_i} k_j, x>: the state is read once, and p
short vectors. When L records would be pending the state is written, and none are. Nothing is approximated:
the results are those of writing every step but for the order of fp32 sums.

Owns the ring of records, the plain forms of a step and of `flush`, which writes what is pending. Must not
know of layers, slots' tags or kernels (`kernels.update_ring`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from denim.recurrence.operands import check_heads, check_operands, whole_numbers


class Ring(NamedTuple):
    """Records of N slots, all fp32: keys [N, L, Hk, d_k], updates [N, L, Hv, d_v], and log-decays [N, L, Hv]
    or, for a decay per key channel, [N, L, Hv, d_k]."""

    keys: Tensor
    updates: Tensor
    log_decays: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[1]


def flush(state: Tensor, ring: Ring, slots: Tensor, pending: Tensor) -> None:
    """Writes pending[i] records of slot slots[i] into its state, in place; the ring is left as it is.

    state: [N, Hv, d_v, d_k]; slots, pending: [B], the slots different from each other; a negative slot is
    padding. ValueError, and nothing is written, where one does not fit.
    """
    for slot, count in _checked_rows(state, ring, slots, pending, more=0):
        if slot >= 0 and count:
            state[slot] = _reached(state, ring, slot, count)


def _decay_dims(ring: Ring) -> str:
    """Of one log-decay, as `check_operands` names dimensions. ValueError for what is no ring."""
    if not isinstance(ring, Ring) or not all(isinstance(part, Tensor) for part in ring):
        raise ValueError(f"ring must be a Ring of three tensors; got {type(ring).__name__}")
    return "Hv d_k" if ring.log_decays.dim() == 4 else "Hv"


def _checked_rows(
    state: Tensor, ring: Ring, slots: Tensor, pending: Tensor, more: int, **tokens: tuple[Tensor, str]
) -> list[tuple[int, int]]:
    """(slot, records pending) of each row, when all operands fit, and `more` records into the ring; else
    ValueError. `tokens`: those of a step, as `check_operands` takes them."""
    decay_dims = _decay_dims(ring)
    sizes = check_operands(
        state=(state, "N Hv d_v d_k"),
        keys=(ring.keys, "N L Hk d_k"),
        updates=(ring.updates, "N L Hv d_v"),
        log_decays=(ring.log_decays, f"N L {decay_dims}"),
        **tokens,
    )
    check_heads(sizes)
    at, counts = whole_numbers(slots), whole_numbers(pending)
    if at is None or counts is None or not len(at) == len(counts) == sizes.get("T", len(at)):
        raise ValueError(
            f"slots and pending must hold a whole number for each row; got {slots} and {pending}"
        )
    most = ring.length - more
    live = [(slot, count) for slot, count in zip(at, counts, strict=True) if slot >= 0]
    if any(slot >= len(state) for slot, _ in live) or len(dict(live)) < len(live):
        raise ValueError(f"slots must differ, and lie in 0 .. {len(state) - 1} or be negative; got {at}")
    if not all(0 <= count <= most for _, count in live):
        raise ValueError(f"pending must lie in 0 .. {most} with rings of {ring.length} records; got {counts}")
    return list(zip(at, counts, strict=True))


def _reached(state: Tensor, ring: Ring, slot: int, count: int) -> Tensor:
    """The state that a slot with `count` records stands for, [Hv, d_v, d_k] in fp32."""
    s = state[slot].float()
    for j in range(count):
        s = s * _per_channel(ring.log_decays[slot, j]) + _outer(ring.updates[slot, j], ring.keys[slot, j])
    return s


def _per_channel(log_decay: Tensor) -> Tensor:
    """[Hv] or [Hv, d_k] -> factors [Hv, 1, 1 or d_k]."""
    return log_decay.float().exp().view(len(log_decay), 1, -1)


def _outer(u: Tensor, k: Tensor) -> Tensor:
    """u k^T of each head, [Hv, d_v] and [Hk, d_k] -> [Hv, d_v, d_k]."""
    return u.unsqueeze(-1) * k.repeat_interleave(len(u) // len(k), 0).unsqueeze(-2)


def gated_delta_step_deferred(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ring: Ring,
    slots: Tensor,
    pending: Tensor,
) -> Tensor:
    """`gated_delta.gated_delta_step` for B rows on slots, with deferred writes: the plain reference.

    log_decay: [B, Hv] or [B, Hv, d_k], as the ring has it. state: [N, Hv, d_v, d_k]; slots: [B], different
    from each other or negative for padding; pending: [B], records before this step, 0 .. L - 1. Behind it a
    row has one more; for a row that had L - 1 the state is written and none are pending.
    Returns [B, Hv, d_v] in v's dtype, zeros for padding. ValueError, and nothing is written, where an operand
    does not fit.
    """
    rows = _checked_rows(
        state,
        ring,
        slots,
        pending,
        more=1,
        q=(q, "T Hk d_k"),
        k=(k, "T Hk d_k"),
        v=(v, "T Hv d_v"),
        log_decay=(log_decay, f"T {_decay_dims(ring)}"),
        beta=(beta, "T Hv"),
    )
    out = torch.zeros_like(v)
    q, k, strength, group = q.float(), k.float(), beta.float().unsqueeze(-1), v.shape[1] // k.shape[1]
    for i, (slot, count) in enumerate(rows):
        if slot < 0:
            continue
        s = _reached(state, ring, slot, count) * _per_channel(log_decay[i])
        read = torch.einsum("hvk,hk->hv", s, k[i].repeat_interleave(group, 0))
        u = strength[i] * (v[i].float() - read)
        s += _outer(u, k[i])
        scale = k.shape[-1] ** -0.5
        out[i] = torch.einsum("hvk,hk->hv", s, q[i].repeat_interleave(group, 0)) * scale
        if count == ring.length - 1:
            state[slot] = s
        else:
            ring.keys[slot, count] = k[i]
            ring.updates[slot, count] = u
            ring.log_decays[slot, count] = log_decay[i]
    return out
