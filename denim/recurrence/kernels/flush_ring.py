"""Writes what is pending in the rings of some slots into their states: `denim.recurrence.deferred.flush`.

Offsets into slots are 64-bit; a negative slot is padding. Knows neither layers nor tags.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.deferred import Ring
from denim.recurrence.kernels.delta_tile import Tiling, key_channels, outer, tile_offsets
from denim.recurrence.kernels.update_ring import ring_arguments

TILING = Tiling(16, 2, inner=128)


@triton.jit
def _flush(
    slots_ptr,
    pending_ptr,
    state_ptr,
    state_stride,
    ring_keys_ptr,
    ring_keys_stride,
    ring_updates_ptr,
    ring_updates_stride,
    ring_decays_ptr,
    ring_decays_stride,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    vector_decay: tl.constexpr,
    parts: tl.constexpr,
    inner: tl.constexpr,
    tile_rows: tl.constexpr,
):
    value_head = tl.program_id(1)
    row = tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    pending = tl.load(pending_ptr + row)
    if (slot < 0) | (pending == 0):
        return
    value_heads: tl.constexpr = key_heads * group
    decay_dim: tl.constexpr = key_dim if vector_decay else 1
    k_at = key_channels(parts, inner)
    v_at = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    tile = value_head * (value_dim * key_dim) + tile_offsets(v_at, k_at, key_dim)
    mask = (v_at < value_dim)[:, None, None] & (k_at < key_dim)
    state = state_ptr + slot * state_stride + tile
    keys = ring_keys_ptr + slot * ring_keys_stride + (value_head // group) * key_dim + k_at
    updates = ring_updates_ptr + slot * ring_updates_stride + value_head * value_dim + v_at
    decays = ring_decays_ptr + slot * ring_decays_stride + value_head * decay_dim
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    for j in tl.range(pending):
        kj = tl.load(keys + j * (key_heads * key_dim), mask=k_at < key_dim, other=0.0)
        uj = tl.load(updates + j * (value_heads * value_dim), mask=v_at < value_dim, other=0.0)
        gj = decays + j * (value_heads * decay_dim)
        if vector_decay:
            s *= tl.exp(tl.load(gj + k_at, mask=k_at < key_dim, other=0.0))
        else:
            s *= tl.exp(tl.load(gj))
        s += outer(uj, kj)
    tl.debug_barrier()  # a small tile lies in several warps at once: all have read before one stores
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=mask)


def flush(state: Tensor, ring: Ring, slots: Tensor, pending: Tensor) -> None:
    """Writes pending[i] records of slot slots[i] into its state, in place; the ring is left as it is.

    state: [N, Hv, d_v, d_k], a view of the arena; slots: [B] int64, different from each other, negative for
    padding; pending: [B] int32.
    """
    _, value_heads, value_dim, key_dim = state.shape
    key_heads = ring.keys.shape[2]
    assert state[0].is_contiguous()
    rows = len(slots)
    tiling = TILING.within(value_dim)
    parts, inner = tiling.parts(key_dim)
    _flush[(tiling.splits(value_dim), value_heads, rows)](
        slots,
        pending,
        state,
        state.stride(0),
        *ring_arguments(ring),
        key_heads=key_heads,
        group=value_heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        vector_decay=ring.log_decays.dim() == 4,
        parts=parts,
        inner=inner,
        tile_rows=tiling.rows,
        num_warps=tiling.warps,
    )
