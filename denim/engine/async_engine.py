"""The online interface: many clients on one event loop, one engine in a thread of its own.

Owns the thread and the way between it and the event loop. `EngineCore` is touched by that thread alone;
clients reach it through an inbox, and each gets its deltas through a queue of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.engine.facts import EngineFacts
from denim.engine.log import show_log
from denim.engine.options import EngineOptions
from denim.engine.outputs import StreamDelta
from denim.engine.prompts import Prompt, ReadPrompt
from denim.engine.tokenizer import Message, Tokenizer
from denim.errors import DenimError
from denim.sampling_params import SamplingParams

log = logging.getLogger("denim")


class EngineClosedError(DenimError, RuntimeError):
    """The engine was closed, or its thread died, while the request waited."""


class EngineAsleepError(DenimError, RuntimeError):
    """The engine sleeps, and has no model in memory."""

    def __init__(self) -> None:
        super().__init__("the engine sleeps; wake it first")


class _Client:
    """Where the deltas of one request go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.deltas: asyncio.Queue[StreamDelta | BaseException | None] = asyncio.Queue()

    def give(self, item: StreamDelta | BaseException | None) -> None:
        """Called from the engine's thread. None: the request is over."""
        with suppress(RuntimeError):  # the client's event loop is gone, and with it whoever waited
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, item)


