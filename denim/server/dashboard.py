"""The dashboard: a page at /, and the stream of events that keeps it up to date.

Owns the routes. The page is open, as the API's documentation is; what it shows needs a key where the server
has keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from denim.engine.unavailable import EngineUnavailableError
from denim.server.live import PERIOD, Viewer
from denim.server.serving import Serving, serving_of
from denim.server.streaming import event, event_stream
from denim.web.pages import page

open_router = APIRouter(include_in_schema=False)
router = APIRouter(include_in_schema=False)


@open_router.get("/")
async def dashboard() -> FileResponse:
    return page("dashboard")


@router.get("/api/live")
async def live(request: Request) -> Response:
    """Events until the viewer leaves or the server stops: everything that the page shows, once a second, or
    {"unavailable": why} while there is no engine to ask. 503 when it stops already."""
    serving = serving_of(request)
    serving.gate.check(0)
    return await event_stream(request, _looks(serving))


async def _looks(serving: Serving) -> AsyncGenerator[bytes, None]:
    viewer = Viewer(serving)
    while True:  # once in any case: the server may be told to stop just before the first look
        try:
            yield event(await viewer.look())
        except EngineUnavailableError as error:
            yield event({"unavailable": str(error)})
        await asyncio.sleep(PERIOD)
        if serving.gate.draining:
            return
