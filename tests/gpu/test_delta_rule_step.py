"""The delta rule alone with more states than a device has room for at once, one step after the other."""

from __future__ import annotations

import pytest
import torch

from denim.recurrence.gated_delta import gated_delta_step, l2norm
from denim.recurrence.kernels.delta_rule_step import delta_rule_step
from denim.recurrence.kernels.hopper_rule_step import suits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DIM = 128
STEPS = 8


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize(("rows", "key_heads", "group"), [(70, 16, 1), (40, 16, 2)])
def test_steps_in_a_graph(rows: int, key_heads: int, group: int, vector: bool) -> None:
    """A step reads what the one before it wrote, and may begin before that one has ended."""
    torch.manual_seed(0)
    heads = key_heads * group
    slots = torch.randperm(rows + 3, device="cuda")[:rows]
    padding = torch.tensor([0, 7, rows - 1], device="cuda")
    live = torch.ones(rows, dtype=torch.bool, device="cuda")
    live[padding] = False
    places = torch.where(live, slots, -1)
    start, state = torch.full((2, rows + 3, heads + 1, DIM, DIM), float("nan"), device="cuda")[:, :, :heads]
    start[slots[live]] = torch.randn(int(live.sum()), heads, DIM, DIM, device="cuda")
    q, k = l2norm(torch.randn(2, STEPS, rows, key_heads, DIM, device="cuda"))
    v = torch.randn(STEPS, rows, heads, DIM, device="cuda")
    log_decay = -torch.rand(STEPS, rows, heads, *[DIM] * vector, device="cuda")
    beta = torch.rand(STEPS, rows, heads, device="cuda")
    inputs = (q, k, v, log_decay, beta)
    assert suits(state, rows)

    expected = start[slots[live]]
    want = [gated_delta_step(*(x[t][live] for x in inputs), expected) for t in range(STEPS)]
    delta_rule_step(*(x[0] for x in inputs), places, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [delta_rule_step(*(x[t] for x in inputs), places, state) for t in range(STEPS)]
    for _ in range(20):
        state.copy_(start)
        graph.replay()
        for t in range(STEPS):
            torch.testing.assert_close(outs[t][live], want[t], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[slots[live]], expected, atol=1e-4, rtol=1e-4)
        assert state[slots[~live]].isnan().all()
