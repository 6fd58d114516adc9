"""Pages and what they load: files of this package, served from here and from nowhere else.

Owns the files' place and the headers that keep a page from loading anything of another origin.
"""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

ASSETS = Path(__file__).parent / "assets"

POLICY = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""Nothing from elsewhere, no inline script, no inline style."""


def assets() -> StaticFiles:
    """To be mounted as `assets/` beside a page."""
    return StaticFiles(directory=ASSETS)


def page(name: str) -> FileResponse:
    """The page `name`.html."""
    headers = {
        "Content-Security-Policy": POLICY,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
    }
    return FileResponse(ASSETS / f"{name}.html", headers=headers)
