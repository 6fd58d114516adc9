"""The loop that runs an engine: commands in, events out, a step between them.

Owns the turn: take what has come, make one step, send what it brought in one batch. So a command never waits
for more than one step. A request whose structured output has to be compiled waits beside the turn until it
is. Touches `EngineCore` alone; does not know whether it runs in a thread or in a process, nor how messages
travel.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from typing import Any, NamedTuple

import torch

from denim.engine.core import EngineCore
from denim.engine.grammars import COMPILE_SECONDS, too_long_to_compile
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
from denim.engine.outputs import StreamDelta
from denim.engine.unavailable import EngineAsleepError
from denim.errors import DenimError

log = logging.getLogger("denim")

# Seconds between two looks at what is written to files while no request runs.
TENDING = 2e-3

# Questions that are answered by the method of that name of `EngineCore`, and by `EngineLoop` itself.
OF_THE_CORE = ("stats", "check", "cache_snapshot", "live_view", "reset_prefix_cache")
OF_THE_LOOP = ("sleep", "wake")
COMPILING_LOOK = 0.005  # seconds between two looks for commands while nothing else is done than compiling


class EngineLoop:
    """`receive(wait)` gives the commands that have come, at least one if it is to wait. `send` takes the
    events of one turn.

    Raises what `EngineCore` raises when the model cannot be served.
    """

    def __init__(
        self,
        options: EngineOptions,
        receive: Callable[[bool], Iterable[Command]],
        send: Callable[[Sequence[Event]], None],
    ) -> None:
        self.options = options
        self.core: EngineCore | None = EngineCore(options)  # None: the engine sleeps
        self._receive = receive
        self._send = send
        self._open = True
        self._events: list[Event] = []  # of this turn
        self._tickets: dict[str, int] = {}  # of the requests that run, by id
        self._ids: dict[int, str] = {}
        self._compiling: dict[int, _Waiting] = {}  # by ticket

    def run(self) -> None:
        """Until Close comes; then what still runs ends, and its memory is free."""
        while self._open:
            idle = not self._busy and not self._compiling
            tending = idle and self.core is not None and self.core.tend()
            if tending:
                time.sleep(TENDING)
            for command in self._receive(idle and not tending):
                self._obey(command)
            if self._compiling:
                self._take_compiled()
            if self._open and self.core is not None and self.core.has_work:
                self._tell(self.core.step())
            if self._events:
                self._send(self._events)
                self._events = []
        if self.core is not None:
            self.core.close()

    @property
    def _busy(self) -> bool:
        return self.core is not None and self.core.has_work

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                if not self._must_compile(command):
                    self._add(command)
            case Abort(ticket):
                if (waiting := self._compiling.pop(ticket, None)) is not None:
                    self._end_unqueued(waiting.new)
                elif self.core is not None and ticket in self._ids:
                    self._tell(self.core.abort(self._ids[ticket]))
            case Ask():
                self._events.append(self._answer(command))
            case Close():
                self._open = False

    def _add(self, new: Add) -> None:
        try:
            id_ = self._awake().add(
                new.prompt, new.params, request_id=new.request_id, priority=new.priority, cache=new.cache
            )
        except Exception as error:
            self._events.append(Refused(new.ticket, _sendable(error)))
            if not isinstance(error, DenimError):  # the books may have started afresh, without anybody
                log.exception("a request could not be queued")
                self._give_up_lost()
        else:
            self._tickets[id_], self._ids[new.ticket] = new.ticket, id_
            self._events.append(Accepted(new.ticket, id_))

    def _end_unqueued(self, new: Add) -> None:
        """Tell of a request that was aborted before it was queued."""
        id_ = new.request_id or ""  # where it came without one, only its reader can have ended it
        ends = [StreamDelta(id_, index, "", [], finish_reason="abort") for index in range(new.params.n)]
        self._events += [Accepted(new.ticket, id_), Deltas([(new.ticket, end) for end in ends])]

    def _must_compile(self, new: Add) -> bool:
        """Whether a request has to wait until its structured output is compiled. If it can never be, queueing
        the request says why."""
        if new.params.structured is None or self.core is None:
            return False
        try:
            compiled = self.core.grammars.compile(new.params.structured)
        except DenimError:
            return False
        if compiled.done():
            return False
        self._compiling[new.ticket] = _Waiting(new, compiled, time.monotonic() + COMPILE_SECONDS)
        return True

    def _take_compiled(self) -> None:
        """Queue the requests whose structured outputs are compiled."""
        if not self._busy:
            futures = [waiting.compiled for waiting in self._compiling.values()]
            wait(futures, COMPILING_LOOK, FIRST_COMPLETED)
        now = time.monotonic()
        for ticket, (new, compiled, latest) in list(self._compiling.items()):
            if compiled.done():
                error = compiled.exception()
                if error is not None:  # to be queued it would be compiled again, and everybody would wait
                    self._events.append(Refused(ticket, copy(_sendable(error))))  # each raises its own
                elif self._must_compile(new):
                    continue  # it was forgotten already, for others
                else:
                    self._add(new)
            elif now >= latest:
                assert new.params.structured is not None
                self._events.append(Refused(ticket, too_long_to_compile(new.params.structured)))
            else:
                continue
            del self._compiling[ticket]

    def _tell(self, deltas: list[StreamDelta]) -> None:
        """Note deltas for the clients, and forget the requests that are over with them."""
        assert self.core is not None
        self._events.append(Deltas([(self._tickets[delta.request_id], delta) for delta in deltas]))
        for delta in deltas:
            if delta.finished and delta.request_id not in self.core.requests:
                self._forget(delta.request_id)

    def _forget(self, request_id: str) -> int | None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            del self._ids[ticket]
        return ticket

    def _give_up_lost(self) -> None:
        assert self.core is not None
        for id_ in [id_ for id_ in self._tickets if id_ not in self.core.requests]:
            ticket = self._forget(id_)
            assert ticket is not None
            self._events.append(Refused(ticket, RuntimeError("an error of the engine lost the request")))

    def _answer(self, ask: Ask) -> Answer:
        try:
            if ask.question in OF_THE_LOOP:
                return Answer(ask.number, getattr(self, ask.question)(), None)
            assert ask.question in OF_THE_CORE, ask.question
            return Answer(ask.number, getattr(self._awake(), ask.question)(), None)
        except Exception as error:
            return Answer(ask.number, None, _sendable(error))

    def _awake(self) -> EngineCore:
        if self.core is None:
            raise EngineAsleepError
        return self.core

    # Questions of its own

    def sleep(self) -> None:
        """Let go of weights, states and cache. Requests that run end with finish_reason "abort"."""
        if self.core is None:
            return
        for id_ in list(self.core.requests):
            self._tell(self.core.abort(id_))
        self._events += [Refused(ticket, EngineAsleepError()) for ticket in self._compiling]
        self._compiling.clear()
        self.core.close()
        self.core = None
        self._events.append(State(None))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Read the weights again and start with empty memory. On an error it sleeps on."""
        if self.core is None:
            self.core = EngineCore(self.options)
            self._events.append(State(self.core.facts))


class _Waiting(NamedTuple):
    """A request that waits for its structured output, until `latest` (of the monotonic clock)."""

    new: Add
    compiled: Future[Any]
    latest: float


def _sendable(error: BaseException) -> Exception:
    """Errors of Denim and of checks travel as they are; others may be anything, and become their text."""
    return error if isinstance(error, DenimError | AssertionError) else RuntimeError(repr(error))
