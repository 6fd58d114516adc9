"""Which memories a trace is replayed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from denim.cache import hit_curve
from denim.commands.prefix_curve import BOUNDLESS, HOST_GIB, prefix_curve
from denim.ledger.devices import find_device
from denim.ledger.step_floor import prefill_floor
from denim.memory.capacity_plan import CapacityPlan
from denim.spec import read_spec
from tests.spec.configs import qwen3_5_0_8b


def trace_in(folder: Path) -> Path:
    trace = folder / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}))
    return trace


def replay_to(tail: tuple[int, int], seen: list[int]) -> Callable[..., list[SimpleNamespace]]:
    """A replay whose slowest requests have so many tokens, of which the second number are reused."""

    def replay(spec: Any, layout: Any, trace: Any, sizes: list[int], segment: int) -> list[SimpleNamespace]:
        seen.extend(sizes)
        return [SimpleNamespace(token_hit_rate=0, flop_hit_rate=0, evicted=0, tail=tail) for _ in sizes]

    return replay


@pytest.mark.parametrize(("given", "hosts"), [(0, [gib << 30 for gib in HOST_GIB]), (1 << 33, [1 << 33])])
def test_a_checkpoint_may_lie_on_the_device_or_on_the_host(
    given: int, hosts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    monkeypatch.setattr(hit_curve, "hit_curve", replay_to((9, 0), seen))
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), find_device("H200"), host_memory=given)
    points = prefix_curve(plan, trace_in(tmp_path))
    assert points is not None
    arena = plan.arena_bytes
    assert seen == [arena // 2, arena, *(arena + host for host in hosts), BOUNDLESS]
    assert [point["host_bytes"] for point in points] == [0, 0, *hosts, None]


def test_the_first_token_takes_what_is_left_to_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CapacityPlan.of(read_spec(qwen3_5_0_8b()), find_device("H200"))
    seconds = []
    for reused in (0, 100_000, 199_000):
        monkeypatch.setattr(hit_curve, "hit_curve", replay_to((200_000, reused), []))
        seconds.append(prefix_curve(plan, trace_in(tmp_path))[0]["p95_seconds"])
    whole, half, little = seconds
    assert prefill_floor(plan.spec, plan.ledger, plan.device, 200_000).seconds == pytest.approx(
        whole, rel=0.01
    )
    assert whole / 2 < half < whole and little < whole / 50
