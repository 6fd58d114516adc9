"""The engine as the server sees it: in a process of its own, which may die and is started again.

Owns the process's life as seen from outside, and the way to it. What clients see is `EngineFront`'s.
Everything here but the constructor runs on one event loop, the server's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from denim.engine.facts import EngineFacts
from denim.engine.front import EngineFront
from denim.engine.log import show_log
from denim.engine.messages import Close, Command
from denim.engine.options import EngineOptions
from denim.engine.tokenizer import load_tokenizer
from denim.engine.unavailable import EngineClosedError, EngineDiedError
from denim.server.engine_process import PIECE, Failed, Ready, Start
from denim.server.frames import FrameReader, packed

log = logging.getLogger("denim")

# Seconds that a process which was told to end is waited for: a step may still run, and what the prefix cache
# has is written to its files.
CLOSING = 120.0
# Seconds from the end of the connection to the end of the process.
ENDING = 5.0
# Seconds between tries to start a process that does not start: the first pause, doubled up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0

# The kernels for CPUs that torch keeps compiled, by shape, in each of two caches. Its own limit is 1,024,
# which lets a process that meets many lengths of prompts grow by 600 MB; with 128 it has its size after some
# hundred requests, and steps are as fast. A user's own setting goes first.
KERNELS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}

_CODE = "from denim.server.engine_process import main; main()"


class _Engine(NamedTuple):
    """A process, and the server's end of the pair of sockets to it."""

    process: subprocess.Popen[bytes]
    end: socket.socket

    @classmethod
    def start(cls, order: Start) -> _Engine:
        ours, theirs = socket.socketpair()
        ours.sendall(packed([order]))  # it waits there for the process
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which lets the engine finish
                env=KERNELS_KEPT
                | os.environ
                | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return cls(process, ours)

    def wait_ready(self) -> EngineFacts:
        """Raises what the engine raises when it cannot start, and EngineDiedError if the process dies."""
        frames = FrameReader()
        while piece := self._piece():
            for message in frames.feed(piece):
                if isinstance(message, Failed):
                    self.process.wait()
                    raise message.error
                assert isinstance(message, Ready), message
                return message.facts
        raise EngineDiedError(
            f"the engine process {self.how_it_ended()} before it was ready; see its messages"
        )

    def _piece(self) -> bytes:
        """What has come, waiting for it; nothing when the process has closed its end, read or unread."""
        try:
            return self.end.recv(PIECE)
        except ConnectionResetError:
            return b""

    def how_it_ended(self) -> str:
        """Waits for the end of a process that has closed its end of the pair."""
        try:
            code = self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.end.close()


class EngineClient(EngineFront):
    """An engine in a process of its own, for many clients of one event loop. Options: see `EngineOptions`.

    The model is loaded before the constructor returns; it raises what `AsyncEngine` raises. Use it with
    `async with` on the loop that serves: from then on its process is watched. When it dies, everybody who
    waits gets EngineDiedError, `crashes` counts it, and it is started again; until it is back, new requests
    get EngineDiedError too.
    """

    def __init__(
        self, model: Any = None, *, log_setup: Callable[[], None] = show_log, **options: Any
    ) -> None:
        """`log_setup` says where the log lines of the engine's process go; it is called there."""
        show_log()
        engine_options = EngineOptions.of(model=model, **options)
        self._order = Start(engine_options, log_setup)
        self._engine = _Engine.start(self._order)
        try:
            tokenizer = load_tokenizer(engine_options.folder)  # while the process loads the weights
            facts = self._engine.wait_ready()
        except BaseException:
            self._engine.kill()
            raise
        super().__init__(facts, tokenizer)
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []  # sent at the end of this turn of the event loop
        self._restart: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._engine.process.pid

    async def __aenter__(self) -> EngineClient:
        await self._connect()
        return self

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._refusal = EngineClosedError("the engine was closed")
        self._lose(self._refusal)
        transport, self._transport = self._transport, None
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        if transport is None:  # it has not served yet, and has nothing to finish
            self._engine.kill()
            return
        # What comes is read until the end: the process may wait for room for an answer before it sees Close.
        transport.write(packed([Close()]))
        try:
            await asyncio.to_thread(self._engine.process.wait, CLOSING)
        except subprocess.TimeoutExpired:
            log.warning("the engine process did not end within %d s; it is killed", CLOSING)
            self._engine.process.kill()
            self._engine.process.wait()
        transport.close()

    def _send(self, command: Command) -> None:
        if self._transport is None:
            raise (self._refusal or EngineClosedError("the engine was not entered with 'async with'")).again()
        frame = packed([command])  # now: what cannot be sent is its sender's error, and nobody else's
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)

    def _flush(self) -> None:
        if self._transport is not None and self._outbox:
            self._transport.write(b"".join(self._outbox))
        self._outbox = []

    # The process

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: _Wire(self), self._engine.end)
        self._transport, self.asleep = transport, False

    def connection_lost(self) -> None:
        """The other end is gone. Called by the wire."""
        if self._closed:
            return
        self.crashes += 1
        self._transport, self._outbox = None, []
        if self._refusal is None:
            self._refusal = EngineDiedError("the engine process has ended; it is being started again")
        self._restart = asyncio.get_running_loop().create_task(self._after_the_end())

    async def _after_the_end(self) -> None:
        """Tell everybody, and start another process, unless the engine is to close anyway."""
        how = await asyncio.to_thread(self._engine.how_it_ended)
        log.error("the engine process %s; %d request(s) end with an error", how, len(self._waiting))
        error = EngineDiedError(f"the engine process {how}; it is being started again, try again in a moment")
        self._lose(error)
        if isinstance(self._refusal, EngineDiedError):
            self._refusal = error
            await self._start_again()
        if isinstance(self._refusal, EngineDiedError):  # it was not told to drain meanwhile
            self._refusal = None

    async def _start_again(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                self._engine = _Engine.start(self._order)
                self._learn(await asyncio.to_thread(self._engine.wait_ready))
                await self._connect()
                break
            except Exception as error:  # whatever it is, nobody else would try again
                self._engine.kill()
                self.crashes += isinstance(error, EngineDiedError)  # else it said itself why it cannot serve
                log.error("the engine cannot be started again: %s; next try in %.0f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        log.info("the engine serves again")


class _Wire(asyncio.Protocol):
    """The server's end of the pair, on its event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        self._client._take(self._frames.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost()
