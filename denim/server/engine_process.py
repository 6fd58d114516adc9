"""The process that runs the engine: nothing but its loop, at one end of a pair of sockets.

Owns the process's life: it starts, says Ready or Failed, and ends on Close or when the server is gone.
Signals that stop a server are not for it: the server lets it finish first.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from denim.engine.engine_loop import EngineLoop
from denim.engine.facts import EngineFacts
from denim.engine.messages import Close, Event
from denim.engine.options import EngineOptions
from denim.errors import DenimError
from denim.server.frames import FrameReader, packed

PIECE = 256 * 1024  # bytes read at once


class Start(NamedTuple):
    """The first message to the process. `log_setup` is called in it."""

    options: EngineOptions
    log_setup: Callable[[], None]


class Ready(NamedTuple):
    """The first message from a process that serves."""

    facts: EngineFacts


class Failed(NamedTuple):
    """The only message from a process that cannot serve what was asked for."""

    error: DenimError


class Pipe:
    """The engine's end: reading waits only if it is told to, writing waits for the server."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._frames = FrameReader()

    def receive(self, wait: bool) -> list[Any]:
        """The messages that have come, at least one if it is to wait; the last is Close() when the server is
        gone."""
        messages: list[Any] = []
        while True:
            try:
                piece = self._end.recv(PIECE, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionResetError:
                piece = b""
            if not piece:
                return [*messages, Close()]
            messages += self._frames.feed(piece)

    def send(self, events: Sequence[Event | Ready | Failed]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading tells that the server is gone
            self._end.sendall(packed(events))


def main() -> None:
    """Body of the process. Its argument is the number of the file that is its end of the pair."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    order = pipe.receive(wait=True)[0]
    if not isinstance(order, Start):
        return  # the server is gone already
    order.log_setup()
    try:
        loop = EngineLoop(order.options, pipe.receive, pipe.send)
    except DenimError as error:
        pipe.send([Failed(error)])
        return
    assert loop.core is not None
    pipe.send([Ready(loop.core.facts)])
    loop.run()
