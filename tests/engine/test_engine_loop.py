"""One turn: what has come is done first, then one step, then everything is sent together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from denim.cache.node import as_tokens
from denim.engine.cache_wishes import NO_WISHES
from denim.engine.engine_loop import EngineLoop
from denim.engine.messages import Abort, Accepted, Add, Answer, Ask, Close, Command, Deltas, Event, Refused
from denim.engine.options import EngineOptions
from denim.engine.prompts import ReadPrompt
from denim.sampling_params import SamplingParams
from tests.exactness.judge import Judge

LONG = SamplingParams(temperature=0, max_tokens=100)


def new(ticket: int, params: SamplingParams = LONG, request_id: str | None = None) -> Add:
    return Add(ticket, ReadPrompt(None, as_tokens([1, 2, 3])), params, request_id, 0, NO_WISHES)


class Script:
    """Commands turn by turn, Close when they are used up; and the events of every turn."""

    def __init__(self, folder: Path, turns: Sequence[list[Command]], **options: Any) -> None:
        self._turns = deque(turns)
        self.waited: list[bool] = []
        self.sent: list[list[Event]] = []
        given = {"memory": "1MiB", "max_model_len": 256, "debug": True, **options}
        self.loop = EngineLoop(EngineOptions.of(model=folder, **given), self._receive, self._send)

    def play(self) -> list[list[Event]]:
        self.loop.run()
        assert self.loop.core is None or self.loop.core.stats()["slots"]["used"] == 0
        return self.sent

    def _receive(self, wait: bool) -> list[Command]:
        self.waited.append(wait)
        return self._turns.popleft() if self._turns else [Close()]

    def _send(self, events: Sequence[Event]) -> None:
        self.sent.append(list(events))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_comes_before_the_next_step(mute: tuple[Path, Judge], overlap: bool) -> None:
    """AB-03: between it and the report that nothing runs there is no step."""
    turns: list[list[Command]] = [
        [new(1), new(2)],
        [],
        [Ask(3, "stats"), Abort(1), Abort(2), Abort(9), Ask(4, "stats")],
        [Ask(5, "stats")],
    ]
    script = Script(mute[0], turns, async_scheduling=overlap)
    sent = [event for turn in script.play() for event in turn]
    before, behind, later = (event.value for event in sent if isinstance(event, Answer))
    assert before["running"] == 2
    assert (behind["running"], behind["slots"]["used"], behind["pages"]["used"]) == (0, 0, 0)
    assert before["steps"] == behind["steps"] == later["steps"] == (1 if overlap else 2)
    ends = [delta for event in sent if isinstance(event, Deltas) for _, delta in event.items][-2:]
    assert [delta.finish_reason for delta in ends] == ["abort", "abort"]
    assert script.waited == [True, False, False, True, True]


def test_one_batch_a_turn(mute: tuple[Path, Judge]) -> None:
    """What is accepted is said with the step's deltas; every completion's last delta is among them."""
    params = SamplingParams(temperature=1.0, seed=0, n=3, max_tokens=4)
    sent = Script(mute[0], [[new(1, params, "a"), new(2, params, "a"), new(3, LONG)], *[[]] * 12]).play()
    assert [type(event) for event in sent[0]] == [Accepted, Refused, Accepted, Deltas]
    assert sent[0][0] == Accepted(1, "a")
    assert all([type(event) for event in turn] == [Deltas] for turn in sent[1:])
    ends = [
        (ticket, delta.index)
        for turn in sent
        for event in turn
        if isinstance(event, Deltas)
        for ticket, delta in event.items
        if delta.finished
    ]
    assert sorted(ends) == [(1, 0), (1, 1), (1, 2)]


def test_an_error_while_queueing_loses_nobody_silently(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books start afresh then: who was in them is told."""
    script = Script(mute[0], [[new(1)], [new(2)], [new(3)]])
    core = script.loop.core
    assert core is not None
    queue = core._add_completion

    def fail_once(*args: Any) -> None:
        if core.steps == 1:
            core.steps += 1
            raise KeyError("a bug")
        queue(*args)

    monkeypatch.setattr(core, "_add_completion", fail_once)
    sent = script.play()
    assert [type(event) for event in sent[1]] == [Refused, Refused]
    assert [(event.ticket, type(event.error)) for event in sent[1] if isinstance(event, Refused)] == [
        (2, RuntimeError),
        (1, RuntimeError),
    ]
    assert isinstance(sent[2][0], Accepted)


def test_asleep_it_refuses_and_answers(mute: tuple[Path, Judge]) -> None:
    turns: list[list[Command]] = [
        [new(1), Ask(2, "sleep"), Ask(3, "sleep")],
        [new(4), Abort(1), Ask(5, "check")],
        [Ask(6, "wake"), Ask(7, "wake"), new(8)],
    ]
    first, second, third = Script(mute[0], turns).play()
    assert [type(event) for event in first] == [Accepted, Deltas, Answer, Answer]
    assert [str(event.error) for event in second if isinstance(event, Refused | Answer)] == [
        "the engine sleeps; wake it first"
    ] * 2
    assert [type(event) for event in third] == [Answer, Answer, Accepted, Deltas]
