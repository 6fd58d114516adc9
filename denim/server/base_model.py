"""What every body of every API is built on: strictness, and lists whose faults are not collected."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a request. Only its first fault is told: a body has room for millions of them."""


class ApiModel(BaseModel):
    """A body or a part of one: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), serialize_by_alias=True)


def json_response(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
