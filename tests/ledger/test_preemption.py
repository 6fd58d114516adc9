"""When a preempted request's state should be moved, and when computed again."""

from __future__ import annotations

import pytest

from denim.ledger.flops import prefill_flops
from denim.ledger.preemption import RATES, recompute_rule
from denim.spec import read_spec
from tests.spec.configs import qwen3_5_0_8b


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_moving_goes_there_and_back(device: str) -> None:
    spec, rates = read_spec(qwen3_5_0_8b()), RATES[device]
    seconds = prefill_flops(spec, 1000) / rates.flops_per_second
    equal = round(seconds * rates.link_bytes_per_second / 2)
    assert recompute_rule(spec, lambda tokens: equal + 1000, device)(1000)
    assert not recompute_rule(spec, lambda tokens: equal - 1000, device)(1000)
