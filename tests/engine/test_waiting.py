"""Events reach those who wait for them, and nothing is kept of who does not wait any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from denim.engine.messages import Accepted, Answer, Deltas, Refused
from denim.engine.outputs import StreamDelta
from denim.engine.reply_stream import ReplyStream
from denim.engine.unavailable import EngineDiedError
from denim.engine.waiting import Waiting
from denim.errors import RequestError
from denim.sampling_params import SamplingParams


def play(scene: Callable[[Waiting], Coroutine[Any, Any, Any]]) -> Any:
    """Run a scene after which nobody waits."""

    async def run() -> Any:
        waiting = Waiting()
        result = await scene(waiting)
        assert waiting.idle
        return result

    return asyncio.run(asyncio.wait_for(run(), 10))


def stream_of(waiting: Waiting, ticket: int, n: int = 1) -> ReplyStream:
    stream = ReplyStream(SamplingParams(n=n), None, (), 16, leave=lambda: None)
    waiting.add(ticket, stream, n)
    return stream


def last(ticket: int, index: int = 0) -> tuple[int, StreamDelta]:
    return ticket, StreamDelta("r", index, "", [5], finish_reason="stop")


def test_accepted_and_over_in_one_batch() -> None:
    """A request of one token: its id is free again as well."""

    async def scene(waiting: Waiting) -> None:
        stream = stream_of(waiting, 1, n=2)
        waiting.take([Accepted(1, "mine"), Deltas([last(1), last(1, 1)])])
        assert waiting.tickets_of("mine") == []
        await stream.accepted()
        assert stream.request_id == "mine"
        assert [delta.index async for delta in stream] == [0, 1]

    play(scene)


def test_an_id_belongs_to_its_newest_request() -> None:
    async def scene(waiting: Waiting) -> None:
        first, second = stream_of(waiting, 1), stream_of(waiting, 2)
        waiting.take([Accepted(1, "mine")])
        waiting.take([Accepted(2, "mine")])
        waiting.forget(1)
        assert waiting.tickets_of("mine") == [2]
        waiting.take([Deltas([last(1), last(2)])])
        assert [delta async for delta in second]
        assert not first._waiting

    play(scene)


def test_an_id_names_its_request_before_it_is_accepted() -> None:
    """Of two with one id the engine refuses one."""

    async def scene(waiting: Waiting) -> None:
        streams = [ReplyStream(SamplingParams(), None, (), 16, leave=lambda: None) for _ in range(2)]
        for ticket, stream in enumerate(streams):
            waiting.add(ticket, stream, 1, "mine")
        assert waiting.tickets_of("mine") == [0, 1]
        waiting.take([Accepted(0, "mine"), Refused(1, RequestError("in use"))])
        assert waiting.tickets_of("mine") == [0]
        waiting.forget(0)
        assert waiting.tickets_of("mine") == []

    play(scene)


@pytest.mark.parametrize("event", [Accepted(1, "mine"), Deltas([last(1)]), Refused(1, RequestError("no"))])
def test_leaving_while_something_comes_on_another_thread(event: Any) -> None:
    """The client is forgotten just behind the look that found it."""

    class Leaves(dict[int, Any]):
        def get(self, ticket: int, default: Any = None) -> Any:
            found = super().get(ticket, default)
            waiting_for.forget(ticket)
            return found

    async def scene(waiting: Waiting) -> None:
        nonlocal waiting_for
        waiting_for = waiting
        waiting._open = Leaves()
        stream_of(waiting, 1)
        waiting.take([event])
        assert waiting.tickets_of("mine") == []

    waiting_for: Any = None
    play(scene)


def test_what_nobody_waits_for() -> None:
    async def scene(waiting: Waiting) -> None:
        answer = waiting.question(3)
        answer.cancel()
        events = [Accepted(1, "r"), Deltas([last(1)]), Refused(1, RequestError("no")), Answer(2, 0, None)]
        waiting.take([*events, Answer(3, 0, None)])
        await asyncio.sleep(0)

    play(scene)


def test_everybody_gets_an_error_of_their_own() -> None:
    async def scene(waiting: Waiting) -> None:
        streams, question = [stream_of(waiting, 1), stream_of(waiting, 2)], waiting.question(3)
        empty = asyncio.create_task(waiting.none_open())
        await asyncio.sleep(0)
        waiting.take([Accepted(1, "a")])
        waiting.lose(EngineDiedError("gone"))
        errors = []
        for wait in (anext(streams[0]), streams[1].accepted(), question):
            with pytest.raises(EngineDiedError, match="gone") as caught:
                await wait
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3
        await empty

    play(scene)


def test_waiting_for_the_end_of_all_while_it_comes_on_another_thread() -> None:
    async def scene(waiting: Waiting) -> None:
        for ticket in range(200):
            stream_of(waiting, ticket)
            thread = threading.Thread(target=waiting.take, args=([Deltas([last(ticket)])],))
            thread.start()
            await waiting.none_open()
            thread.join()

    play(scene)
