"""A slot that holds windows alone: it moves to the host and back, and its token count is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.harness import AXES, COLD, Way, greedy, make_core, run, tokens_of
from tests.exactness.judge import Judge, judge_run
from tests.families.lfm2 import save
from tests.families.row import VOCAB


@pytest.mark.parametrize("how", ["swapped", "recomputed"])
def test_preemption(tmp_path: Path, how: str) -> None:
    judge = Judge(save(tmp_path))
    cases = [greedy(tokens_of(n, n, VOCAB), 30) for n in (2, 40, 65)]
    outcome = run(tmp_path, cases, AXES["preempted"][how](Way()))
    judge_run(judge, cases, outcome)
    counts = {name: outcome.stats[f"preempted_{name}"] for name in ("swap", "recompute")}
    assert (counts["swap"] > 0, counts["recompute"] > 0) == (how == "swapped", how == "recomputed")


def test_unequal_lengths_in_one_batch(tmp_path: Path) -> None:
    """PA-02: prompts around the convolution's width are not run over padding."""
    judge = Judge(save(tmp_path))
    cases = [greedy(tokens_of(n, n, VOCAB), 6, logprobs=0, prompt_logprobs=0) for n in (3, 4, 40, 1, 2)]
    for way in (COLD, Way(), Way(options={"max_num_batched_tokens": 6})):
        judge_run(judge, cases, run(tmp_path, cases, way))


def test_tag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slot that stands for another number of tokens ends the request, and is never read."""
    save(tmp_path)
    case = greedy(tokens_of(10, 0, VOCAB), 5)
    core = make_core(tmp_path, [case], COLD)
    core.add(*case)
    core.step()
    core.step()
    (request,) = core.scheduler.requests.values()
    assert core.arena.tag(request.slot) == (request.computed, 0)
    core.arena.commit(request.slot, request.computed - 1)
    core.step()
    assert f"stands for {request.computed - 1} tokens" in caplog.text
    assert not core.requests, "it goes on with a state for another number of tokens"
