"""A headless Chromium for tests of pages.

Where there is no Chromium these tests are skipped, but not in CI, which must have one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
PATIENCE = 15_000  # milliseconds that a page may take for anything; it takes a hundredth on an idle machine

Open = Callable[..., Page]

expect.set_options(timeout=PATIENCE)


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


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address in a fresh context. The test fails for anything that the page complains of, or asks of
    another host; `expected` is a part of complaints that belong to the test."""
    contexts, complaints = [], []

    def open_page(address: str, expected: str | None = None, **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        host = address.split("/")[2]

        def complain(text: str) -> None:
            if expected is None or expected not in text:
                complaints.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on("console", lambda message: message.type == "error" and complain(message.text))
        page.on("request", lambda asked: host in asked.url or complain(f"asked for {asked.url}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
