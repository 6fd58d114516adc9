"""The app as a whole, seen from a browser."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser import Open, browser, open_page
from tests.server.live import Live

__all__ = ["browser", "open_page"]


def test_the_documentation_needs_no_other_host(server: Live, open_page: Open) -> None:
    """Every script and picture comes from the server itself, and the page says what there is."""
    page = open_page(f"{server.url}/docs")
    expect(page.locator("[data-path='/v1/chat/completions']")).to_be_visible()
    page.locator("[data-path='/health']").click()
    expect(page.get_by_text("200 as long as the engine can answer or sleeps")).to_be_visible()
