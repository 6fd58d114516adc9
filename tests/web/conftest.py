"""The explorer, served from this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from denim.web.explored import Offer
from denim.web.explorer import create_explorer
from tests.browser import browser, open_page

__all__ = ["browser", "explorer", "open_page"]

START = 20.0  # seconds that a server may take to listen; it takes a tenth of one


@pytest.fixture(scope="module")
def explorer() -> Iterator[str]:
    """Its address."""
    server = uvicorn.Server(uvicorn.Config(create_explorer(Offer({})), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + START
    while not server.started:
        assert time.monotonic() < until and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
