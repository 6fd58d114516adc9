"""The engine with linear heads of 128 x 128, for which Hopper has kernels of its own: in fp32 the tokens of
the CPU, whichever of them runs. Few rows are spread over clusters, many go through the ring; both in one
run."""

from __future__ import annotations

from pathlib import Path

import pytest

from denim.engine import memory_plan
from tests.gpu.test_engine_cuda import assert_same, distance, run
from tests.tiny import checkpoint

pytestmark = pytest.mark.gpu

MEMORY = "128MiB"
TIE = 1e-3  # nats between the two best of the CPU


@pytest.fixture(scope="module", params=[1, 2], ids=["16/16", "8/16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    heads = {"linear_num_key_heads": 16 // request.param, "linear_num_value_heads": 16}
    checkpoint(path, linear_key_head_dim=128, linear_value_head_dim=128, **heads)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> list:
    return run(folder, "cpu", memory=MEMORY)[0]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_states_written_in_every_step(folder: Path, reference: list, graphs: bool) -> None:
    ours, stats = run(folder, "cuda", memory=MEMORY, deferred_writes=None, enforce_eager=not graphs)
    assert (stats["captured_steps"] > 0) == graphs
    assert_same(ours, reference, gap=TIE)


@pytest.mark.parametrize("records", [2, 5, 9])
@pytest.mark.parametrize("batched", [64, 2048])
def test_states_recorded(folder: Path, reference: list, records: int, batched: int) -> None:
    options = {"deferred_writes": records, "max_num_batched_tokens": batched}
    assert_same(run(folder, "cuda", memory=MEMORY, **options)[0], reference, gap=TIE)


def test_recorded_by_many_and_written_by_few(
    folder: Path, reference: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests come into decode one after the other, so that steps record only once enough are there."""
    monkeypatch.setattr(memory_plan, "FORCED_FROM", memory_plan.RECORD_FROM)
    ours, _ = run(folder, "cuda", memory=MEMORY, deferred_writes=5, max_num_batched_tokens=64)
    assert_same(ours, reference, gap=TIE)


def test_bf16_as_with_plain_torch(folder: Path) -> None:
    """Prefill too has kernels for Hopper then."""
    kernels, plain = (
        run(folder, "cuda", memory=MEMORY, dtype="bfloat16", recurrence_backend=form)[0]
        for form in ("triton", "torch")
    )
    assert distance(kernels, plain) < 0.06
