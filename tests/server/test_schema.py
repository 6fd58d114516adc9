"""What the bodies of all APIs have in common."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from denim.server.chat_schema import ChatRequest
from denim.server.completion_schema import CompletionRequest
from denim.server.messages_schema import MessagesRequest
from denim.server.responses_schema import ResponsesRequest

TURNS = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": TURNS, "logprobs": True}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (MessagesRequest, {"model": "denim-tiny", "messages": TURNS, "max_tokens": 2}),
}
ANY_NUMBER = {"priority", "max_tool_calls"}


def numbers(schema: type[BaseModel]) -> list[str]:
    """Fields that hold a number and nothing else."""
    return [
        name
        for name, field in schema.model_fields.items()
        if {int, float} & {field.annotation, *get_args(field.annotation)} and name not in ANY_NUMBER
    ]


@pytest.mark.parametrize("path", BODIES)
def test_a_number_out_of_range_is_named_as_the_api_names_it(http: httpx.Client, path: str) -> None:
    """Whatever the engine calls it."""
    schema, body = BODIES[path]
    assert len(numbers(schema)) > 4
    for name in numbers(schema):
        response = http.post(path, json=body | {name: -(10**30)})
        error = response.json()["error"]
        assert response.status_code == 400, name
        assert name in error["message"]
        if path != "/v1/messages":  # whose errors have no param
            assert (error["param"], error["code"]) == (name, "invalid_value")
