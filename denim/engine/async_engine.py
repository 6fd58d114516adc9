"""The online interface: many clients, one engine in a thread of its own.

Owns the thread and the way to it. What clients see is `EngineFront`'s, what the thread does `EngineLoop`'s.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import Any

from denim.engine.engine_loop import EngineLoop
from denim.engine.front import EngineFront
from denim.engine.log import show_log
from denim.engine.messages import Close, Command
from denim.engine.options import EngineOptions
from denim.engine.unavailable import EngineClosedError, EngineDiedError, EngineUnavailableError

log = logging.getLogger("denim")


class AsyncEngine(EngineFront):
    """An engine for many clients. Options: see `EngineOptions`.

    The model is loaded before the constructor returns. Call `close` (or use `async with`) at the end.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        show_log()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing enters the inbox once `_gone` is set
        self._gone: EngineUnavailableError | None = None
        self._loop = EngineLoop(EngineOptions.of(model=model, **options), self._receive, self._take)
        assert self._loop.core is not None
        super().__init__(self._loop.core.facts, self._loop.core.tokenizer)
        self._thread = threading.Thread(target=self._run, name="denim-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._leave(EngineClosedError("the engine was closed"))
        await asyncio.to_thread(self._thread.join)

    def _send(self, command: Command) -> None:
        with self._gate:
            if self._gone is not None:
                raise self._gone.again()
            self._inbox.put(command)

    def _leave(self, error: EngineUnavailableError) -> None:
        """Let nothing more in, and end the thread."""
        with self._gate:
            if self._gone is None:
                self._gone = error
            self._inbox.put(Close())

    # The engine's thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            log.exception("the engine's thread died")
            self._leave(EngineDiedError(f"the engine died: {error!r}; start a new one"))
        assert self._gone is not None
        self._lose(self._gone)

    def _receive(self, wait: bool) -> list[Command]:
        commands = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands
