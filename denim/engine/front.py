"""The clients' side of an engine, wherever its loop runs.

Owns what clients can ask for. Prompts are read and text is made on this side, so that the loop has neither to
do. How messages travel is a subclass's: `AsyncEngine` has the loop in a thread,
`denim.server.engine_client.EngineClient` in a process of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from denim.engine.cache_wishes import CacheWishes
from denim.engine.facts import EngineFacts
from denim.engine.messages import Abort, Add, Ask, Command, Event, State
from denim.engine.outputs import StreamDelta
from denim.engine.prompts import Prompt, PromptReader, ReadPrompt
from denim.engine.reply_stream import ReplyStream
from denim.engine.tokenizer import Message, Tokenizer
from denim.engine.unavailable import EngineClosedError, EngineUnavailableError
from denim.engine.waiting import Waiting
from denim.sampling_params import SamplingParams, checked_params

# A text up to this many characters is tokenised on the spot, in a quarter of a millisecond; a thread would
# cost as much. Longer ones must not hold up the others.
SHORT_TEXT = 500


class EngineFront(ABC):
    """An engine for many clients, on one event loop or several.

    facts: what the engine is. tokenizer: None for a model without one. asleep: whether it has no model in
    memory. crashes: how often its process has died.
    """

    facts: EngineFacts
    tokenizer: Tokenizer | None
    asleep: bool = False
    crashes: int = 0

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._learn(facts)
        self._waiting = Waiting()
        self._numbers = count()  # of tickets and questions
        self._refusal: EngineUnavailableError | None = None  # what new requests get

    # Requests

    async def submit(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        cache_control: Sequence[int] = (),
        no_store: bool = False,
    ) -> ReplyStream:
        """Queue a request; returns its reply when the engine has accepted it. `prompt` may have been read
        before (`read`, `read_chat`). `cache_salt`, `cache_control`, `no_store`: see `CacheWishes`.

        Raises RequestError when it cannot be served, EngineUnavailableError when nobody can be just now.
        """
        cache = CacheWishes(cache_salt, cache_control, no_store)
        params = checked_params(params)
        read = prompt if isinstance(prompt, ReadPrompt) else await self.read(prompt)
        max_tokens = params.most_tokens(self.facts.max_model_len - len(read.ids))
        ticket = next(self._numbers)
        stream = ReplyStream(
            params, self.tokenizer, self.facts.end_token_ids, max_tokens, leave=lambda: self._abort(ticket)
        )
        if not params.stop and params.detokenize:  # where nothing is looked for, text is not needed
            params = replace(params, detokenize=False)
        self._waiting.add(ticket, stream, params.n, request_id)
        try:
            if self._refusal is not None:  # looked at now: who drains on another thread has seen the request
                raise self._refusal.again()
            self._send(Add(ticket, read._replace(text=None), params, request_id, priority, cache))
            await stream.accepted()
        except BaseException:
            self._abort(ticket)
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        cache_control: Sequence[int] = (),
        no_store: bool = False,
    ) -> AsyncIterator[StreamDelta]:
        """The request's deltas as they come; see `submit`. Leaving the iteration early, by `break` with
        `aclose` or by cancellation, aborts the request."""
        reply = await self.submit(
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            cache_control=cache_control,
            no_store=no_store,
        )
        async with reply as stream:
            async for delta in stream:
                yield delta

    async def abort(self, request_id: str) -> None:
        """End a request at once, accepted or not yet; its iteration gets a last delta with finish_reason
        "abort"."""
        for ticket in self._waiting.tickets_of(request_id):
            self._send(Abort(ticket))

    async def read(self, prompt: Prompt) -> ReadPrompt:
        """Tokenise and check a prompt for `submit`. Raises RequestError."""
        if isinstance(prompt, str) and len(prompt) <= SHORT_TEXT:
            return self._reader.read(prompt)
        return await asyncio.to_thread(self._reader.read, prompt)

    async def read_chat(self, messages: Sequence[Message], **template_options: Any) -> ReadPrompt:
        """The prompt of a conversation for `submit`; see `PromptReader.read_chat`."""
        return await asyncio.to_thread(self._reader.read_chat, messages, **template_options)

    # Questions to the engine

    async def stats(self) -> dict[str, Any]:
        """See `EngineCore.stats`."""
        return await self._ask("stats")

    async def cache_snapshot(self) -> dict[str, Any] | None:
        """See `EngineCore.cache_snapshot`."""
        return await self._ask("cache_snapshot")

    async def live_view(self) -> dict[str, Any]:
        """See `EngineCore.live_view`."""
        return await self._ask("live_view")

    async def check(self) -> None:
        """Raises AssertionError when an invariant of memory or scheduler is broken."""
        await self._ask("check")

    async def reset_prefix_cache(self) -> None:
        """See `EngineCore.reset_prefix_cache`."""
        await self._ask("reset_prefix_cache")

    async def sleep(self) -> None:
        """Let go of weights, states and cache. Requests that run end with finish_reason "abort"; until `wake`
        all that needs the model raises EngineAsleepError. Sleeping twice is no error."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Read the weights again and start with empty memory. Raises what the constructor raises; then the
        engine goes on sleeping."""
        await self._ask("wake")

    # The end

    async def drain(self) -> None:
        """Take no new requests, and wait until those that run are over; for ever if they do not end."""
        self._refusal = EngineClosedError("the engine is about to close and takes no new requests")
        await self._waiting.none_open()

    @abstractmethod
    async def close(self) -> None:
        """Abort what runs, end the loop, free the memory. Closing twice is no error."""

    async def __aenter__(self) -> EngineFront:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Between the two

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Raises EngineUnavailableError when the loop is not there. From any thread."""

    def _learn(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._reader = PromptReader(self.tokenizer, facts)

    async def _ask(self, question: str) -> Any:
        number = next(self._numbers)
        answer = self._waiting.question(number)
        try:
            self._send(Ask(number, question))
            return await answer
        finally:
            self._waiting.drop_question(number)
            answer.cancel()  # one that is on its way is nobody's

    def _abort(self, ticket: int) -> None:
        self._waiting.forget(ticket)
        with suppress(EngineUnavailableError):
            self._send(Abort(ticket))

    def _take(self, events: Sequence[Event]) -> None:
        """What the loop has sent. From its thread, or an event loop."""
        for event in events:
            if isinstance(event, State):
                self.asleep = event.facts is None
                if event.facts is not None:
                    self._learn(event.facts)
        self._waiting.take(events)

    def _lose(self, error: EngineUnavailableError) -> None:
        """The loop has ended: everybody who waits gets `error`."""
        self._waiting.lose(error)
