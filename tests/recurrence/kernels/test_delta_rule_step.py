"""The delta rule alone on slots against the plain step; interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from denim.recurrence.gated_delta import gated_delta_step, l2norm
from denim.recurrence.kernels.delta_rule_step import delta_rule_step
from denim.recurrence.kernels.delta_tile import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(2, 1, 16, 16), (1, 3, 40, 12)]
if DEVICE == "cuda":
    SIZES += [(16, 2, 128, 128)]


@pytest.mark.parametrize("tiling", [None, Tiling(4, 1), Tiling(16, 4), Tiling(8, 1, inner=128)], ids=str)
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_the_plain_step(sizes: tuple[int, int, int, int], vector: bool, tiling: Tiling | None) -> None:
    torch.manual_seed(0)
    key_heads, group, key_dim, value_dim = sizes
    heads = key_heads * group
    slots = torch.tensor([4, -1, 1])
    state = torch.full((6, heads + 1, value_dim, key_dim), float("nan"))[:, :heads]
    state[[4, 1]] = torch.randn(2, heads, value_dim, key_dim)
    q, k = l2norm(torch.randn(2, 3, key_heads, key_dim))
    log_decay = -torch.rand(3, heads, *[key_dim] * vector).exponential_()
    inputs = (q, k, torch.randn(3, heads, value_dim), log_decay, torch.rand(3, heads))
    live = slots >= 0
    expected = state[slots[live]]
    want = gated_delta_step(*(x[live] for x in inputs), expected)
    moved = state.to(DEVICE)
    out = delta_rule_step(*(x.to(DEVICE) for x in inputs), slots.to(DEVICE), moved, tiling).cpu()
    torch.testing.assert_close(out[live], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.cpu()[slots[live]], expected, atol=1e-5, rtol=1e-5)
    assert moved.cpu()[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(6, 2, 16, 12)}, r"state must be \[N, Hv, d_v, d_k\] = \[6, 2, 12, 16\]; got"),
        ({"v": torch.zeros(3, 1, 12)}, "log_decay must be"),
        ({"log_decay": torch.zeros(3, 2, 12)}, r"log_decay must be \[T, Hv, d_k\] = \[3, 2, 16\]"),
        ({"k": torch.zeros(4, 1, 16)}, "k must be"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots must be int64 \[3\]; got torch.int64 \[2\]"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be int64"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    """A kernel would read it as something else, or beyond its end."""
    operands = {
        "q": torch.zeros(3, 1, 16),
        "k": torch.zeros(3, 1, 16),
        "v": torch.zeros(3, 2, 12),
        "log_decay": torch.zeros(3, 2),
        "beta": torch.zeros(3, 2),
        "slots": torch.tensor([4, -1, 1]),
        "state": torch.zeros(6, 2, 12, 16),
    }
    with pytest.raises(ValueError, match=message):
        delta_rule_step(**operands | change)