class AsyncEngine:
    """An engine for many clients. Options: see `EngineOptions`.

    The model is loaded before the constructor returns. Call `close` (or use `async with`) at the end.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        show_log()
        self._options = EngineOptions.of(model=model, **options)
        core = EngineCore(self._options)
        self._awake: EngineCore | None = core  # None: the engine sleeps
        self._reader = core.reader
        self.facts: EngineFacts = core.facts
        self.tokenizer: Tokenizer | None = core.tokenizer
        self._clients: dict[str, _Client] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing enters the inbox once `_closing` is set
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="denim-engine", daemon=True)
        self._thread.start()

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
        """The request's deltas as they come. Leaving the iteration early, by `break` with `aclose` or by
        cancellation, aborts the request. `prompt` may have been read before (`read_chat`).

        `cache_salt`, `cache_control`, `no_store`: see `CacheWishes`. Raises RequestError when it cannot be
        served, EngineClosedError when the engine ends first, EngineAsleepError while it sleeps.
        """
        cache = CacheWishes(cache_salt, cache_control, no_store)
        if isinstance(prompt, ReadPrompt):
            read = prompt
        else:  # long texts must not hold up the others
            read = await self.read(prompt)
        client = _Client()
        started: asyncio.Future[str] = client.loop.create_future()

        def add() -> None:
            try:
                id_ = self._core.add(read, params, request_id=request_id, priority=priority, cache=cache)
            except Exception as error:
                _resolve(client.loop, started, error)
            else:
                self._clients[id_] = client
                _resolve(client.loop, started, id_)

        self._post(add)
        try:
            id_ = await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(self._abort_late)
            raise
        try:
            while (item := await client.deltas.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            with suppress(EngineClosedError):
                self._post(lambda: self._leave_early(id_, client))

    async def abort(self, request_id: str) -> None:
        """End a request at once; its iteration gets a last delta with finish_reason "abort"."""
        self._post(lambda: self._abort(request_id))

    async def read(self, prompt: Prompt) -> ReadPrompt:
        """Tokenise and check a prompt for `generate`, beside the event loop. Raises RequestError."""
        return await asyncio.to_thread(self._reader.read, prompt)

    async def read_chat(self, messages: Sequence[Message], **template_options: Any) -> ReadPrompt:
        """The prompt of a conversation for `generate`; see `PromptReader.read_chat`."""
        return await asyncio.to_thread(self._reader.read_chat, messages, **template_options)

    async def reset_prefix_cache(self) -> None:
        """See `EngineCore.reset_prefix_cache`."""
        await self._ask(lambda: self._core.reset_prefix_cache())

    async def stats(self) -> dict[str, Any]:
        """See `EngineCore.stats`."""
        return await self._ask(lambda: self._core.stats())

    async def cache_snapshot(self) -> dict[str, Any] | None:
        """See `EngineCore.cache_snapshot`."""
        return await self._ask(lambda: self._core.cache_snapshot())

    async def check(self) -> None:
        """Raises AssertionError when an invariant of memory or scheduler is broken."""
        await self._ask(lambda: self._core.check())

    @property
    def asleep(self) -> bool:
        return self._awake is None

    async def sleep(self) -> None:
        """Let go of weights, states and cache. Requests that run end with finish_reason "abort"; until `wake`
        all that needs the model raises EngineAsleepError. Sleeping twice is no error."""
        await self._ask(self._fall_asleep)

    async def wake(self) -> None:
        """Read the weights again and start with empty memory. Raises what the constructor raises; then the
        engine goes on sleeping."""
        await self._ask(self._wake_up)

    async def close(self) -> None:
        """Abort what runs, end the thread, free the memory. Closing twice is no error."""
        self._close_inbox()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # The engine's thread

    @property
    def _core(self) -> EngineCore:
        if self._awake is None:
            raise EngineAsleepError
        return self._awake

    @property
    def _has_work(self) -> bool:
        return self._awake is not None and self._awake.has_work

    def _fall_asleep(self) -> None:
        if self._awake is None:
            return
        for id_ in list(self._awake.requests):
            self._abort(id_)
        self._awake.settle()  # a step that is still on its way uses the memory
        self._awake = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake_up(self) -> None:
        if self._awake is None:
            self._awake = EngineCore(self._options)

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._has_work:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._has_work and not self._closing:
                    for delta in self._core.step():
                        self._deliver(delta)
        except BaseException as error:
            log.exception("the engine's thread died")
            self._close_inbox()
            self._leave(EngineClosedError(f"the engine died: {error!r}; start a new one"))
        else:
            self._leave(EngineClosedError("the engine was closed"))
            if self._awake is not None:
                for id_ in list(self._awake.requests):
                    self._awake.abort(id_)

    def _leave(self, error: EngineClosedError) -> None:
        """Answer everybody: first what was sent before the end, then all that wait, those included."""
        while not self._inbox.empty():
            self._inbox.get()()
        for client in self._clients.values():
            client.give(error)
        self._clients.clear()

    def _deliver(self, delta: StreamDelta) -> None:
        client = self._clients.get(delta.request_id)
        if client is None:
            return
        client.give(delta)
        if delta.request_id not in self._core.requests:  # its last delta
            del self._clients[delta.request_id]
            client.give(None)

    def _leave_early(self, request_id: str, client: _Client) -> None:
        """Abort the request unless it is over: then its id may be another client's by now."""
        if self._clients.get(request_id) is client:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._awake is None:
            return
        for delta in self._core.abort(request_id):
            self._deliver(delta)

    # Between the two

    def _post(self, action: Callable[[], None]) -> None:
        with self._gate:
            if self._closing:
                raise EngineClosedError("the engine was closed")
            self._inbox.put(action)

    def _close_inbox(self) -> None:
        """Let nothing more in, and wake the engine's thread if it waits there."""
        with self._gate:
            self._closing = True
            self._inbox.put(lambda: None)

    async def _ask(self, question: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def act() -> None:
            try:
                _resolve(loop, answer, question())
            except BaseException as error:
                _resolve(loop, answer, error)

        self._post(act)
        return await answer

    def _abort_late(self, started: asyncio.Future[str]) -> None:
        """The client was cancelled before its request had begun."""
        if not started.cancelled() and started.exception() is None:
            id_ = started.result()
            with suppress(EngineClosedError):
                self._post(lambda: self._abort(id_))


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any) -> None:
    """Answer a future of another thread's event loop, which may be gone by now."""

    def resolve() -> None:
        if future.cancelled():
            return
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)

    with suppress(RuntimeError):
        loop.call_soon_threadsafe(resolve)
