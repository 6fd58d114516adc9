"""Between a layer's tensors and a library that takes packed sequences.

Owns the way there and back: gates applied, the states that sequences begin from gathered out of their slots
and the last ones scattered into theirs. Knows the chunk table and slots; must not know which library runs.

States inside sequences are not for this form: a library gives the last ones alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_gates import delta_gates
from denim.recurrence.kernels.slot_copy import gather_slots, scatter_slots


class Packed(NamedTuple):
    """N sequences of T tokens as libraries take them; everything is dense.

    q, k: [1, T, Hk, d_k], normalised; v: [1, T, Hv, d_v]; decay (or its log), beta: [1, T, Hv] fp32; states:
    [N, Hv, d_v, d_k] fp32; cu_seqlens: [N + 1] int32; longest: no sequence is longer; scale: of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor
    cu_seqlens: Tensor
    longest: int
    scale: float


class Library(Protocol):
    """Outputs [.., T, Hv, d_v] and the states behind the sequences, in the form of `Packed`."""

    def __call__(self, packed: Packed) -> tuple[Tensor, Tensor]: ...


def by_fla_signature(rule: Callable[..., tuple[Tensor, Tensor]], packed: Packed) -> tuple[Tensor, Tensor]:
    """A `Library` from a function that is called as fla's `chunk_gated_delta_rule` is."""
    return rule(
        packed.q,
        packed.k,
        packed.v,
        packed.decay,
        packed.beta,
        scale=packed.scale,
        initial_state=packed.states,
        output_final_state=True,
        cu_seqlens=packed.cu_seqlens,
        state_v_first=True,
    )


def through(
    library: Library,
    parts: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    table: ChunkTable,
    state: Tensor,
    key_heads: int,
    *,
    beta_limit: float = 1.0,
    log_decay: bool = True,
) -> Tensor:
    """The gated delta rule over the sequences of `table`, by `library`: [T, Hv, d_v].

    parts: [T * (2 Hk d_k + Hv d_v)], q of all tokens, then k, then v (`short_conv_chunks` with `apart`);
    log_decay: whether the library takes the logarithm. The rest as in `kernels.gated_delta_chunks`.
    """
    _, heads, value_dim, key_dim = state.shape
    tokens = len(a)
    sizes = [tokens * key_heads * key_dim] * 2 + [tokens * heads * value_dim]
    q, k, v = parts.split(sizes)
    decay, beta = delta_gates(b, a, a_log, dt_bias, beta_limit, as_log=log_decay)
    out, last = library(
        Packed(
            q.view(1, tokens, key_heads, key_dim),
            k.view(1, tokens, key_heads, key_dim),
            v.view(1, tokens, heads, value_dim),
            decay.unsqueeze(0),
            beta.unsqueeze(0),
            gather_slots(state, table.slot_in),
            table.cu_seqlens,
            table.longest * table.size,
            key_dim**-0.5,
        )
    )
    scatter_slots(last, table.slot_out, state)
    return out.view(tokens, heads, value_dim)
