"""A server that really listens, over an engine in this process, and an address for clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from denim.engine.front import EngineFront
from denim.server.app import create_app
from denim.server.connection import Connection
from denim.server.options import ServerOptions
from denim.server.serving import Serving
from tests.listening import listening


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
    try:
        with listening(app, Connection) as url:
            yield Live(url, app)
    finally:
        app.state.serving.trial.close()
