"""Whether a preempted request's state should be moved to the host, or computed again.

Owns the two times and their comparison. Both are estimates from sizes and rates; only their order matters,
and a wrong choice costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from denim.ledger.flops import prefill_flops
from denim.spec.model import ModelSpec


class Rates(NamedTuple):
    """`flops_per_second` in prefill; `link_bytes_per_second` between device and host memory, one way."""

    flops_per_second: float
    link_bytes_per_second: float


# CPU: bf16 products of 512 rows on two AVX512-BF16 cores reach 0.9e12; one core copies about 5 GB/s.
# CUDA: segments of some thousand tokens reach a third of an H200's dense bf16 rate; PCIe 4 x16, pinned.
RATES = {"cpu": Rates(0.5e12, 5e9), "cuda": Rates(300e12, 25e9)}


def recompute_seconds(spec: ModelSpec, tokens: int, rates: Rates) -> float:
    """Time to prefill the first `tokens` tokens again."""
    return prefill_flops(spec, tokens) / rates.flops_per_second


def swap_seconds(moved_bytes: int, rates: Rates) -> float:
    """Time to move `moved_bytes` to the host and back."""
    return 2 * moved_bytes / rates.link_bytes_per_second


def recompute_rule(
    spec: ModelSpec, request_bytes: Callable[[int], int], device_type: str
) -> Callable[[int], bool]:
    """Whether computing so many tokens again beats moving them; `request_bytes(tokens)` are what moves."""
    rates = RATES[device_type]
    return lambda tokens: recompute_seconds(spec, tokens, rates) < swap_seconds(request_bytes(tokens), rates)
