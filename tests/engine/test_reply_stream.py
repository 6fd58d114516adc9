"""One reader and what it gets: whole, in order, and joined where it was slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from denim.engine.outputs import Logprob, StreamDelta
from denim.engine.reply_stream import ReplyStream
from denim.engine.tokenizer import Tokenizer
from denim.errors import RequestError
from denim.sampling_params import SamplingParams

TEXT = "Grüße, 世界! 🧵"


def read(
    scene: Callable[[ReplyStream], Coroutine[Any, Any, Any]],
    tokenizer: Tokenizer | None = None,
    leave: Callable[[], None] = lambda: None,
    **params: Any,
) -> Any:
    async def run() -> Any:
        stream = ReplyStream(SamplingParams(max_tokens=99, **params), tokenizer, (), 99, leave)
        return await scene(stream)

    return asyncio.run(asyncio.wait_for(run(), 10))


def delta(token: int, index: int = 0, end: str | None = None, **more: Any) -> StreamDelta:
    return StreamDelta("r", index, "", [token], finish_reason=end, **more)


async def all_of(stream: ReplyStream) -> list[StreamDelta]:
    return [one async for one in stream]


@pytest.mark.parametrize("slow", [False, True])
def test_text_is_whole_however_slowly_it_is_read(tokenizer: Tokenizer, slow: bool) -> None:
    """ST-02: characters of several tokens; one delta if nobody read meanwhile."""
    tokens = tokenizer.encode(TEXT)

    async def scene(stream: ReplyStream) -> list[StreamDelta]:
        reading = None if slow else asyncio.create_task(all_of(stream))
        for place, token in enumerate(tokens):
            stream.give(delta(token, end="length" if place == len(tokens) - 1 else None))
            await asyncio.sleep(0)
        return await (reading or all_of(stream))

    deltas = read(scene, tokenizer)
    assert "".join(one.text for one in deltas) == TEXT
    assert [token for one in deltas for token in one.token_ids] == tokens
    assert len(deltas) == (1 if slow else len(tokens))
    assert all("�" not in one.text for one in deltas)


@pytest.mark.parametrize(("end", "text"), [("abort", "a�"), ("stop", "a�"), ("error", "a")])
def test_text_that_was_held_back(tokenizer: Tokenizer, end: str, text: str) -> None:
    """An abort, or an end that no token shows, gives out half a character as a mark; an error does not."""

    async def scene(stream: ReplyStream) -> list[StreamDelta]:
        for token in [*tokenizer.encode("a"), tokenizer.encode("🧵")[0]]:
            stream.give(delta(token))
        stream.give(StreamDelta("r", 0, "", [], finish_reason=end))
        return await all_of(stream)

    assert "".join(one.text for one in read(scene, tokenizer)) == text


def test_what_is_joined(tokenizer: Tokenizer) -> None:
    """Logprobs and the prompt's scores are kept, counts are the newest, completions stay apart."""
    report = {5: Logprob(-1.0, 1, None)}

    async def scene(stream: ReplyStream) -> list[StreamDelta]:
        stream.give(delta(5, 0, logprobs=[report], prompt_logprobs=[None, report]))
        stream.give(delta(6, 1, logprobs=[report]))
        stream.give(delta(7, 0, "length", logprobs=[report], num_cached_tokens=4))
        stream.give(delta(8, 1, "stop", logprobs=[report], stop_reason=8))
        return await all_of(stream)

    first, second = read(scene, tokenizer, n=2, logprobs=0)
    named = {5: Logprob(-1.0, 1, tokenizer.decode_one(5))}
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5, 7], [named, named], "length")
    assert (first.prompt_logprobs, first.num_cached_tokens) == ([None, report], 4)
    assert (second.token_ids, second.finish_reason, second.stop_reason) == ([6, 8], "stop", 8)


def test_an_error_comes_behind_what_was_given() -> None:
    async def scene(stream: ReplyStream) -> None:
        stream.accept("r")
        await stream.accepted()
        stream.give(delta(5))
        stream.fail(ValueError("gone"))
        assert (await anext(stream)).token_ids == [5]
        with pytest.raises(ValueError, match="gone"):
            await anext(stream)
        assert await all_of(stream) == []

    read(scene)


def test_a_refusal_is_raised_where_it_is_waited_for() -> None:
    async def scene(stream: ReplyStream) -> None:
        asyncio.get_running_loop().call_soon(stream.fail, RequestError("no"))
        with pytest.raises(RequestError, match="no"):
            await stream.accepted()

    read(scene)


def test_leaving_early_is_said_once_and_only_then() -> None:
    left = []

    async def early(stream: ReplyStream) -> None:
        stream.give(delta(5))
        async with stream:
            await anext(stream)
        await stream.aclose()
        assert await all_of(stream) == []

    async def at_the_end(stream: ReplyStream) -> None:
        stream.give(delta(5, end="stop"))
        await stream.aclose()

    read(early, leave=lambda: left.append("early"))
    read(at_the_end, leave=lambda: left.append("at the end"))
    assert left == ["early"]


def test_closing_ends_the_wait_for_the_next_delta() -> None:
    """Of another task, that reads: no delta will come to wake it."""

    async def scene(stream: ReplyStream) -> None:
        stream.give(delta(5))
        reading = asyncio.create_task(all_of(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        assert [one.token_ids for one in await reading] == [[5]]

    read(scene)


@pytest.mark.parametrize("last", ["delta", "error"])
def test_nothing_comes_behind_closing(last: str) -> None:
    """What was on its way when the reader left is nobody's."""

    async def scene(stream: ReplyStream) -> None:
        stream.give(delta(5))
        await anext(stream)
        await stream.aclose()
        if last == "delta":
            stream.give(delta(6))
        else:
            stream.fail(ValueError("gone"))
        assert await all_of(stream) == []

    read(scene)
