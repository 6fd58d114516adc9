"""Drift: its order among the storages, and what it is measured against."""

from __future__ import annotations

import pytest
import torch

from denim.commands.study.drift import CHECKPOINT_SHARE, RuleInputs, drift, points_of
from denim.commands.study.inputs import random_inputs
from denim.commands.study.storage import STORAGES
from denim.recurrence.gated_delta import gated_delta_recurrent

TOKENS = 256


@pytest.fixture(scope="module")
def run() -> dict:
    return drift(random_inputs(TOKENS), STORAGES)


def test_fewer_bits_drift_further(run: dict) -> None:
    for what in ("state", "output"):
        ends = {name: curve[what][-1] for name, curve in run["storages"].items()}
        assert 0 < ends["fp32"] < 1e-5 < ends["bf16"] < ends["fp8"] < 1
        assert ends["bf16"] < ends["bf16 stochastic"] < 2 * ends["bf16"]


def test_a_state_quantised_once_recovers(run: dict) -> None:
    at = run["points"].index(run["checkpoint"])
    curve, fp32 = (run["storages"][name]["state"] for name in ("int8 once", "fp32"))
    assert curve[:at] == fp32[:at]
    assert 1e-3 < curve[at] < 0.1
    assert curve[-1] < curve[at] / 5


def test_points_rise_to_the_end_and_hold_the_checkpoint() -> None:
    for tokens in (64, 100, 65536):
        points = points_of(tokens, tokens // CHECKPOINT_SHARE)
        assert points == sorted(set(points))
        assert points[-1] == tokens
        assert tokens // CHECKPOINT_SHARE in points


def test_errors_are_those_of_one_plain_run() -> None:
    """Grouped heads, unlike widths; the last error of the state, against the rule token by token."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.nn.functional.normalize(torch.randn(64, heads, dim, generator=generator), dim=-1)
        for heads, dim in ((1, 8), (1, 8), (2, 4))
    )
    gates = torch.rand(2, 64, 2, generator=generator)
    inputs = RuleInputs(q, k, v, -gates[0], gates[1])
    _, exact = gated_delta_recurrent(*(x.double() for x in inputs), cu_seqlens=[0, 64])
    state = torch.zeros(1, 2, 4, 8)
    for t in range(64):
        _, state = gated_delta_recurrent(
            *(x[t : t + 1] for x in inputs), cu_seqlens=[0, 1], initial_state=state
        )
        state = state.bfloat16().float()
    error = (state[0] - exact[0]).flatten(1).norm(dim=1) / exact[0].flatten(1).norm(dim=1)
    measured = drift(inputs, [s for s in STORAGES if s.name == "bf16"])["storages"]["bf16"]
    # Two orders of the same fp32 sums may round to different bf16 neighbours now and then.
    assert measured["state"][-1] == pytest.approx(error.mean().item(), rel=0.2)
    assert measured["worst_head"] == pytest.approx(error.max().item(), rel=0.2)
