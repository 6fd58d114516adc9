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

from denim.recurrence.gated_delta import gated_delta_step


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
    padding.
    """
    group = state.shape[1] // ring.keys.shape[2]
    for slot, count in zip(slots.tolist(), pending.tolist(), strict=True):
        if slot < 0 or count == 0:
            continue
        s = state[slot].float()
        for j in range(count):
            decay = ring.log_decays[slot, j].exp()  # [Hv] or [Hv, d_k]
            key = ring.keys[slot, j].repeat_interleave(group, 0)
            s = s * decay.view(len(decay), 1, -1) + ring.updates[slot, j].unsqueeze(-1) * key.unsqueeze(-2)
        state[slot] = s.to(state.dtype)


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

    pending: [B], records before this step, 0 .. L - 1. Behind it a row has one more; for a row that had L - 1
    the state is written and none are pending. Returns [B, Hv, d_v] in v's dtype.
    """
    out = torch.empty_like(v)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        count = int(pending[i])
        current = state[slot : slot + 1].to(torch.float32, copy=True)
        one = torch.zeros(1, dtype=torch.long)
        row = Ring(*(part[slot : slot + 1] for part in ring))
        flush(current, row, one, pending[i : i + 1])
        group = v.shape[1] // k.shape[1]
        decay = log_decay[i].float().exp()
        key = k[i].float()
        wrong = v[i].float() - torch.einsum(
            "hvk,hk->hv", current[0] * decay.view(len(decay), 1, -1), key.repeat_interleave(group, 0)
        )
        out[i] = gated_delta_step(
            q[i : i + 1], k[i : i + 1], v[i : i + 1], log_decay[i : i + 1], beta[i : i + 1], current
        )[0]
        if count == ring.length - 1:
            state[slot] = current[0].to(state.dtype)
        else:
            ring.keys[slot, count] = key
            ring.updates[slot, count] = wrong * beta[i].float().unsqueeze(-1)
            ring.log_decays[slot, count] = log_decay[i]
    return out
