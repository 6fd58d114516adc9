"""A server that really listens, over an engine in this process, and an address for clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

from denim.engine.front import EngineFront
from denim.server.app import create_app
from denim.server.connection import Connection
from denim.server.options import ServerOptions
from denim.server.serving import Serving


@dataclass(frozen=True)
class Live:
    """`app` runs in a thread of its own, with an event loop of its own."""

    url: str
    app: FastAPI

    @property
    def serving(self) -> Serving:
        return self.app.state.serving


@contextmanager
def live(engine: EngineFront, **options: Any) -> Iterator[Live]:
    """Serve `engine` with these `ServerOptions`; the engine stays open."""
    app = create_app(engine, ServerOptions(**{"log_requests": False} | options))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
    finally:
        server.should_exit = True
        thread.join(30)
        app.state.serving.trial.close()
        listener.close()
        assert not thread.is_alive(), "the server does not stop"
