"""What is counted and timed of a request, whatever the API."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from denim.engine.outputs import StreamDelta
from denim.engine.prompts import ReadPrompt
from denim.sampling_params import SamplingParams
from denim.server import generation
from denim.server.errors import ApiError
from denim.server.generation import Job, generate
from denim.server.limits import Gate
from denim.server.options import ServerOptions
from denim.server.record import RequestRecord

Told = Sequence[tuple[float, StreamDelta]]  # (seconds, delta) of one prompt


class Replies:
    """An engine that says what it is told, prompt by prompt, and moves the clock on."""

    def __init__(self, clock: list[float], replies: Sequence[Told]) -> None:
        self._clock, self._replies = clock, list(replies)

    async def submit(self, *_: Any, **__: Any) -> Replies:
        return self

    async def __aenter__(self) -> AsyncIterator[StreamDelta]:
        return self._deltas(self._replies.pop(0))

    async def __aexit__(self, *_: object) -> None:
        pass

    async def _deltas(self, told: Told) -> AsyncIterator[StreamDelta]:
        for seconds, delta in told:
            self._clock[0] = seconds
            yield delta


class Observed(list[float]):
    observe = list.append


class Run:
    """A request for `n` completions of each prompt. choices: of the deltas that came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *replies: Told, n: int = 1) -> None:
        clock = [0.0]
        monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        self.record = RequestRecord("id", "POST", "/v1/completions", started=0.0)
        self.choices: list[int] = []
        self.first_token, self.inter_token, self.generated = Observed(), Observed(), Observed()
        metrics = SimpleNamespace(
            first_token=self.first_token, inter_token=self.inter_token, note_generated=self.generated.append
        )
        options = ServerOptions()
        self.gate = Gate(options)
        serving: Any = SimpleNamespace(
            options=options, gate=self.gate, engine=Replies(clock, replies), metrics=metrics
        )
        prompts = [ReadPrompt(None, array("i", [1, 2, 3]))] * len(replies)
        self._deltas = generate(serving, self.record, Job(prompts, SamplingParams(n=n), 0, None, False))

    def read(self) -> Run:
        async def all_of_it() -> None:
            async for choice, _ in self._deltas:
                self.choices.append(choice)

        asyncio.run(all_of_it())
        return self


def delta(index: int = 0, tokens: int = 1, ends: str | None = None, cached: int = 0) -> StreamDelta:
    return StreamDelta("r", index, "", [5] * tokens, finish_reason=ends, num_cached_tokens=cached)


def test_times_are_of_tokens_however_many_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [(1.0, delta()), (3.0, delta(tokens=4)), (4.0, delta(ends="stop"))]).read()
    assert run.first_token == [1.0]
    assert run.inter_token == [0.5, 1.0]
    assert (run.generated, run.record.completion_tokens, run.record.first_token) == ([1, 4, 1], 6, 1.0)
    assert run.record.finish_reasons == {"stop": 1}


def test_a_delta_without_tokens_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [(1.0, delta()), (2.0, delta(tokens=0)), (5.0, delta(ends="length"))]).read()
    assert run.inter_token == [4.0]


def test_every_choice_has_its_own_times_and_the_request_one_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [(4.0, delta(0, ends="stop")), (4.0, delta(1, ends="stop"))]
    run = Run(monkeypatch, [(1.0, delta(0)), (3.0, delta(1)), *ends], n=2).read()
    assert run.choices == [0, 1, 0, 1]
    assert (run.first_token, run.inter_token) == ([1.0], [3.0, 1.0])


def test_choices_of_a_batch_are_counted_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [[(1.0, delta(index, ends="stop", cached=cached)) for index in range(2)] for cached in (2, 1)]
    run = Run(monkeypatch, *told, n=2).read()
    assert sorted(run.choices) == [0, 1, 2, 3]
    assert (run.record.prompt_tokens, run.record.cached_tokens) == (6, 3)
    assert run.gate.open == run.gate.waiting == 0


@pytest.mark.parametrize(("ends", "status"), [("error", 500), ("abort", 503)])
def test_an_end_that_is_no_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, ends: str, status: int
) -> None:
    run = Run(monkeypatch, [(1.0, delta()), (2.0, delta(ends=ends))])
    with pytest.raises(ApiError) as caught:
        run.read()
    assert caught.value.status_code == status
    assert ("retry-after" in (caught.value.headers or {})) == (status == 503)
    assert run.choices == [0] and run.gate.open == 0
