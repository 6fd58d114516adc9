"""/v1/responses by the official client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from denim.engine.outputs import Logprob
from denim.server.logprobs import ChatLogprobs, Report, TokenLogprob
from denim.server.reply_parts import AnswerText, ReasoningText, ToolCallStart
from denim.server.responses_in import conversation_of
from denim.server.responses_out import OutputItems
from denim.server.responses_schema import ResponsesRequest
from tests.server.scripted import ScriptedEngine

SHORT: dict[str, Any] = {"model": "denim-tiny", "max_output_tokens": 60, "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(input="hello", **SHORT)
    assert (response.object, response.status) == ("response", "completed")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text
    assert response.output_text == response.output[1].content[0].text != ""
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert response.completed_at >= response.created_at
    assert response.parallel_tool_calls is True
    assert usage.input_tokens_details.cached_tokens >= 0
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="hello", **SHORT)
    events = list(client.responses.create(input="hello", stream=True, **SHORT))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert all(event.response.usage is None and not event.response.output for event in events[:2])
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == whole.output[0].content[0].text
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output


def test_the_helper_of_the_client_reads_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(input="hello", **SHORT) as stream:
        assert stream.get_final_response().output_text


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    body = SHORT | {"max_output_tokens": 3, "input": "hello"}
    response = client.responses.create(**body)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None
    assert response.output[-1].status == "incomplete"
    last = list(client.responses.create(stream=True, **body))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_input_in_items(client: openai.OpenAI) -> None:
    """Instructions are a system message; the items of an earlier answer are one message again."""
    body = SHORT | {"instructions": "Be brief.", "reasoning": {"effort": "none"}}
    first = client.responses.create(input=[{"role": "user", "content": "hello"}], **body)
    assert [item.type for item in first.output] == ["message"]
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And now?"},
    ]
    second = client.responses.create(input=turns, **body)
    said = client.chat.completions.create(
        model="denim-tiny",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And now?"},
        ],
        max_tokens=60,
        temperature=0,
        reasoning_effort="none",
    )
    assert second.usage.input_tokens == said.usage.prompt_tokens
    assert second.output_text == said.choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    body = SHORT | {"input": "hello", "reasoning": {"effort": "none"}, "top_logprobs": 2}
    include = ["message.output_text.logprobs"]
    part = client.responses.create(include=include, **body).output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = client.responses.create(include=include, stream=True, **body)
    told = [
        entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert [entry.token for entry in told] == [entry.token for entry in part.logprobs][: len(told)]


def test_logprobs_do_not_depend_on_the_reader() -> None:
    """The end token has no text: it comes behind the last text, or with it where the reader was slow."""

    def told(reports: Sequence[Report]) -> ChatLogprobs:
        names = [next(iter(report.values())).decoded_token for report in reports]
        return ChatLogprobs(
            content=[TokenLogprob(token=name, logprob=0.0, bytes=None, top_logprobs=[]) for name in names]
        )

    text, end, markup = ({0: Logprob(0.0, 1, name)} for name in ("Hello", "<|im_end|>", "<tool_call>"))
    quick, slow = OutputItems(told), OutputItems(told)
    quick.take([AnswerText("Hello")], [text])
    quick.take([], [end])
    slow.take([AnswerText("Hello")], [text, end])
    for items in (quick, slow):
        done = items.close()[0]
        assert [entry["token"] for entry in done["logprobs"]] == ["Hello", "<|im_end|>"]

    calling = OutputItems(told)
    calling.take([AnswerText("Hello")], [text])
    calling.take([], [markup])
    done = calling.take([ToolCallStart(0, "id", "weather")], [])[0]
    assert [entry["token"] for entry in done["logprobs"]] == ["Hello"]


def test_reports_of_reasoning_are_not_told_with_the_answer() -> None:
    def told(reports: Sequence[Report]) -> ChatLogprobs:
        names = [next(iter(report.values())).decoded_token for report in reports]
        return ChatLogprobs(
            content=[TokenLogprob(token=name, logprob=0.0, bytes=None, top_logprobs=[]) for name in names]
        )

    items = OutputItems(told)
    items.take([ReasoningText("Hm.")], [{0: Logprob(0.0, 1, "Hm.")}])
    items.take([AnswerText("Hello")], [{0: Logprob(0.0, 1, "Hello")}])
    items.close()
    assert [entry["token"] for entry in items.items[1]["content"][0]["logprobs"]] == ["Hello"]


def test_a_part_is_empty_when_it_is_added() -> None:
    """Also where more of it came before the event is written."""
    items = OutputItems(None)
    events = items.take([AnswerText("Hel")], [])
    items.take([AnswerText("lo")], [])
    added = {event["type"].removeprefix("response."): event for event in events}
    assert added["content_part.added"]["part"]["text"] == ""
    assert added["output_item.added"]["item"]["content"] == []
    assert items.items[0]["content"][0]["text"] == "Hello"


def test_what_belongs_to_one_message_of_the_assistant() -> None:
    """Thoughts, text and calls in this order; what comes once more begins another message."""

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]}
    items = [thought("R"), said("A"), call, call, said("B"), thought("T"), call, summed, said("C"), said("D")]
    body = ResponsesRequest(input=[{"role": "user", "content": "x"}, *items])
    messages = conversation_of(body).messages[1:]
    parts = [(m.get("reasoning_content"), m["content"], len(m.get("tool_calls", ()))) for m in messages]
    assert parts == [("R", "A", 2), (None, "B", 0), ("T", "", 1), ("S", "C", 0), (None, "D", 0)]


def test_json_by_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    body = SHORT | {"max_output_tokens": 300, "reasoning": {"effort": "none"}, "text": {"format": form}}
    response = client.responses.create(input="hello", **body)
    assert json.loads(response.output_text)["n"] <= 99
    assert response.text.format.schema_ == schema
    plain = client.responses.create(input="hello", **body | {"text": {"format": {"type": "text"}}})
    assert plain.output_text


def test_a_tool_call_and_its_result(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say(f"I look.\n{CALL}")
    ask: dict[str, Any] = {"model": "scripted", "tools": TOOLS}
    response = caller.responses.create(input="How is it in Köln?", **ask)
    message, call = response.output
    assert response.output_text == "I look."
    assert caller.responses.create(input="x", **ask, parallel_tool_calls=False).parallel_tool_calls is False
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Köln"}
    events = list(caller.responses.create(input="How is it in Köln?", stream=True, **ask))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Köln"}
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("weather", {"city": "Köln"})]

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    items = [item.model_dump(exclude_none=True) for item in (message, call)]
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    caller.responses.create(input=[{"role": "user", "content": "?"}, thought, *items, result], **ask)
    assert script.tokenizer is not None
    prompt = script.tokenizer.decode(script.added[-1].prompt.tokens, skip_special_tokens=False)
    turns = [turn.split("\n", 1) for turn in prompt.split("<|im_start|>")[1:]]
    assert [role for role, _ in turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert "<think>Hm.</think>I look." in turns[2][1]
    assert "city=Köln;" in turns[2][1]
    assert "18 degrees" in turns[3][1]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "does not match any of the expected"),
        ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input.0.type", "'message'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
            "text only",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tool_choice": "required"}, "tool_choice", "tools has none"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"input": "word " * 5000}, "input", "max_model_len=4096"),
        ({"include": ["everything"]}, "include.0", "'reasoning.encrypted_content'"),
        ({"n": 2}, "n", "Unknown parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_name_the_parameter(
    client: openai.OpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"input": "x", "max_output_tokens": 2} | body, cast_to=object)
    assert message in caught.value.message
    assert caught.value.param == param


def test_a_failure_in_mid_stream(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say("a few words", ends="error")
    events = list(caller.responses.create(model="scripted", input="x", stream=True))
    assert [event.type for event in events[-2:]] == ["response.failed", "error"]
    assert events[-2].response.status == "failed"
    assert "the engine failed" in events[-2].response.error.message
    assert "the engine failed" in events[-1].message
