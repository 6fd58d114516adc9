"""One turn: what has come is done first, then one step, then everything is sent together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from denim.cache.node import as_tokens
from denim.engine.cache_wishes import NO_WISHES
from denim.engine.engine_loop import EngineLoop
from denim.engine.messages import (
    Abort,
    Accepted,
    Add,
    Answer,
    Ask,
    Close,
    Command,
    Deltas,
    Event,
    Refused,
    State,
)
from denim.engine.options import EngineOptions
from denim.engine.prompts import ReadPrompt
from denim.engine.unavailable import EngineAsleepError
from denim.errors import RequestError
from denim.sampling_params import SamplingParams
from denim.structured_output import StructuredOutput
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
    assert [type(event) for event in first] == [Accepted, Deltas, State, Answer, Answer]
    assert first[2] == State(None)
    assert [str(event.error) for event in second if isinstance(event, Refused | Answer)] == [
        "the engine sleeps; wake it first"
    ] * 2
    assert [type(event) for event in third] == [State, Answer, Answer, Accepted, Deltas]


class Compiling(Script):
    """Forms are compiled in the turn after, to `outcome` (None: never), and forgotten at once. `begun`: those
    that were asked for, one after the other."""

    def __init__(self, folder: Path, turns: Sequence[list[Command]], outcome: object = None) -> None:
        super().__init__(folder, turns)
        self.begun: list[Future[Any]] = []
        self._outcome = outcome
        assert self.loop.core is not None
        self.loop.core.grammars.compile = self._compile  # type: ignore[method-assign]

    def _compile(self, form: StructuredOutput) -> Future[Any]:
        if not self.begun or self.begun[-1].done():
            self.begun.append(Future())
        return self.begun[-1]

    def _receive(self, wait: bool) -> list[Command]:
        if self._outcome is not None and self.begun and not self.begun[-1].done():
            if isinstance(self._outcome, RequestError):
                self.begun[-1].set_exception(self._outcome)
            else:
                self.begun[-1].set_result(self._outcome)
        return super()._receive(wait)


FORMED = SamplingParams(n=2, structured=StructuredOutput(regex="a+"))


def test_an_abort_while_the_form_is_compiled(speaking: Path) -> None:
    """Who aborts by id still reads, and is told."""
    (sent,) = Compiling(speaking, [[new(1, FORMED, "mine")], [Abort(1), Abort(1)]]).play()
    accepted, deltas = sent
    assert accepted == Accepted(1, "mine")
    assert isinstance(deltas, Deltas)
    ends = [(ticket, delta.index, delta.finish_reason) for ticket, delta in deltas.items]
    assert ends == [(1, 0, "abort"), (1, 1, "abort")]


def test_sleep_while_a_form_is_compiled(speaking: Path) -> None:
    """Nothing of it waits for the engine that wakes, which would compile it in its turn."""
    script = Compiling(speaking, [[new(1, FORMED)], [Ask(2, "sleep"), Ask(3, "wake")], []])
    (sent,) = script.play()
    assert [type(event) for event in sent] == [Refused, State, Answer, State, Answer]
    assert isinstance(sent[0], Refused) and isinstance(sent[0].error, EngineAsleepError)


def test_a_form_that_cannot_be_compiled_is_not_tried_again(speaking: Path) -> None:
    """To try it again all others would wait."""
    script = Compiling(speaking, [[new(1, FORMED), new(2, FORMED)], []], RequestError("no", "regex"))
    (sent,) = script.play()
    errors = [event.error for event in sent if isinstance(event, Refused)]
    assert [str(error) for error in errors] == ["no", "no"]
    assert errors[0] is not errors[1], "each client raises its own"
    assert len(script.begun) == 1


def test_a_form_that_was_forgotten_is_compiled_beside_the_turn_again(speaking: Path) -> None:
    script = Compiling(speaking, [[new(1, FORMED)], [], []], outcome="compiled")
    assert script.play() == []
    assert len(script.begun) == 1 + 3, "in each turn after, that of Close too"
