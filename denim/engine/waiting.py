"""Who waits for what on the clients' side of an engine: replies by ticket, answers by number.

Owns the way of events to those they are for. They may come on the engine's thread or on an event loop;
clients are on event loops, each called once for all that is there for it. Knows nothing of prompts or of the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from denim.engine.messages import Accepted, Answer, Deltas, Event, Refused
from denim.engine.reply_stream import ReplyStream
from denim.engine.unavailable import EngineUnavailableError

_Calls = dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., None], Any]]]


@dataclass
class _Open:
    """A request that is not over. `request_id`: where it came without one, known when it is accepted."""

    stream: ReplyStream
    unfinished: int  # completions
    request_id: str | None


class Waiting:
    """Tickets and numbers are the caller's, and never used twice. Requests may leave on one thread while what
    is for them comes on another."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._watchers: list[asyncio.Future[None]] = []  # they wait until no request is open

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not (self._open or self._questions or self._watchers)

    def add(self, ticket: int, stream: ReplyStream, completions: int, request_id: str | None = None) -> None:
        self._open[ticket] = _Open(stream, completions, request_id)

    def forget(self, ticket: int) -> None:
        """The request is over, or nobody reads its reply any more. Forgetting twice is no error."""
        if self._open.pop(ticket, None) is not None and not self._open:
            for watcher in list(self._watchers):
                _soon(watcher.get_loop(), _resolve, watcher, None)

    def tickets_of(self, request_id: str) -> list[int]:
        """Of the requests with this id that are not over. One that is not accepted yet may be refused because
        another one has it."""
        return [ticket for ticket, one in list(self._open.items()) if one.request_id == request_id]

    async def none_open(self) -> None:
        """Wait until no request is open."""
        while self._open:
            watcher = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            try:
                if self._open:  # looked at now: the last one may have ended meanwhile, on another thread
                    await watcher
            finally:
                self._watchers.remove(watcher)

    def question(self, number: int) -> asyncio.Future[Any]:
        """Where the answer will be."""
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        return answer

    def drop_question(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        self._questions.pop(number, None)

    def take(self, events: Iterable[Event]) -> None:
        """Hand events to whom they are for. What nobody waits for is no error."""
        calls: _Calls = {}
        for event in events:
            match event:
                case Deltas(items):
                    for ticket, delta in items:
                        if (one := self._open.get(ticket)) is not None:
                            _note(calls, one.stream, one.stream.give, delta)
                            one.unfinished -= delta.finished
                            if not one.unfinished:
                                self.forget(ticket)
                case Accepted(ticket, request_id):
                    if (one := self._open.get(ticket)) is not None:
                        one.request_id = request_id
                        _note(calls, one.stream, one.stream.accept, request_id)
                case Refused(ticket, error):
                    if (one := self._open.get(ticket)) is not None:
                        self.forget(ticket)
                        _note(calls, one.stream, one.stream.fail, error)
                case Answer(number, value, error):
                    if (answer := self._questions.pop(number, None)) is not None:
                        _soon(answer.get_loop(), _resolve, answer, value if error is None else error)
        for loop, made in calls.items():
            _soon(loop, _call_all, made)

    def lose(self, error: EngineUnavailableError) -> None:
        """Nothing comes any more: everybody who waits gets `error`."""
        for ticket, one in list(self._open.items()):
            self.forget(ticket)
            _soon(one.stream.loop, one.stream.fail, error.again())
        for number in list(self._questions):
            if (answer := self._questions.pop(number, None)) is not None:
                _soon(answer.get_loop(), _resolve, answer, error.again())


def _note(calls: _Calls, stream: ReplyStream, call: Callable[..., None], value: Any) -> None:
    calls.setdefault(stream.loop, []).append((call, value))


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # the event loop is gone, and with it whoever waited
        loop.call_soon_threadsafe(call, *args)


def _call_all(calls: Iterable[tuple[Callable[..., None], Any]]) -> None:
    for call, value in calls:
        call(value)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
