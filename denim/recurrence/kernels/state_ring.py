"""States of a decode step on their way through shared memory, on Hopper: a ring that TMA fills and empties.

Owns the ring and the order in which a program takes its heads. A program stays on its multiprocessor and
takes one head after the other: TMA brings the states of the next one or two while one is computed, and takes
those that are written back to their slots, so that memory is waited for once, when a program begins. A
program takes all value heads of a key head, one behind the other. Rows of padding are skipped.

For fp32 states of 128 x 128. A state lies in shared memory as it does in its slot, in pieces of 128 bytes, of
which 8 threads read one at a time without a conflict. A thread holds the same 16 channels of some rows: a sum
over d_k takes three shuffles. Knows slots; must not know what is done with a state.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from denim.recurrence.kernels.program_barrier import barrier

DIM = gl.constexpr(128)  # d_k and d_v
PIECE = gl.constexpr(32)  # numbers of 128 bytes
PARTS = gl.constexpr(4)  # pieces of a row of a state
# A state goes in halves, so that one is on its way while the other is computed. Rows, and pieces, of one: as
# many as TMA moves at once.
HALVES, ROWS, PIECES = gl.constexpr(2), gl.constexpr(64), gl.constexpr(256)
FEW = 4  # states of a program
WARPS = 8  # of a program: 64 numbers of a state for a thread


def suits(state: Tensor) -> bool:
    """Whether the ring takes states [slots, Hv, d_v, d_k]."""
    return (
        state.dtype == torch.float32
        and state.shape[2:] == (DIM.value, DIM.value)
        and state.stride(0) % PIECE.value == 0
        and state.data_ptr() % 16 == 0
    )


def pieces_of(state: Tensor) -> TensorDescriptor:
    """States [slots, Hv, d_v, d_k], slots any distance apart, as TMA sees them: rows of 128 bytes."""
    slots, heads = state.shape[:2]
    count = (slots - 1) * slot_pieces(state) + heads * HALVES.value * PIECES.value
    rows = state.as_strided((count, PIECE.value), (PIECE.value, 1))
    tile = gl.NVMMASharedLayout(128, 32, 2)
    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [PIECES.value, PIECE.value], tile)


def slot_pieces(state: Tensor) -> int:
    """From a slot to the next, in pieces."""
    return state.stride(0) // PIECE.value


@cache
def processors(device: torch.device) -> int:
    """Programs that a device holds: the ring fills a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def stages_for(states: int, device: torch.device, *, written: bool) -> int:
    """States of a ring, for so many of a step, as measured on an H200. A third takes bandwidth from the first
    that a program waits for, and pays where many follow and are all written."""
    return 3 if written and states > FEW * processors(device) else 2


# A head of this program: (key head, counted through all rows; value head of it; slot of its row; records
# pending there, 0 without rings).


@gluon.jit
def first_head(row_ptrs, units, key_heads: gl.constexpr):
    """row_ptrs: to the slot of each row, and to its pending records or None; units: key heads of all rows."""
    unit = gl.program_id(0)
    slot, pending = _row(unit, row_ptrs, units, key_heads)
    return live((unit, 0, slot, pending), row_ptrs, units, key_heads)


@gluon.jit
def behind(head, row_ptrs, units, key_heads: gl.constexpr, group: gl.constexpr):
    """The one that follows on `head`, perhaps of padding."""
    unit, i, _, _ = head
    i += 1
    unit = gl.where(i == group, unit + gl.num_programs(0), unit)
    i = gl.where(i == group, 0, i)
    slot, pending = _row(unit, row_ptrs, units, key_heads)
    return unit, i, slot, pending


@gluon.jit
def live(head, row_ptrs, units, key_heads: gl.constexpr):
    """`head`, or the first behind it whose row is no padding."""
    unit, i, slot, pending = head
    while (unit < units) & (slot < 0):
        unit += gl.num_programs(0)
        slot, pending = _row(unit, row_ptrs, units, key_heads)
    return unit, i, slot, pending


@gluon.jit
def _row(unit, row_ptrs, units, key_heads: gl.constexpr):
    """(slot, pending) of the row of a key head; 0 behind the last."""
    slots_ptr, pending_ptr = row_ptrs
    row = unit // key_heads
    slot = gl.load(slots_ptr + row, mask=unit < units, other=0)
    if pending_ptr is None:
        return slot, 0
    else:
        return slot, gl.load(pending_ptr + row, mask=unit < units, other=0)


@gluon.jit
def new_ring(stages: gl.constexpr):
    """(a ring of `stages` states in halves, a barrier for each half)."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    ring = gl.allocate_shared_memory(gl.float32, [stages * HALVES, PIECES, PIECE], shared)
    full = gl.allocate_shared_memory(gl.int64, [stages * HALVES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages * HALVES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    return ring, full


@gluon.jit
def bring(
    desc,
    ring,
    full,
    count,
    head,
    units,
    between,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
):
    """Ask for the count-th state that this program takes. between: `slot_pieces`."""
    there = head[0] < units
    piece = _first_piece(head, between, key_heads, group)
    for half in gl.static_range(HALVES):
        s = (count % stages) * HALVES + half
        mbarrier.expect(full.index(s), PIECES * PIECE * 4, pred=there)
        at = [piece + half * PIECES, 0]
        tma.async_copy_global_to_shared(desc, at, full.index(s), ring.index(s), pred=there)


@gluon.jit
def _first_piece(head, between, key_heads: gl.constexpr, group: gl.constexpr):
    unit, i, slot, _ = head
    return (slot * between).to(gl.int32) + ((unit % key_heads) * group + i) * (PIECES * HALVES)


@gluon.jit
def take(
    ring, full, count, half: gl.constexpr, pieces: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr
):
    """Half of the count-th state, [ROWS, PARTS, PIECE], when it is there."""
    s = (count % stages) * HALVES + half
    mbarrier.wait(full.index(s), (count // stages) & 1)
    return gl.convert_layout(gl.reshape(ring.index(s).load(pieces), [ROWS, PARTS, PIECE]), tile)


@gluon.jit
def give(
    desc,
    ring,
    state,
    count,
    half: gl.constexpr,
    head,
    between,
    pieces: gl.constexpr,
    key_heads: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
):
    """Take half of the count-th state, now `state`, back to its slot. Stands at a barrier of all warps."""
    s = (count % stages) * HALVES + half
    ring.index(s).store(gl.convert_layout(gl.reshape(state, [PIECES, PIECE]), pieces))
    fence_async_shared()
    barrier()
    piece = _first_piece(head, between, key_heads, group) + half * PIECES
    tma.async_copy_shared_to_global(desc, [piece, 0], ring.index(s))
