"""/v1/messages by Anthropic's client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from denim.server.conversation import Conversation
from denim.server.messages_in import conversation_of
from denim.server.messages_schema import MessagesRequest
from tests.server.live import Live, live
from tests.server.scripted import ScriptedEngine

HELLO = [{"role": "user", "content": "hello"}]
SHORT: dict[str, Any] = {"model": "denim-tiny", "max_tokens": 60, "messages": HELLO}
GREEDY = {"temperature": 0}  # the API has no temperature any more for its newest models; Denim has
THINK = {"type": "enabled", "budget_tokens": 1024}
TOOLS = [
    {
        "name": "weather",
        "description": "Of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
EPHEMERAL = {"type": "ephemeral"}


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with client_of(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def caller(script: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    with live(script) as server, client_of(server.url) as client:
        yield client


def prompt_of(script: ScriptedEngine) -> str:
    """What the last request was rendered to."""
    assert script.tokenizer is not None
    return script.tokenizer.decode(script.added[-1].prompt.tokens, skip_special_tokens=False)


def test_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**SHORT, extra_body=GREEDY)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.type for block in message.content] == ["text"], "without thinking it does not think"
    assert message.content[0].text
    assert message.usage.output_tokens > 0


def test_thinking(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(thinking=THINK, **SHORT, extra_body=GREEDY)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking


def test_a_stream_is_the_message_in_pieces(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(thinking=THINK, **SHORT, extra_body=GREEDY)
    with claude.messages.stream(thinking=THINK, **SHORT, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[1].text == whole.content[1].text
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_why_it_ends(claude: anthropic.Anthropic) -> None:
    assert claude.messages.create(**SHORT | {"max_tokens": 2}).stop_reason == "max_tokens"
    text = claude.messages.create(**SHORT, extra_body=GREEDY).content[0].text
    stopped = claude.messages.create(stop_sequences=[text[3:6]], **SHORT, extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:6])
    assert stopped.content[0].text == text[: text.index(text[3:6])]


def test_usage_counts_cached_tokens_apart(claude: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "A long rule. " * 30, "cache_control": EPHEMERAL}]
    first = claude.messages.create(system=system, **SHORT, extra_body=GREEDY | {"cache_salt": "usage"}).usage
    assert first.cache_read_input_tokens == 0
    other = SHORT | {"messages": [{"role": "user", "content": "And what else is there?"}]}
    second = claude.messages.create(system=system, **other, extra_body=GREEDY | {"cache_salt": "usage"}).usage
    assert second.cache_read_input_tokens > 100
    assert second.input_tokens < 30
    count = claude.messages.count_tokens(model="denim-tiny", system=system, messages=other["messages"])
    assert count.input_tokens == second.input_tokens + second.cache_read_input_tokens


def test_a_mark_inside_the_system_part(claude: anthropic.Anthropic) -> None:
    """As agents send it: rules that stay, then what changes with every session."""

    def cached(today: str) -> int:
        system = [
            {"type": "text", "text": "A rule that stays. " * 25, "cache_control": EPHEMERAL},
            {"type": "text", "text": today},
        ]
        return claude.messages.create(
            system=system, **SHORT, extra_body=GREEDY | {"cache_salt": "agent"}
        ).usage.cache_read_input_tokens

    assert cached("It is Monday. " * 10) == 0
    assert cached("Rain falls in the north. " * 10) > 100


def test_a_mark_on_the_whole_request(script: ScriptedEngine, caller: anthropic.Anthropic) -> None:
    script.say("ok")
    body: dict[str, Any] = {"model": "scripted", "max_tokens": 5, "messages": HELLO}
    caller.messages.create(**body)
    assert not script.added[-1].prompt.marks
    caller.messages.create(**body, extra_body={"cache_control": EPHEMERAL})
    assert script.added[-1].prompt.marks


def test_json_by_a_schema(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    form = {"type": "json_schema", "schema": schema}
    body = SHORT | {"max_tokens": 300, "output_config": {"format": form}}
    message = claude.messages.create(**body, extra_body=GREEDY)
    assert json.loads(message.content[0].text)["n"] <= 99


def test_a_tool_call_and_its_result(script: ScriptedEngine, caller: anthropic.Anthropic) -> None:
    script.say(f"I look.\n{CALL}")
    ask: dict[str, Any] = {"model": "scripted", "max_tokens": 500, "tools": TOOLS}
    message = caller.messages.create(messages=HELLO, **ask)
    assert message.stop_reason == "tool_use"
    text, use = message.content
    assert (text.text, use.type, use.name, use.input) == ("I look.", "tool_use", "weather", {"city": "Köln"})
    with caller.messages.stream(messages=HELLO, **ask) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert streamed.content[1].input == {"city": "Köln"}

    script.say("It is warm.")
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "18 degrees"}]},
        {"type": "text", "text": "Well?"},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [thought, *(block.model_dump(exclude_none=True) for block in message.content)],
        },
        {"role": "user", "content": results},
    ]
    caller.messages.create(messages=turns, **ask)
    parts = [turn.split("\n", 1) for turn in prompt_of(script).split("<|im_start|>")[1:]]
    assert [role for role, _ in parts] == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert "<think>Hm.</think>I look." in parts[2][1]
    assert "city=Köln;" in parts[2][1]
    assert "18 degrees" in parts[3][1]
    assert "Well?" in parts[4][1]


def test_the_events_of_two_calls(script: ScriptedEngine, caller: anthropic.Anthropic) -> None:
    """Each is a block of its own; and the message begins before any token is counted."""
    script.say(CALL + CALL.replace("Köln", "Bonn"))
    ask: dict[str, Any] = {"model": "scripted", "max_tokens": 500, "tools": TOOLS, "messages": HELLO}
    with caller.messages.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.input for block in final.content] == [{"city": "Köln"}, {"city": "Bonn"}]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1]
    assert events[0].message.usage.output_tokens == 0 < final.usage.output_tokens
    assert (events[0].message.stop_reason, final.stop_reason) == (None, "tool_use")


def conversation(**body: Any) -> Conversation:
    return conversation_of(MessagesRequest(**{"model": "m", "max_tokens": 1, "messages": HELLO} | body))


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), (THINK, True)],
)
def test_it_thinks_where_it_is_asked_to(thinking: Any, thinks: bool) -> None:
    assert conversation(thinking=thinking).options["enable_thinking"] is thinks


def test_an_assistant_s_blocks_are_one_message() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}, "cache_control": EPHEMERAL}
    blocks = [
        {"type": "thinking", "thinking": "One, "},
        {"type": "thinking", "thinking": "two."},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "text", "text": "Well."},
        use,
    ]
    turns = [*HELLO, {"role": "assistant", "content": blocks}]
    message = conversation(messages=turns).messages[-1]
    assert (message["reasoning_content"], message["content"]) == ("One, two.", "Well.")
    assert [call["id"] for call in message["tool_calls"]] == ["c1"]
    assert message["cache_control"] == [5], "the mark on a call is behind the message's text"


def test_a_strict_tool_stays_strict() -> None:
    told = [conversation(tools=[TOOLS[0] | more]).tools[0]["function"] for more in ({}, {"strict": True})]
    assert [function.get("strict") for function in told] == [None, True]


def test_tools_may_be_switched_off(script: ScriptedEngine, caller: anthropic.Anthropic) -> None:
    script.say(CALL)
    message = caller.messages.create(
        model="scripted", max_tokens=500, messages=HELLO, tools=TOOLS, tool_choice={"type": "none"}
    )
    assert [block.type for block in message.content] == ["text"]
    assert "weather" not in prompt_of(script)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature"),
        ({"messages": []}, "at least 1 item"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Well,"}]},
            "the last message is the assistant's",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0",
        ),
        ({"tool_choice": {"type": "any"}}, "tools has none"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tools has weather"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice wants ''"),
        (
            {"tool_choice": {"type": "auto", "name": "weather"}, "tools": TOOLS},
            "tool_choice has the name 'weather', which is for the type 'tool'",
        ),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences: at most 64"),
        ({"stop_sequences": [""]}, "stop_sequences: at most 64 strings of 1 to"),
        ({"mcp_servers": []}, "Unknown parameter: 'mcp_servers'"),
    ],
    ids=str,
)
def test_errors_have_anthropic_s_shape(
    claude: anthropic.Anthropic, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.post("/v1/messages", body=SHORT | body, cast_to=object)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert message in caught.value.body["error"]["message"]


def test_another_model_is_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**SHORT | {"model": "claude-9"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.request_id


def test_a_conversation_that_is_too_long_is_counted(claude: anthropic.Anthropic) -> None:
    """That is what a client wants to know before it makes one shorter."""
    long = [{"role": "user", "content": "word " * 9000}]
    count = claude.messages.count_tokens(model="denim-tiny", messages=long).input_tokens
    assert count > 9000
    with pytest.raises(anthropic.BadRequestError, match=f"the prompt has {count:,} tokens"):
        claude.messages.create(**SHORT | {"messages": long})


def test_its_clients_find_the_request_s_id(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**SHORT, extra_headers={"x-request-id": "mine"})
    assert (message._request_id, message.id) == ("mine", "msg_mine")


def test_a_failure_in_mid_stream(script: ScriptedEngine, caller: anthropic.Anthropic) -> None:
    script.say("a few words", ends="error")
    with pytest.raises(anthropic.APIStatusError, match="the engine failed"):  # noqa: SIM117
        with caller.messages.stream(model="scripted", max_tokens=50, messages=HELLO) as stream:
            assert next(iter(stream)).type == "message_start"
            list(stream)
