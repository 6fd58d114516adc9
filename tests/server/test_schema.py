"""What the bodies of all APIs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from denim.engine.cache_wishes import CacheWishes
from denim.errors import RequestError
from denim.server.chat_schema import ChatRequest
from denim.server.completion_schema import CompletionRequest
from denim.server.messages_schema import MessagesRequest
from denim.server.responses_schema import ResponsesRequest
from denim.server.schema import check_tool_choice, checked_stop
from denim.server.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.live import live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine

TURNS = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": TURNS, "logprobs": True}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (MessagesRequest, {"model": "denim-tiny", "messages": TURNS, "max_tokens": 2}),
}
TOKENS = (TokenizeRequest, DetokenizeRequest)
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


def lists_without_an_end(core: Any, path: str = "") -> list[str]:
    """Where a schema of pydantic's core has lists of which every fault is collected."""
    found = []
    if isinstance(core, dict):
        any_item = core.get("items_schema", {}).get("type") in (None, "any")
        if core.get("type") == "list" and not core.get("fail_fast") and not any_item:
            found.append(path)
        for key, inner in core.items():
            found += lists_without_an_end(inner, f"{path}.{key}")
    elif isinstance(core, list | tuple):
        for at, inner in enumerate(core):
            found += lists_without_an_end(inner, f"{path}.{at}")
    return found


@pytest.mark.parametrize("schema", [schema for schema, _ in BODIES.values()] + list(TOKENS))
def test_lists_tell_their_first_fault(schema: type[BaseModel]) -> None:
    """A list of a million wrong items would be a million errors, with everybody waiting for them."""
    assert lists_without_an_end(TypeAdapter(list[int]).core_schema), "this test finds one"
    assert lists_without_an_end(schema.__pydantic_core_schema__) == []


def test_a_long_list_with_a_fault() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest(prompt=[1] * 1000 + ["x"] * 1000)  # type: ignore[list-item]
    assert caught.value.error_count() <= 4  # one for each form that a prompt may have


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_is_short(http: httpx.Client, path: str) -> None:
    """The cache keeps it."""
    error = http.post(path, json=BODIES[path][1] | {"cache_salt": "x" * 1025}).json()["error"]
    assert "'cache_salt': String should have at most 1024 characters" in error["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"stop_token_ids": [1] * 1025}),
        ("/v1/completions", {"cache_control": [1] * 1025}),
    ],
)
def test_lists_that_cost_time_are_bounded(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    error = http.post(path, json=BODIES[path][1] | more).json()["error"]
    assert (error["param"], "at most 1024 items" in error["message"]) == (*more, True)


@pytest.mark.parametrize("path", BODIES)
def test_what_a_client_wishes_reaches_the_engine(tmp_path: Path, path: str) -> None:
    script = ScriptedEngine(tmp_path, "ok", template=HERMES_TEMPLATE)
    body = {name: value for name, value in BODIES[path][1].items() if name not in ("logprobs", "model")}
    wishes = {"priority": -3, "cache_salt": "mine", "no_store": True, "seed": 7}
    with live(script) as server, httpx.Client(base_url=server.url) as client:
        for more in ({}, wishes):
            response = client.post(path, json={"model": "scripted"} | body | more)
            assert response.status_code == 200, response.text
    plain, wished = script.added
    assert (plain.priority, plain.cache, plain.params.seed) == (0, CacheWishes(), None)
    assert (wished.priority, wished.cache) == (-3, CacheWishes("mine", (), True))
    assert wished.params.seed == 7


@pytest.mark.parametrize("key", ["x", "-1", "1.0", " 1", "٣", "", "9" * 11])
def test_a_key_of_logit_bias_is_a_token_id(key: str) -> None:
    with pytest.raises(RequestError, match="logit_bias has the key .*; a key is a token id") as caught:
        CompletionRequest(prompt="x", logit_bias={key: 1.0}).params()
    assert caught.value.param == "logit_bias"
    assert CompletionRequest(prompt="x", logit_bias={"7": 1.0}).params().logit_bias == {7: 1.0}


@pytest.mark.parametrize("stop", ["", ["x", ""], "x" * 1025, ["x"] * 65])
def test_stop_strings_are_refused_under_the_api_s_name(stop: str | list[str]) -> None:
    with pytest.raises(RequestError, match="stop_sequences: at most 64 strings of 1 to 1024") as caught:
        checked_stop("stop_sequences", stop)
    assert caught.value.param == "stop_sequences"


def test_a_tool_that_is_wanted_must_be_offered() -> None:
    check_tool_choice(True, None, ["f"])
    check_tool_choice(False, "f", ["f"])
    check_tool_choice(False, None, [])
    for required, named, offered in ((True, None, []), (False, "g", ["f"]), (False, "f", [])):
        with pytest.raises(RequestError, match="tool_choice wants .*offer it there, or choose otherwise"):
            check_tool_choice(required, named, offered)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, "json"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, "json"),
    ],
)
def test_response_formats(form: dict[str, Any], kind: str | None) -> None:
    """A JSON schema without the schema is any object, as the API says."""
    made = ChatRequest(messages=TURNS, response_format=form).params().structured
    assert (made and made.kind) == kind


def test_the_newer_name_of_a_limit_goes_first() -> None:
    limits = {"max_tokens": 5, "max_completion_tokens": 9}
    for given, most in ((limits, 9), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 9}, 9), ({}, None)):
        assert ChatRequest(messages=TURNS, **given).params().max_tokens == most


def test_log_probabilities_of_a_chat() -> None:
    asked = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"logprobs": False}]
    told = [ChatRequest(messages=TURNS, **given).params().logprobs for given in asked]
    assert told == [None, 0, 3, None]
