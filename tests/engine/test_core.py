"""The loop under faults: aborts at any moment, states full of NaN, steps that fail, memory that is short."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from denim import LLM, RequestError, SamplingParams
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from denim.engine.outputs import RequestOutput
from denim.memory.layout import PAGE
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def core_of(folder: Path, **options: Any) -> EngineCore:
    return EngineCore(
        EngineOptions.of(model=folder, **{"memory": "1MiB", "max_model_len": 256, "debug": True, **options})
    )


def add(core: EngineCore, length: int, seed: int = 0, **params: Any) -> RequestOutput:
    values = {"temperature": 0, "max_tokens": 12, **params}
    id_ = core.add(tokens_of(length, seed, VOCAB), SamplingParams(**values))
    return core.requests[id_].output


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
    assert [stats[name] for name in ("running", "waiting", "swapped")] == [0, 0, 0]
    assert core.swap.used_bytes == 0
    assert not core.requests and not core._request_of and not core.scheduler.requests
    core.check()


def judged(judge: Judge, *outputs: RequestOutput) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "length"
            judge.greedy(output.prompt_token_ids, completion.token_ids)


@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_every_step(mute: tuple[Path, Judge], n: int) -> None:
    """AB-03: waiting, in any segment of the prompt, in decode; what others get does not change."""
    folder, judge = mute
    core = core_of(folder, max_num_batched_tokens=40, chunk_size=16)
    for moment in range(12):
        before, victim, after = add(core, 30), add(core, 90, 1, n=n), add(core, 50, 2)
        for _ in range(moment):
            core.step()
        deltas = core.abort(victim.request_id)
        assert [delta.finish_reason for delta in deltas] == ["abort"] * len(deltas)
        assert all(c.finish_reason in ("abort", "length") for c in victim.outputs)
        assert victim.finished
        for completion in victim.outputs:
            judge.greedy(victim.prompt_token_ids, completion.token_ids)
        finish(core)
        judged(judge, before, after)
        assert_idle(core)
    assert core.abort("nobody") == []


def test_abort_of_waiting_requests(mute: tuple[Path, Judge]) -> None:
    """AB-06: half of fifty are aborted before they ran."""
    folder, judge = mute
    core = core_of(folder, max_num_seqs=4)
    outputs = [add(core, 20, seed, max_tokens=4) for seed in range(50)]
    core.step()
    for output in outputs[1::2]:
        core.abort(output.request_id)
    finish(core)
    judged(judge, *outputs[0::2])
    assert all(output.outputs[0].finish_reason == "abort" for output in outputs[1::2])
    assert_idle(core)


def test_abort_of_swapped_requests(mute: tuple[Path, Judge]) -> None:
    folder, judge = mute
    core = core_of(folder, max_num_seqs=2)
    core.scheduler._recompute_cheaper = lambda tokens: False
    victim, other = add(core, 40), add(core, 41)
    for _ in range(4):
        core.step()
    urgent = [core.add([1, 2, 3], GREEDY, priority=-1) for _ in range(2)]
    core.step()
    assert core.stats()["swapped"] == 2
    core.abort(victim.request_id)
    assert core.stats()["swapped"] == 1
    finish(core)
    assert len(urgent) == 2
    judged(judge, other)
    assert_idle(core)


def test_more_sessions_than_slots(mute: tuple[Path, Judge]) -> None:
    """AB-07, ME-10: strictly one after another, three times as many as there are slots."""
    folder, judge = mute
    core = core_of(folder, memory="350KiB")
    slots = core.stats()["slots"]["total"]
    for number in range(3 * slots):
        output = add(core, 1 + number, max_tokens=2)
        finish(core)
        judged(judge, output)
        assert core.step() == []
        assert_idle(core)


def test_a_queue_under_pressure(mute: tuple[Path, Judge]) -> None:
    """ME-09: fifty prompts of 0.6 of the arena each, three rounds."""
    folder, judge = mute
    core = core_of(folder, memory="310KiB", max_model_len=None)
    long = int(0.6 * core.scheduler.config.max_model_len)
    for _ in range(3):
        outputs = [add(core, long - seed, seed, max_tokens=2) for seed in range(10)]
        finish(core)
        judged(judge, *outputs)
        assert_idle(core)


@pytest.mark.parametrize("poison", ["recurrent", "conv", "kv"])
@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("overlapped", [True, False])
def test_nan_ends_one_request_only(
    mute: tuple[Path, Judge], poison: str, debug: bool, overlapped: bool
) -> None:
    """DS-08: at step 5 the memory of one request is overwritten with NaN. It ends with an error, and nothing
    of it is seen by those beside it or after it, in any slot."""
    folder, judge = mute
    core = core_of(folder, debug=debug, max_num_seqs=4, async_scheduling=overlapped)
    beside, victim = add(core, 30), add(core, 40, 1, max_tokens=50)
    for _ in range(5):
        core.step()
    (record,) = (r for r in core.scheduler.requests.values() if [*r.prompt_ids] == victim.prompt_token_ids)
    storage = core.runner.storage
    if poison == "kv":
        storage.kv(3)[record.pages] = torch.nan
    else:
        storage.state(1, poison)[record.slot] = torch.nan
    core.step()
    if overlapped:
        core.step()
    assert victim.outputs[0].finish_reason == "error"
    assert victim.finished
    assert len(victim.outputs[0].token_ids) == 5
    judge.greedy(victim.prompt_token_ids, victim.outputs[0].token_ids)
    fresh = [add(core, length, 2) for length in (1, 2, 3, 4, 15, 40, 70) * 3]
    again = add(core, 40, 1)
    finish(core)
    judged(judge, beside, *fresh, again)
    assert again.num_cached_tokens == 0
    assert_idle(core)


class Broken(RuntimeError):
    pass


def fail_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    forward = core.runner.forward.model.forward

    def raise_once(*args: Any) -> Any:
        monkeypatch.setattr(core.runner.forward.model, "forward", forward)
        raise error

    monkeypatch.setattr(core.runner.forward.model, "forward", raise_once)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failing_step_ends_its_requests_only(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """At any step; requests that did not take part go on, and so does the engine."""
    folder, judge = mute
    core = core_of(folder, max_num_seqs=4)
    for moment in range(6):
        inside = [add(core, 20, n=n), add(core, 9)]
        for _ in range(moment):
            core.step()
        waiting = [add(core, 15, seed) for seed in range(5)] if moment else []
        fail_once(core, monkeypatch, Broken("a kernel failed"))
        deltas = core.step()
        ended = {(delta.request_id, delta.index) for delta in deltas}
        assert ended and {delta.finish_reason for delta in deltas} == {"error"}
        core.check()
        finish(core)
        for output in [*inside, *waiting]:
            for completion in output.outputs:
                judge.greedy(output.prompt_token_ids, completion.token_ids)
                failed = (output.request_id, completion.index) in ended
                assert completion.finish_reason == ("error" if failed else "length")
        assert_idle(core)


def test_a_failing_step_with_swaps(mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way to or from the host when the step failed is lost with it, and nothing more."""
    folder, judge = mute
    core = core_of(folder, max_num_seqs=1)
    core.scheduler._recompute_cheaper = lambda tokens: False
    victim = add(core, 40)
    for _ in range(3):
        core.step()
    core.add([1, 2, 3], GREEDY, priority=-1)
    fail_once(core, monkeypatch, Broken("a kernel failed"))
    core.step()
    finish(core)
    assert victim.outputs[0].finish_reason in ("error", "length")
    assert_idle(core)
    after = add(core, 40)
    finish(core)
    judged(judge, after)


