"""What is left for the arena: working memory grows with what a step holds, defaults keep a reserve."""

from __future__ import annotations

import pytest

from denim.ledger.budget import HOST_SHARE, RESERVE, arena_budget, working_bytes
from denim.ledger.devices import find_device
from denim.ledger.parameters import weight_bytes
from denim.spec import ModelSpec, read_spec
from denim.spec.published import published_configs


def published(name: str) -> ModelSpec:
    return read_spec(published_configs()[name])


def test_a_sampled_row_holds_its_logits_three_times_in_fp32() -> None:
    spec = published("Qwen3.5-0.8B")
    one, many = (working_bytes(spec, 2048, rows, 64) for rows in (1, 101))
    assert many - one == pytest.approx(100 * RESERVE * 3 * 4 * spec.vocab_size, abs=1)


@pytest.mark.parametrize(
    ("name", "widest"), [("Falcon-Mamba-7B", 8 * 8192), ("Qwen3.5-0.8B", 16 * 11 * 128 + 16 * 5 * 64)]
)
def test_a_token_holds_the_widest_layer_s_inputs(name: str, widest: int) -> None:
    """Of a scan eight numbers a channel; of a matrix state keys, values and a row of the chunk's matrices."""
    few, many = (working_bytes(published(name), tokens, 1, 64) for tokens in (1000, 2000))
    assert many - few == pytest.approx(1000 * RESERVE * 4 * widest, abs=1)


def test_a_cpu_engine_takes_a_quarter_of_what_weights_leave() -> None:
    spec, cpu = published("Qwen3.5-0.8B"), find_device("CPU")
    free = cpu.memory_bytes - weight_bytes(spec)
    assert arena_budget(spec, cpu, 64, None) == int(free * HOST_SHARE)
