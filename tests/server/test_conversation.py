"""Messages on their way to the template: contents, tool calls, marks, options."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from denim.server.chat_schema import ChatMessage
from denim.server.conversation import (
    CLOSED_OPTIONS,
    MOST_MARKS,
    options_with_effort,
    prepared,
    template_message,
)
from denim.server.errors import ApiError
from denim.server.reply_form import ToolChoice
from tests.server.live import live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine

MARK = {"type": "ephemeral"}


def read(**message: Any) -> dict[str, Any]:
    """As the endpoints do: checked by the schema, then turned."""
    return dict(template_message(ChatMessage(**message).model_dump(exclude_none=True), "messages.3"))


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read(role="user", content=parts) == {"role": "user", "content": "one\ntwo"}


def test_the_newer_name_of_the_system_role() -> None:
    assert read(role="developer", content="x")["role"] == "system"


def test_marks_are_places_in_the_text() -> None:
    parts = [
        {"type": "text", "text": "one", "cache_control": MARK},
        {"type": "text", "text": "two"},
        {"type": "text", "text": "three", "cache_control": MARK},
    ]
    assert read(role="user", content=parts)["cache_control"] == [3, 13]
    assert read(role="user", content="four", cache_control=MARK)["cache_control"] == [4]
    assert "cache_control" not in read(role="user", content="x")


def test_system_messages_at_the_head_are_one() -> None:
    marked = [{"type": "text", "text": "two", "cache_control": MARK}, {"type": "text", "text": "three"}]
    turns = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": marked},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "late"},
    ]
    chat = prepared(
        [ChatMessage(**turn).model_dump(exclude_none=True) for turn in turns], [], {}, ToolChoice()
    )
    assert chat.messages[0] == {"role": "system", "content": "one\n\ntwo\nthree", "cache_control": [8]}
    assert [message["role"] for message in chat.messages] == ["system", "user", "system"]


def test_two_system_messages_are_served(http: httpx.Client) -> None:
    """The template of denim-tiny, as Qwen's, refuses a second one."""
    turns = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    body = {"messages": [*turns, {"role": "user", "content": "x"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    response = http.post(
        "/v1/responses", json={"input": body["messages"], "instructions": "c", "max_output_tokens": 1}
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("arguments", "object_form"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("{}", {}),
    ],
    ids=repr,
)
def test_arguments_are_an_object_for_the_template(arguments: Any, object_form: dict[str, Any]) -> None:
    """AP-09."""
    message = read(role="assistant", content=None, tool_calls=[call(arguments)])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": object_form}


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", '"x"', "null", "nonsense", "[" * 100_000])
def test_arguments_that_are_no_object(http: httpx.Client, arguments: str) -> None:
    """AP-09: the error has the path in the request, whatever the conversation becomes on its way."""
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("{}"), call(arguments)]},
    ]
    asked = {"/v1/chat/completions": {"messages": turns}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    asked["/v1/responses"] = {"input": [turns[0], turns[0], item], "instructions": "x"}
    params = []
    for path, body in asked.items():
        error = http.post(path, json=body).json()["error"]
        assert "must be a JSON object" in error["message"]
        params.append(error["param"])
    assert params == ["messages.1.tool_calls.1.function.arguments", "input.2.arguments"]


def test_parts_that_are_no_text(http: httpx.Client) -> None:
    for part, message in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url: this model reads text only"),
        ({"type": "text"}, "the part has no text"),
    ):
        turns = [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}]
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            error = http.post(path, json={field: turns}).json()["error"]
            assert (error["param"], message in error["message"]) == (f"{field}.1.content.0", True)


def test_a_message_without_content() -> None:
    with pytest.raises(ApiError, match="role 'user' needs content") as caught:
        read(role="user")
    assert caught.value.param == "messages.3.content"


def test_an_assistant_may_be_silent() -> None:
    assert read(role="assistant") == {"role": "assistant", "content": ""}
    assert read(role="assistant", content=None, reasoning_content="hm")["reasoning_content"] == "hm"


def test_arguments_through_the_server(tmp_path: Any) -> None:
    """AP-09: text and object render to the same tokens; what is no object is the client's fault."""
    engine = ScriptedEngine(tmp_path, "ok", template=HERMES_TEMPLATE)
    with live(engine) as server, httpx.Client(base_url=server.url) as http:

        def ask(arguments: Any) -> int:
            turns = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
                {"role": "tool", "tool_call_id": "c1", "content": "18"},
            ]
            return http.post("/v1/chat/completions", json={"messages": turns}).status_code

        assert [ask('{"city": "Köln"}'), ask({"city": "Köln"}), ask("")] == [200] * 3
        prompts = [added.prompt.tokens for added in engine.added]
        assert prompts[0] == prompts[1] != prompts[2]
        assert ask("{city: Köln}") == 400


def test_too_many_marks(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "x", "cache_control": MARK}] * (MOST_MARKS + 1)
    turns = [{"role": "user", "content": parts}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        response = http.post(path, json={field: turns})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert f"at most {MOST_MARKS}" in error["message"]


@pytest.mark.parametrize("name", sorted(CLOSED_OPTIONS))
def test_options_that_steer_rendering_are_closed(http: httpx.Client, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: "x"}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_options_of_templates_are_open(http: httpx.Client) -> None:
    options = {"enable_thinking": False, "documents": [], "anything": [1, {"a": None}]}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": options,
        "max_tokens": 1,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_effort_is_an_option_of_the_template_which_may_be_given_by_name() -> None:
    assert options_with_effort(None, None) == {}
    assert options_with_effort(None, "none") == {"enable_thinking": False}
    assert options_with_effort(None, "high") == {"reasoning_effort": "high"}
    assert options_with_effort({"enable_thinking": True}, "none") == {"enable_thinking": True}
    assert options_with_effort({"reasoning_effort": "low"}, "high") == {"reasoning_effort": "low"}
