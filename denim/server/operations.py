"""What an operator and a load balancer ask: health, readiness, metrics; the cache emptied, the engine put to
sleep and woken."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import denim
from denim.errors import DenimError
from denim.server.base_model import ApiModel
from denim.server.json_body import JsonRoute
from denim.server.metrics import ServerState
from denim.server.schema import ERRORS
from denim.server.serving import Serving, serving_of

open_router = APIRouter(tags=["operations"], responses=ERRORS)
router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=ERRORS)


class Status(ApiModel):
    status: str


class Version(ApiModel):
    version: str


class Sleeping(ApiModel):
    is_sleeping: bool


@open_router.head("/health", include_in_schema=False)
@open_router.get("/health", responses={200: {"model": Status}, 503: {"model": Status}})
async def health(request: Request) -> JSONResponse:
    """200 as long as the engine can answer or sleeps; 503 when it is gone."""
    serving = serving_of(request)
    if serving.engine.asleep or await _stats(serving) is not None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "the engine is gone"}, 503)


@open_router.head("/ready", include_in_schema=False)
@open_router.get("/ready", responses={200: {"model": Status}, 503: {"model": Status}})
async def ready(request: Request) -> JSONResponse:
    """200 when requests are welcome; 503 while the engine sleeps or is gone, and when the server stops."""
    serving = serving_of(request)
    why = None
    if serving.gate.draining:
        why = "the server is stopping"
    elif serving.engine.asleep:
        why = "the engine sleeps"
    elif await _stats(serving) is None:
        why = "the engine is gone"
    return JSONResponse({"status": why or "ready"}, 200 if why is None else 503)


@open_router.get("/version")
async def version() -> Version:
    """Denim's version."""
    return Version(version=denim.__version__)


@open_router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    serving = serving_of(request)
    engine = serving.engine
    stats = None if engine.asleep else await _stats(serving)
    server = ServerState(serving.gate.open, len(asyncio.all_tasks()), engine.crashes, engine.asleep)
    return Response(serving.metrics.text(stats, server), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """What the engine holds and has done, as JSON: `LLM.stats()`."""
    return await serving_of(request).engine.stats()


@router.get("/prefix_cache")
async def prefix_cache(request: Request) -> dict[str, Any] | None:
    """The prefix tree as it is now, as JSON, which `denim cache inspect` draws: `LLM.cache_snapshot()`."""
    return await serving_of(request).engine.cache_snapshot()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Status:
    """Forget all prefixes. Running requests go on."""
    await serving_of(request).engine.reset_prefix_cache()
    return Status(status="ok")


@router.post("/sleep")
async def sleep(request: Request) -> Sleeping:
    """Give the memory of weights, states and cache back; what runs ends with an error."""
    engine = serving_of(request).engine
    await engine.sleep()
    return Sleeping(is_sleeping=engine.asleep)


@router.post("/wake_up")
async def wake_up(request: Request) -> Sleeping:
    """Load the weights again; the cache starts empty."""
    engine = serving_of(request).engine
    await engine.wake()
    return Sleeping(is_sleeping=engine.asleep)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=serving_of(request).engine.asleep)


async def _stats(serving: Serving) -> dict[str, Any] | None:
    with suppress(DenimError):
        return await serving.engine.stats()
    return None
