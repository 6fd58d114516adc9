"""`denim serve`: an engine behind HTTP until it is told to stop.

Owns the order of start and end: the port, then the engine, then readiness; on SIGTERM or Ctrl-C no new
requests, the running ones to their end, then the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from denim.errors import ConfigError
from denim.ledger.units import plural

try:
    import uvicorn
    import uvloop
    from fastapi import FastAPI

    from denim.server.app import create_app
    from denim.server.connection import Connection
except ImportError as error:
    raise ConfigError(
        f"denim serve needs {error.name}; install it with: pip install 'denim-llm[serve]'"
    ) from error

from denim.server.engine_client import EngineClient
from denim.server.log import set_up_log
from denim.server.options import ServerOptions
from denim.server.serving import Serving

log = logging.getLogger("denim.server")

BACKLOG = 2048  # connections that wait to be accepted


def serve(engine_options: dict[str, Any], server_options: dict[str, Any], quiet: bool) -> None:
    """Serve until SIGTERM or SIGINT. Options: see `EngineOptions` and `ServerOptions`. Raises ConfigError or
    CapacityError when that cannot work."""
    options = ServerOptions(**server_options)
    log_setup = partial(set_up_log, options.log_format, logging.WARNING if quiet else logging.INFO)
    log_setup()
    with _listener(options) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = EngineClient(**engine_options, log_setup=log_setup)
        runner.run(_serve(engine, options, listener))


async def _serve(engine: EngineClient, options: ServerOptions, listener: socket.socket) -> None:
    async with engine:
        app = create_app(engine, options)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("%s is served on http://%s:%d", ", ".join(app.state.serving.models), shown, port)
        try:
            await _Server(app, options).serve([listener])
        finally:
            app.state.serving.trial.close()


class _Server(uvicorn.Server):
    """Says that it is not ready any more as soon as it is told to stop."""

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        drain = None if options.drain_timeout is None else math.ceil(options.drain_timeout)
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=drain,
        )
        super().__init__(config)
        self._serving: Serving = app.state.serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Both signals end the server in order, and the command with success; a second Ctrl-C at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            running = self._serving.gate.open
            log.info("stopping: %d %s to finish", running, plural("completion", running))
        self._serving.gate.draining = True
        super().handle_exit(sig, frame)


def _listener(options: ServerOptions) -> socket.socket:
    """Raises ConfigError when nothing can listen there."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; take another --host"
            " or --port"
        ) from error
