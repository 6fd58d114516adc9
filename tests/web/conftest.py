"""The explorer, served from this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from denim.web.explored import Offer
from denim.web.explorer import create_explorer
from tests.browser import browser, open_page
from tests.listening import listening

__all__ = ["browser", "explorer", "open_page"]


@pytest.fixture(scope="module")
def explorer() -> Iterator[str]:
    """Its address."""
    with listening(create_explorer(Offer({}))) as url:
        yield url
