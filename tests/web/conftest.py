"""A headless Chromium, and pages served to it from this process.

Where there is no Chromium these tests are skipped, but not in CI, which must have one.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, sync_playwright

from denim.web.explored import Offer
from denim.web.explorer import create_explorer

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
START = 20.0  # seconds that a server may take to listen; it takes a tenth of one


# Of a module, not of the session: while Playwright runs, no other test in this thread can use asyncio.run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        assert not os.environ.get("CI"), f"CI needs one of {', '.join(NAMES)}"
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


def serve(app: FastAPI) -> Iterator[str]:
    """The app on a free port in a thread; the address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + START
    while not server.started:
        assert time.monotonic() < until and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def explorer() -> Iterator[str]:
    yield from serve(create_explorer(Offer({})))


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a fresh context; fails the test for anything the page complained of or asked of
    another host."""
    contexts, complaints = [], []

    def open_page(address: str, **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        host = address.split("/")[2]
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("request", lambda asked: host in asked.url or complaints.append(f"asked for {asked.url}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
