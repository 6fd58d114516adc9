"""What every body of every API is built on: strictness."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """A body or a part of one: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), serialize_by_alias=True)


def json_response(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
