"""States out of their slots into one dense tensor, and back.

Owns the two copies, for libraries that know no slots. A negative slot is read as zeros, whatever lies
anywhere, and written nowhere. Offsets into slots are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _copy(state_ptr, stride, slots_ptr, dense_ptr, numbers, gather: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    live = at < numbers
    slot = tl.load(slots_ptr + row)
    in_slot = state_ptr + slot * stride + at
    in_dense = dense_ptr + row * numbers + at
    if gather:
        values = tl.load(in_slot, mask=live & (slot >= 0), other=0.0)
        tl.store(in_dense, values.to(dense_ptr.dtype.element_ty), mask=live)
    else:
        values = tl.load(in_dense, mask=live, other=0.0)
        tl.store(in_slot, values.to(state_ptr.dtype.element_ty), mask=live & (slot >= 0))


def gather_slots(state: Tensor, slots: Tensor) -> Tensor:
    """state: [N, *shape], each entry dense, entries any distance apart; slots: [B] int64. Returns [B, *shape]
    in fp32."""
    out = torch.empty(len(slots), *state.shape[1:], dtype=torch.float32, device=state.device)
    _launch(state, slots, out, gather=True)
    return out


def scatter_slots(dense: Tensor, slots: Tensor, state: Tensor) -> None:
    """dense [B, *shape] into the slots of `state`, in its dtype; slots that are not negative differ."""
    _launch(state, slots, dense.contiguous(), gather=False)


def _launch(state: Tensor, slots: Tensor, dense: Tensor, gather: bool) -> None:
    assert state[0].is_contiguous()
    numbers = state[0].numel()
    grid = (len(slots), triton.cdiv(numbers, BLOCK))
    _copy[grid](state, state.stride(0), slots, dense, numbers, gather=gather, block=BLOCK)
