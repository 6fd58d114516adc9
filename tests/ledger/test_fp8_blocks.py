"""What FP8 blocks save, against what the published configs promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from denim.ledger import count_parameters, weight_bytes
from denim.ledger.devices import find_device
from denim.ledger.fp8_blocks import fp8_saving
from denim.ledger.step_floor import weights_read
from denim.memory.capacity_plan import CapacityPlan
from denim.spec import read_spec
from denim.spec.published import FOLDER as CONFIGS


def test_a_dense_model_is_nearly_half() -> None:
    """All but embedding, head, the MTP head's first projection, norms, convolutions, β and decay."""
    spec = read_spec(CONFIGS / "qwen3_5_27b_fp8.json")
    counts = count_parameters(spec)
    gates = 48 * 2 * 48 * 5120
    small = counts.total - 2 * 248320 * 5120 - 2 * 5120 * 5120 - gates
    assert fp8_saving(spec) == pytest.approx(small, rel=1e-3)
    scales = fp8_saving(spec) / (128 * 128) * 4
    assert weight_bytes(spec, fp8_blocks=True) == pytest.approx(2 * counts.total - small + scales, rel=1e-4)


def test_a_sparse_model_is_nearly_half() -> None:
    """Mixers, experts and the shared one stay; router, gates, embedding and head do not."""
    spec = read_spec(CONFIGS / "qwen3_next_80b_a3b_fp8.json")
    linear = 2048 * (2 * 16 * 128 + 2 * 32 * 128) + 32 * 128 * 2048
    full = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048
    kept = 36 * linear + 13 * full + 49 * 3 * 2048 * 512 * (1 + 512)
    assert fp8_saving(spec) == pytest.approx(kept, rel=1e-3)
    assert fp8_saving(spec) > 0.97 * count_parameters(spec).total
    assert weight_bytes(spec, fp8_blocks=True) < 0.9 * find_device("h200").memory_bytes < weight_bytes(spec)


def test_a_step_reads_the_chosen_experts_in_fp8() -> None:
    spec, h200 = read_spec(CONFIGS / "qwen3_next_80b_a3b_fp8.json"), find_device("h200")
    without = replace(h200, fp8_blocks=False)
    gates = 36 * 2 * 32 * 2048 + 48 * (512 + 1) * 2048
    in_bf16 = 2 * (2048 * spec.vocab_size + gates)
    one, plain = weights_read(spec, 1, h200), weights_read(spec, 1, without)
    assert one == pytest.approx(in_bf16 + (plain - in_bf16) / 2, rel=2e-3)
    saved = weights_read(spec, 10**5, without) - weights_read(spec, 10**5, h200)
    assert saved == pytest.approx(fp8_saving(spec, mtp=False), rel=1e-6)


CHANGES = [{"weight_blocks": None}, {"weight_blocks": (64, 64)}, {"dtype": "float32"}]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_saved_elsewhere(change: dict) -> None:
    spec = read_spec(CONFIGS / "qwen3_5_27b_fp8.json")
    changed = replace(spec, **change)
    assert fp8_saving(changed) == 0
    assert weight_bytes(changed, fp8_blocks=True) == weight_bytes(changed)


def test_plan_and_floor_follow_the_device() -> None:
    spec = read_spec(CONFIGS / "qwen3_5_27b_fp8.json")
    h200 = find_device("h200")
    without = replace(h200, fp8_blocks=False)
    plan, other = CapacityPlan.of(spec, h200), CapacityPlan.of(spec, without)
    assert other.weight_bytes - plan.weight_bytes == fp8_saving(spec)
    assert plan.arena_bytes > other.arena_bytes
    saved = weights_read(spec, 1, without) - weights_read(spec, 1, h200)
    assert saved == fp8_saving(spec, mtp=False) < fp8_saving(spec)
    assert not find_device("l40s").fp8_blocks
