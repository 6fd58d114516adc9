"""The files of the pages: from this package alone, with the licence of what is not ours."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

from denim.web.explored import Offer
from denim.web.explorer import create_explorer
from denim.web.pages import ASSETS


def test_what_a_page_names_is_there() -> None:
    client = TestClient(create_explorer(Offer({})))
    for page in ASSETS.glob("*.html"):
        assert '<script type="module" src="assets/' in page.read_text(encoding="utf-8")
        for name in re.findall(r'(?:src|href)="(assets/[^"]+)"', page.read_text(encoding="utf-8")):
            assert client.get(f"/{name}").status_code == 200, f"{page.name} names {name}"


def test_nothing_is_asked_of_another_host() -> None:
    own = [path for path in ASSETS.iterdir() if path.suffix in (".html", ".css", ".js")]
    assert len(own) > 5
    for path in own:
        links = re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8"))
        assert [link for link in links if link != "http://www.w3.org/2000/svg"] == [], path.name
    policy = TestClient(create_explorer(Offer({}))).get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'") and "unsafe" not in policy


def test_the_chart_library_has_its_licence_and_version() -> None:
    folder = ASSETS / "uplot"
    assert (folder / "LICENSE").read_text().startswith("The MIT License (MIT)")
    assert "(v1.6.32)" in (folder / "uPlot.iife.min.js").read_text()[:100]
    assert "1.6.32" in (folder / "README.md").read_text()
