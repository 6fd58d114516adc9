"""Between the kernels' arguments and those of a library that takes packed sequences.

Owns the way there and back: q, k and v each dense, gates applied, the states that sequences begin from
gathered out of their slots and the last ones scattered into theirs. Knows the chunk table and slots; must not
know which library runs.

That way costs a copy of the rows and of the states, which Denim's own kernels do without. States inside
sequences and rows of padding are not for this form: a library gives the last states alone, and the targets of
padding are no slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable

Packed = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(q, k [1, T, Hk, d_k], v [1, T, Hv, d_v], log_decay, beta [1, T, Hv] fp32, states [N, Hv, d_v, d_k] fp32,
cu_seqlens [N + 1], scale of q) -> out [1, T, Hv, d_v] and the states behind the sequences."""


def through(
    run: Packed,
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    state: Tensor,
    key_heads: int,
    *,
    beta_limit: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    """`run` over the sequences of `table`: arguments and result of `kernels.gated_delta_chunks`."""
    _, heads, value_dim, key_dim = state.shape
    keys = key_heads * key_dim
    parts = rows.split((keys, keys, heads * value_dim), dim=1)
    dims = (key_dim, key_dim, value_dim)
    q, k, v = (
        part.reshape(1, len(rows), -1, dim).contiguous() for part, dim in zip(parts, dims, strict=True)
    )
    log_decay = -a_log.exp() * F.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()
    if beta_limit != 1.0:
        beta = beta * beta_limit
    out, last = run(
        q,
        k,
        v,
        log_decay.unsqueeze(0),
        beta.unsqueeze(0),
        _begin(table.slot_in, state),
        table.cu_seqlens,
        key_dim**-0.5 if scale is None else scale,
    )
    state.index_copy_(0, table.slot_out, last.to(state.dtype))
    return out.view(len(rows), heads, value_dim)


def _begin(slot_in: Tensor, state: Tensor) -> Tensor:
    """What the sequences begin from, [N, Hv, d_v, d_k] fp32: zeros where there is no slot. The slot that is
    gathered in its place may hold anything."""
    carried = (slot_in >= 0).view(-1, 1, 1, 1)
    gathered = state.index_select(0, slot_in.clamp(min=0)).float()
    return torch.where(carried, gathered, torch.zeros((), device=state.device))
