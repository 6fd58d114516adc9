"""When decode defers its writes: asked for, or chosen where it pays and costs no request its seat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from denim.engine import memory_plan
from denim.engine.capacity import describe
from denim.engine.memory_plan import plan_memory
from denim.engine.options import EngineOptions
from denim.errors import ConfigError
from denim.ledger.deferred import ring_length
from tests.memory.test_layout import QWEN_08B, TINY

CPU = torch.device("cpu")


def records(spec=QWEN_08B, **options) -> int:
    options = EngineOptions.of(**{"memory": "2GiB", "max_model_len": 64, **options})
    return plan_memory(options, spec, CPU)[0].records


def test_only_where_asked_for() -> None:
    assert records() == 0
    assert records(deferred_writes=5) == 5
    assert records(deferred_writes="auto") == 0  # on a CPU nothing is fused


def test_the_start_up_line_says_so() -> None:
    options = EngineOptions.of(memory="2GiB", max_model_len=64, deferred_writes=5)
    line = describe(QWEN_08B, *plan_memory(options, QWEN_08B, CPU), "none")
    assert "float32 states written every 5 steps" in line


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "rule_backend", lambda *_: memory_plan.TRITON)
    length = ring_length(QWEN_08B)
    assert records(deferred_writes="auto", max_num_seqs=64) == length
    options = EngineOptions.of(memory="2GiB", max_model_len=64, max_num_seqs=64)
    layout = plan_memory(options, QWEN_08B, CPU)[0]
    assert [layout.recorded(rows) for rows in (0, 8, 9, 64)] == [0, 0, length, length]
    line = describe(QWEN_08B, *plan_memory(options, QWEN_08B, CPU), "none")
    assert f"states written every {length} steps where 9 or more decode" in line
    assert records(deferred_writes="auto", max_num_seqs=8) == 0
    # All of the memory in slots: with rings fewer requests would run at once.
    assert records(deferred_writes="auto", max_num_seqs=109) == 0


def test_refused() -> None:
    attention_only = replace(TINY, layers=TINY.layers[3:])
    with pytest.raises(ConfigError, match="no layer of this model"):
        records(attention_only, deferred_writes=4)
    for wrong in (1, 34, True, 2.0, "always"):
        with pytest.raises(ConfigError, match="deferred_writes"):
            EngineOptions.of(deferred_writes=wrong)
