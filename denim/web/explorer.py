"""The explorer's application: one page, and one endpoint that answers it.

Owns the routes. What the answer holds is `denim.web.explored`'s.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse

from denim.errors import DenimError
from denim.web.explored import Offer, explored
from denim.web.pages import assets, page
from denim.web.settings import read_settings


def create_explorer(offer: Offer) -> FastAPI:
    """The application. `GET /api/explore` takes the same query as the page; settings that cannot be are a 422
    with `error`, one line."""
    app = FastAPI(title="Denim explorer", docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/assets", assets())

    @app.get("/")
    def explorer() -> FileResponse:
        return page("explorer")

    @app.get("/api/explore")
    def explore(request: Request) -> dict[str, Any]:
        return explored(read_settings(request.query_params), offer)

    @app.exception_handler(DenimError)
    async def refused(_: Request, error: DenimError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    return app
