"""Random tokens, states and comparisons that the tests of the rules share."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from denim.recurrence import gated_accumulation, gated_delta

# Of the largest value that is compared, or of 1 if all are smaller (see `assert_close`).
FLOAT64_BOUND = 1e-10
FLOAT32_BOUND = 5e-6
BOUNDS = [(torch.float64, FLOAT64_BOUND), (torch.float32, FLOAT32_BOUND)]

RAGGED = [1, 63, 64, 65, 0, 3, 130, 16]
# For each sequence of RAGGED: a start, ends, inner positions, ends of chunks, unsorted, twice, none.
POSITIONS = [[0, 1], [5, 62, 63], [64, 1], [], [0, 0], [2], [130, 64, 65, 127, 128, 0, 129, 64], [16]]
CHUNK_SIZES = [1, 16, 32, 64, 128]
DECAYS = ["none", "constant", "scalar", "vector"]


class Rule(NamedTuple):
    """The three forms of a rule with matrix states, and whether its tokens have a beta."""

    recurrent: Callable
    step: Callable
    chunked: Callable
    has_beta: bool


DELTA = Rule(
    gated_delta.gated_delta_recurrent, gated_delta.gated_delta_step, gated_delta.gated_delta_chunked, True
)
ACCUMULATION = Rule(
    gated_accumulation.gated_accumulation_recurrent,
    gated_accumulation.gated_accumulation_step,
    gated_accumulation.gated_accumulation_chunked,
    False,
)
RULES = {"delta": DELTA, "accumulation": ACCUMULATION}


def inputs(
    rule,
    decay,
    tokens,
    key_heads=2,
    value_heads=4,
    d_k=8,
    d_v=12,
    dtype=torch.float64,
    strength=1.0,
    most_beta=1.0,
):
    """[q, k, v, log_decay, beta if the rule has it]; unit q and k as models have them.

    log_decay is uniform in (-strength, 0) in the shape that `decay` names, beta in (0, most_beta).
    """
    rng = torch.Generator().manual_seed(0)
    q, k = gated_delta.l2norm(torch.randn(2, tokens, key_heads, d_k, dtype=dtype, generator=rng))
    v = torch.randn(tokens, value_heads, d_v, dtype=dtype, generator=rng)
    beta = most_beta * torch.rand(tokens, value_heads, dtype=dtype, generator=rng)
    shapes = {
        "constant": (value_heads,),
        "scalar": (tokens, value_heads),
        "vector": (tokens, value_heads, d_k),
    }
    log_decay = None
    if decay != "none":
        log_decay = -strength * torch.rand(shapes[decay], dtype=dtype, generator=rng)
    return [q, k, v, log_decay, beta] if rule.has_beta else [q, k, v, log_decay]


def states(sequences, heads=4, d_v=12, d_k=8, dtype=torch.float64):
    rng = torch.Generator().manual_seed(1)
    return torch.randn(sequences, heads, d_v, d_k, dtype=dtype, generator=rng)


def part(args, begin, end):
    """The arguments for tokens begin .. end - 1; what is not of tokens (None, a constant) stays."""
    return [x if x is None or x.dim() == 1 else x[begin:end] for x in args]


def in_double(args):
    return [x if x is None else x.double() for x in args]


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def assert_close(got, want, bound):
    """got, want: (outputs, states). Sums without decay grow with the tokens, and their rounding with them."""
    for name, a, b in zip(("out", "states"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        assert torch.isfinite(a).all(), name
        if a.numel():
            error = (a.double() - b.double()).abs().max().item() / max(1.0, b.abs().max().item())
            assert error <= bound, f"{name} differs by {error}"
