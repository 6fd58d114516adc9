"""The gates of the gated delta rule by themselves, for libraries that take them ready.

Owns log alpha = -exp(a_log) softplus(a + dt_bias) and beta = beta_limit sigmoid(b) as one kernel. Denim's own
kernels make them where they are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from denim.recurrence.kernels.exponentials import softplus

BLOCK = 1024


@triton.jit
def _gates(
    a_ptr,
    b_ptr,
    stride,
    a_log_ptr,
    dt_bias_ptr,
    decay_ptr,
    beta_ptr,
    total,
    beta_limit,
    heads: tl.constexpr,
    as_log: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    live = at < total
    head = at % heads
    source = (at // heads).to(tl.int64) * stride + head
    a = tl.load(a_ptr + source, mask=live, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + head).to(tl.float32)
    decay = -tl.exp(tl.load(a_log_ptr + head)) * softplus(a)
    tl.store(decay_ptr + at, decay if as_log else tl.exp(decay), mask=live)
    b = tl.load(b_ptr + source, mask=live, other=0.0).to(tl.float32)
    tl.store(beta_ptr + at, beta_limit * tl.sigmoid(b), mask=live)


def delta_gates(
    b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, beta_limit: float = 1.0, *, as_log: bool = True
) -> tuple[Tensor, Tensor]:
    """b, a: [T, Hv], rows of one distance; a_log: [Hv] fp32; dt_bias: [Hv]. Returns the decay, or its log,
    and beta, both [T, Hv] dense in fp32. Formulas: the module docstring (arXiv 2412.06464, as in Qwen3.5)."""
    tokens, heads = a.shape
    assert a.stride() == b.stride() and a.stride(1) == 1
    decay, beta = torch.empty(2, tokens, heads, dtype=torch.float32, device=a.device)
    _gates[(triton.cdiv(tokens * heads, BLOCK),)](
        a,
        b,
        a.stride(0),
        a_log,
        dt_bias,
        decay,
        beta,
        tokens * heads,
        beta_limit,
        heads=heads,
        as_log=as_log,
        block=BLOCK,
    )
    return decay, beta