def test_a_failing_step_in_which_entries_move(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they lie is uncertain then: all end, those too that were not in the step."""
    folder, judge = mute
    core = core_of(folder, max_num_seqs=30, max_num_batched_tokens=40, checkpoint_policy="none")
    outputs = [add(core, 20, seed) for seed in range(24)]
    while core.stats()["running"] < 18:
        core.step()
    for output in outputs[:16:2]:
        core.abort(output.request_id)
    pages = core.stats()["pages"]["free"]
    assert core.scheduler._holdings.compactor.make_room({PAGE: pages + 1}), "nothing could move"
    fail_once(core, monkeypatch, Broken("a kernel failed"))
    while core.has_work:
        core.step()
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort", "error"}
    assert_idle(core)
    after = add(core, 40)
    finish(core)
    judged(judge, after)


def test_interrupts_are_passed_on(mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, judge = mute
    core = core_of(folder)
    lost = add(core, 20)
    fail_once(core, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert lost.outputs[0].finish_reason == "error"
    assert_idle(core)
    after = add(core, 20)
    finish(core)
    judged(judge, after)


def test_gauges_follow_the_load(mute: tuple[Path, Judge]) -> None:
    """ME-13: pages are those of the tokens known, slots those of the requests, after every step."""
    core = core_of(mute[0])
    outputs = [add(core, length, max_tokens=40) for length in (1, 15, 16, 17, 60)]
    core.step()
    while core.has_work:
        stats = core.stats()
        running = [r for r in core.scheduler.requests.values()]
        assert stats["pages"]["used"] == sum(-(-r.computed // 16) for r in running)
        assert stats["slots"]["used"] == stats["running"] == len(running)
        for kind in ("slabs", "pages", "slots"):
            assert stats[kind]["used"] + stats[kind]["free"] <= stats[kind]["total"]
        core.step()
    assert all(output.finished for output in outputs)
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    assert core.stats()["tokens"] == tokens
    assert_idle(core)


def test_memory_is_flat(mute: tuple[Path, Judge]) -> None:
    """MT-04: what the engine holds does not grow from step 100 to step 500."""
    import psutil

    llm = LLM(mute[0], memory="2MiB", max_model_len=600)
    process = psutil.Process()
    for batch in (1, 4):
        outputs = [add(llm.core, 5, seed, max_tokens=500) for seed in range(batch)]
        sizes = []
        for step in range(500):
            llm.core.step()
            if step in (100, 499):
                sizes.append(process.memory_info().rss)
        assert sizes[1] - sizes[0] < 0.01 * sizes[0]
        finish(llm.core)
        judged(mute[1], *outputs)


def test_request_ids(mute: tuple[Path, Judge]) -> None:
    """An id is free again when its request has ended."""
    core = core_of(mute[0])
    core.add([1, 2, 3], GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="'mine' is in use"):
        core.add([1, 2, 3], GREEDY, request_id="mine")
    finish(core)
    assert core.add([1, 2, 3], GREEDY, request_id="mine") == "mine"
    finish(core)


def test_urgent_requests_go_first(mute: tuple[Path, Judge]) -> None:
    """Also past decode rows that use the whole budget of a step."""
    folder, judge = mute
    core = core_of(folder, max_num_batched_tokens=2)
    slow = [add(core, 4, seed, max_tokens=40) for seed in range(2)]
    for _ in range(8):
        core.step()
    urgent = core.requests[core.add(tokens_of(3, 9, VOCAB), GREEDY, priority=-1)].output
    for _ in range(25):
        core.step()
    assert urgent.finished
    assert not any(output.finished for output in slow)
    finish(core)
    judged(judge, urgent)
    for output in slow:
        judge.greedy(output.prompt_token_ids, output.outputs[0].token_ids)


def test_order_of_arrival(mute: tuple[Path, Judge]) -> None:
    core = core_of(mute[0], max_num_seqs=1)
    outputs = [add(core, 5, seed, max_tokens=random.Random(seed).randrange(1, 5)) for seed in range(6)]
    ended = []
    while core.has_work:
        ended += [delta.request_id for delta in core.step() if delta.finished]
    assert ended == [output.request_id for output in outputs]


def test_metrics_are_in_order(mute: tuple[Path, Judge]) -> None:
    core = core_of(mute[0])
    output = add(core, 5)
    finish(core)
    times = output.metrics
    assert times is not None
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


def test_text_that_cannot_be_made(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that fails ends the one request; the scheduler and its mates go on."""
    core = EngineCore(EngineOptions.of(model=speaking, memory="1MiB", max_model_len=256, debug=True))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ids = [core.add([5, 6, 7], params), core.add([8, 9], params)]
    victim, mate = (core.requests[id_] for id_ in ids)
    core.step()

    def fail(token: int) -> str:
        raise ValueError("no such token")

    (completion,) = victim.completions.values()
    monkeypatch.setattr(completion._text, "push", fail)
    finish(core)
    assert victim.output.outputs[0].finish_reason == "error"
    assert mate.output.outputs[0].finish_reason == "length"
    assert_idle(core)


def test_refused_requests_change_no_seed(mute: tuple[Path, Judge]) -> None:
    """What others draw does not depend on requests that never ran."""
    params = SamplingParams(temperature=1.0, max_tokens=8)
    drawn = []
    for refused in (False, True):
        core = core_of(mute[0])
        if refused:
            with pytest.raises(RequestError):
                core.add([1, 2], SamplingParams(stop_token_ids=[VOCAB + 5]))
        output = core.requests[core.add([1, 2, 3], params)].output
        finish(core)
        drawn.append(output.outputs[0].token_ids)
    assert drawn[0] == drawn[1]
