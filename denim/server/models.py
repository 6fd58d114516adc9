"""`/v1/models`: what is served, and `/v1/embeddings`: what is not."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request

from denim.server.base_model import ApiModel
from denim.server.errors import ApiError
from denim.server.json_body import JsonRoute
from denim.server.schema import ERRORS
from denim.server.serving import Serving, serving_of

router = APIRouter(route_class=JsonRoute, tags=["models"], responses=ERRORS)


class ModelCard(ApiModel):
    """`max_model_len`: tokens of prompt and output, as vLLM has it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "denim"
    root: str
    max_model_len: int


class ModelList(ApiModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The model that is served, under each of its names."""
    serving = serving_of(request)
    return ModelList(data=[_card(serving, name) for name in serving.models])


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> ModelCard:
    """One of them."""
    serving = serving_of(request)
    return _card(serving, serving.model_named(model))


@router.post("/v1/embeddings", responses={400: ERRORS["4XX"]})
async def embed(body: dict[str, Any]) -> None:
    """Refused: Denim serves language models that write text."""
    raise ApiError(
        400,
        "embeddings are not served: Denim runs language models that write text; use another server for them",
        code="unsupported_endpoint",
    )


def _card(serving: Serving, name: str) -> ModelCard:
    facts = serving.engine.facts
    return ModelCard(id=name, created=serving.created, root=facts.model, max_model_len=facts.max_model_len)
