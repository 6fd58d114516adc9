"""SiLU of rows that lie any distance apart, in one pass over memory.

What lightning attention does to q, k and v before its rule: its matrix products take them as they lie in
memory, and the exponentials in front of each of them would cost more than the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.exponentials import silu

# Values of a program: two loads of 16 bytes of bf16 for each of 128 threads.
BLOCK = 2048


@triton.jit
def _silu_rows(x_ptr, x_stride, out_ptr, total, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < total
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * total + at, silu(x).to(out_ptr.dtype.element_ty), mask=mask)


def silu_rows(x: Tensor) -> Tensor:
    """x: [T, D], rows any distance apart -> [T, D] dense, in x's dtype; fp32 inside."""
    rows, total = x.shape
    assert x.stride(1) == 1
    out = torch.empty(rows, total, dtype=x.dtype, device=x.device)
    if rows:
        _silu_rows[(rows, triton.cdiv(total, BLOCK))](x, x.stride(0), out, total, block=BLOCK, num_warps=4)
    return out
