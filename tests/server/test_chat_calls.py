"""Tool calls in chats by the official client. denim-tiny knows none, so a script speaks."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.server.chats import HELLO, chunks_of, text_of
from tests.server.live import live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASK = {"model": "scripted", "messages": HELLO, "tools": TOOLS}


def test_a_tool_call(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say(f"Let me look.\n{CALL}")
    choice = caller.chat.completions.create(**ASK).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    call = choice.message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    chunks = chunks_of(caller, **ASK)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == "weather"
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert len(pieces) > 3, "arguments come in pieces"
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Köln"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_two_calls_have_their_indices(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say(f"{CALL}\n{CALL}")
    message = caller.chat.completions.create(**ASK).choices[0].message
    assert message.content is None
    assert len({call.id for call in message.tool_calls}) == 2
    pieces = [
        piece for chunk in chunks_of(caller, **ASK) for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [piece.index for piece in pieces if piece.id] == [0, 1]


def test_without_tools_calls_are_text(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say(CALL)
    for body in (ASK | {"tools": None}, ASK | {"tool_choice": "none"}):
        choice = caller.chat.completions.create(**body).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        assert choice.finish_reason == "stop"


THINKS = HERMES_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("reply", [f"I look it up.\n{CALL}", f"I look it up.\n</think>\n\n{CALL}"])
def test_a_call_is_found_inside_and_behind_reasoning(tmp_path: Path, reply: str) -> None:
    """AP-16: the model may forget to close its reasoning; the reply is not empty, and says why it ended."""
    engine = ScriptedEngine(tmp_path, reply, template=THINKS)
    assert THINKS != HERMES_TEMPLATE
    with (
        live(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        choice = client.chat.completions.create(**ASK).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "I look it up."
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
        chunks = chunks_of(client, **ASK)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert text_of(chunks, field="reasoning_content") == "I look it up."


def test_the_helper_of_the_client_puts_a_stream_together(
    script: ScriptedEngine, caller: openai.OpenAI
) -> None:
    script.say(f"So:\n{CALL}")
    with caller.chat.completions.stream(**ASK) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"
    assert final.choices[0].message.content == "So:"


def test_an_answer_without_text_and_calls_is_empty(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    script.say("END")
    assert caller.chat.completions.create(**ASK, stop=["END"]).choices[0].message.content == ""
