"""Captured steps: the same tokens as eager ones, whatever the steps hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from denim.runner.step_shapes import MOST_PREFILL_SPANS
from denim.sampling_params import SamplingParams
from tests.tiny import VOCAB, checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    checkpoint(path)
    return path


def core_of(folder: Path, **options: object) -> EngineCore:
    defaults = {"memory": "200MiB", "max_num_seqs": 24, "max_model_len": 3000, "debug": True}
    return EngineCore(EngineOptions.of(model=folder, device="cuda", **{**defaults, **options}))


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drive(core: EngineCore, arrivals: dict[int, list[int]]) -> list[list[int]]:
    """Tokens of requests of so many prompt tokens that arrive at so many steps."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs, step, seed = [], 0, 0
    while core.has_work or any(at >= step for at in arrivals):
        for length in arrivals.get(step, ()):
            request_id = core.add(prompt_of(length, seed), params)
            outputs.append(core.requests[request_id].output)
            seed += 1
        core.step()
        step += 1
    core.settle()
    core.check()
    return [output.outputs[0].token_ids for output in outputs]


ARRIVALS = {
    "one prompt": {0: [100]},
    "a prompt beside decode rows": {0: [5, 6, 7], 3: [200], 5: [64, 1], 6: [63, 65, 2, 3]},
    "more prompts than a shape has spans": {0: [9 + n for n in range(MOST_PREFILL_SPANS + 3)]},
    "long prompts": {0: [2500], 2: [1000, 1100], 9: [2048]},
    "a host that is many steps ahead": {0: [2900, 2800, 2700]},
}


@pytest.mark.parametrize("arrivals", list(ARRIVALS.values()), ids=list(ARRIVALS))
def test_captured_steps_give_the_tokens_of_eager_ones(folder: Path, arrivals: dict[int, list[int]]) -> None:
    eager = core_of(folder, enforce_eager=True)
    expected = drive(eager, arrivals)
    assert eager.stats()["captured_steps"] == 0
    captured = core_of(folder, max_num_batched_tokens=512)
    assert drive(captured, arrivals) == expected
    stats = captured.stats()
    assert stats["captured_steps"] >= stats["steps"] - 2


def test_what_a_graph_cannot_do_runs_beside_it(folder: Path) -> None:
    """Reports on a prompt need all its logits; the steps behind it are captured again."""
    core = core_of(folder)
    asking = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    request_id = core.add(prompt_of(50, 1), asking)
    output = core.requests[request_id].output
    while core.has_work:
        core.step()
    core.settle()
    assert len(output.prompt_logprobs or []) == 50
    assert len(output.outputs[0].logprobs or []) == 8
    stats = core.stats()
    assert 0 < stats["captured_steps"] < stats["steps"]


def test_seats_of_any_number_have_shapes(folder: Path) -> None:
    for seats in (1, 3, 9):
        core = core_of(folder, max_num_seqs=seats)
        tokens = drive(core, {0: [4] * seats})
        assert len(tokens) == seats and all(len(row) == 12 for row in tokens)


@pytest.mark.parametrize("together", [3, 5, 6, 7, 9, 17])
def test_cg_04_numbers_of_rows_between_the_captured_ones(folder: Path, together: int) -> None:
    """CG-04: rows are padded to the captured number; tokens are those of eager steps."""
    arrivals = {0: list(range(20, 20 + together))}
    assert drive(core_of(folder), arrivals) == drive(core_of(folder, enforce_eager=True), arrivals)


def test_cg_05_cg_06_me_11_churn_at_the_most_requests(folder: Path) -> None:
    """CG-05, CG-06, ME-11: every seat taken, requests leave and come, so that slots are permuted and padding
    stands beside live requests that are not in the step. Tokens are those of eager steps one by one."""
    arrivals = {step: [3 + step % 7, 40 + step] for step in range(0, 60, 2)} | {31: [900]}
    crowded = {"max_num_seqs": 5, "memory": "100MiB"}
    captured = core_of(folder, **crowded)
    expected = drive(core_of(folder, **crowded, enforce_eager=True, async_scheduling=False), arrivals)
    assert drive(captured, arrivals) == expected
    assert captured.stats()["slots"]["used"] == 0


@pytest.mark.parametrize("batch", [1, 4])
def test_mt_04_five_hundred_overlapping_decode_steps(folder: Path, batch: int) -> None:
    """MT-04: the tokens of steps that wait for each other, and memory that does not grow."""
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    tokens, memory = [], []
    for overlapped in (True, False):
        core = core_of(folder, async_scheduling=overlapped)
        ids = [core.add(prompt_of(30, n), params) for n in range(batch)]
        outputs = [core.requests[request_id].output for request_id in ids]
        for step in range(510):
            if step in (100, 490):
                memory.append(torch.cuda.memory_allocated())
            core.step()
        core.settle()
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1] and all(len(row) == 500 for row in tokens[0])
    assert memory[1] < 1.01 * memory[0] and memory[3] < 1.01 * memory[2]
