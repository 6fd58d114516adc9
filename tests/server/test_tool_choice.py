"""Tool calls that are demanded, and formats beside tools, by official clients over a model that writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from denim import AsyncEngine
from denim.engine.tokenizer import load_tokenizer
from denim.spec.config_file import embedded_model
from tests.server.live import Live, live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine
from tests.server.tool_calls.replies import tool

TOOLS = [
    tool(
        "get_weather",
        city={"enum": ["Köln", "Bonn"]},
        days={"type": "integer", "minimum": 1, "maximum": 9},
    ),
    tool("now"),
]
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
# Forms of calls, as templates show them; all others are tried in tool_calls/test_shapes.py.
SIGNS = {
    "hermes": '<tool_call>{"name": …}</tool_call>',
    "qwen-xml": "<tool_call><function=…></function></tool_call>",
}


def white_tokens() -> dict[str, int]:
    """A bias against tokens of white space alone, which a small model could write for long wherever JSON
    allows it."""
    tokenizer = load_tokenizer(embedded_model())
    assert tokenizer is not None
    return {str(token): -100 for token in range(6144) if tokenizer.decode_one(token).isspace()}


ASK: dict[str, Any] = {
    "model": "tooled",
    "messages": [{"role": "user", "content": "What now?"}],
    "logit_bias": white_tokens(),
}


def tooled(folder: Path, sign: str) -> Path:
    """denim-tiny with a template that shows calls in this form."""
    for file in embedded_model().iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    template = (embedded_model() / "chat_template.jinja").read_text()
    shown = "{% if tools %}<|im_start|>system\n" + sign + "<|im_end|>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(shown + template)
    return folder


@pytest.fixture(scope="module", params=SIGNS.values(), ids=SIGNS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tooled(tmp_path_factory.mktemp("tooled"), request.param)
    engine = AsyncEngine(folder, memory="64MiB", max_num_seqs=8, async_scheduling=True)
    with live(engine, served_model_name=("tooled",)) as server:
        yield server
    asyncio.run(engine.check())
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def caller(served: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **body: Any) -> tuple[ChatCompletionMessage, str]:
    """The message, which must be the same streamed."""
    given = ASK | {"tools": TOOLS, "max_tokens": 150, "temperature": 0, "extra_body": SILENT} | body
    choice = client.chat.completions.create(**given).choices[0]
    streamed: dict[int, list[str]] = {}
    text = ""
    for chunk in client.chat.completions.create(**given, stream=True):
        text += chunk.choices[0].delta.content or ""
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = streamed.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments
    assert [(name, arguments) for name, arguments in streamed.values()] == calls(choice.message)
    assert text == (choice.message.content or "")
    assert chunk.choices[0].finish_reason == choice.finish_reason
    return choice.message, choice.finish_reason


def calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def check_arguments(message: ChatCompletionMessage) -> None:
    for name, text in calls(message):
        arguments = json.loads(text)
        if name == "now":
            assert arguments == {}
        else:
            assert arguments.keys() == {"city", "days"}
            assert arguments["city"] in ("Köln", "Bonn")
            assert isinstance(arguments["days"], int)


def test_required(caller: openai.OpenAI) -> None:
    """Calls and nothing else, up to the end or until there is no room."""
    message, reason = ask(caller, tool_choice="required", temperature=1.0, seed=0)
    assert message.tool_calls
    assert not message.content
    if reason == "length":
        message.tool_calls.pop()
    check_arguments(message)


def test_one_by_name(caller: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message, reason = ask(caller, tool_choice=choice)
    assert [name for name, _ in calls(message)] == ["get_weather"]
    check_arguments(message)
    assert reason == "tool_calls"
    assert not message.content


def test_one_call_at_most(caller: openai.OpenAI) -> None:
    message, reason = ask(caller, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=1)
    assert len(calls(message)) == 1
    check_arguments(message)
    assert reason == "tool_calls"


def test_behind_reasoning(caller: openai.OpenAI) -> None:
    """The template opens reasoning, and the calls begin behind its end."""
    given = ASK | {"tools": TOOLS, "max_tokens": 150, "temperature": 0}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = caller.chat.completions.create(**given, tool_choice=choice).choices[0]
    assert answer.message.reasoning_content  # type: ignore[attr-defined]
    assert answer.finish_reason == "tool_calls"
    check_arguments(answer.message)
    assert not answer.message.content


class Place(BaseModel):
    name: Literal["here", "there"]
    open: bool


def test_a_format_beside_tools(caller: openai.OpenAI) -> None:
    """Text of the format, or calls."""
    kinds = set()
    for seed in range(4):
        given = ASK | {"tools": [openai.pydantic_function_tool(Place)], "extra_body": SILENT}
        choice = caller.chat.completions.parse(
            **given, response_format=Place, temperature=1.3, seed=seed, max_tokens=150
        ).choices[0]
        if choice.finish_reason == "stop":
            assert choice.message.parsed is not None
            kinds.add("text")
        else:
            assert choice.finish_reason == "tool_calls"
            assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Place)
            kinds.add("calls")
    assert kinds == {"text", "calls"}


def test_responses(caller: openai.OpenAI) -> None:
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    answer = caller.responses.create(
        model="tooled",
        input="What now?",
        tools=tools,
        tool_choice={"type": "function", "name": "now"},
        reasoning={"effort": "none"},
        max_output_tokens=100,
    )
    (item,) = answer.output
    assert (item.type, item.name, item.arguments) == ("function_call", "now", "{}")


def test_messages(served: Live) -> None:
    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS
    ]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="tooled",
            max_tokens=200,
            messages=ASK["messages"],
            tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.name in ("get_weather", "now")


def test_many_at_once(caller: openai.OpenAI) -> None:
    """Forms and free texts, together in every step."""

    async def scene() -> None:
        async with openai.AsyncOpenAI(base_url=str(caller.base_url), api_key="none", timeout=60) as client:
            given = ASK | {"temperature": 1.0, "max_tokens": 60, "extra_body": SILENT}
            choice = {"type": "function", "function": {"name": "get_weather"}}
            asked = [
                client.chat.completions.create(
                    **given, seed=seed, **({"tools": TOOLS, "tool_choice": choice} if seed % 2 else {})
                )
                for seed in range(16)
            ]
            for seed, answer in enumerate(await asyncio.gather(*asked)):
                message = answer.choices[0].message
                assert bool(message.tool_calls) == bool(seed % 2)
                if answer.choices[0].finish_reason == "tool_calls":
                    check_arguments(message)

    asyncio.run(scene())


@pytest.fixture
def script(tmp_path: Path) -> ScriptedEngine:
    return ScriptedEngine(tmp_path, template=HERMES_TEMPLATE + "{% if think %}<think>\n{% endif %}</think>")


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("text", [f"Hm. {CALL}", f"Hm. {CALL}\n</think>\n\n", f"Hm.</think>{CALL}"])
def test_a_call_inside_reasoning(script: ScriptedEngine, text: str) -> None:
    """AP-16: never an empty reply that says "stop"."""
    script.say(text)
    template = HERMES_TEMPLATE + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"
    assert script.tokenizer is not None
    script.tokenizer.inner.chat_template = template
    with live(script) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        choice = client.chat.completions.create(
            model="scripted", messages=ASK["messages"], tools=TOOLS
        ).choices[0]
    assert (calls(choice.message), choice.finish_reason) == ([("now", "{}")], "tool_calls")
    assert choice.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    assert not choice.message.content


def test_markers_that_are_special_tokens_reach_the_parser(script: ScriptedEngine) -> None:
    script.say("Hello")
    assert script.tokenizer is not None
    with live(script) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        client.chat.completions.create(model="scripted", messages=ASK["messages"], tools=TOOLS)
        script.tokenizer.__dict__["special_texts"] = frozenset({"<tool_call>"})
        client.chat.completions.create(model="scripted", messages=ASK["messages"], tools=TOOLS)
        client.chat.completions.create(model="scripted", messages=ASK["messages"])
    assert [add.params.skip_special_tokens for add in script.added] == [True, False, True]


def test_a_template_without_calls_refuses_a_demand(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tool calls") as caught:
        client.chat.completions.create(**ASK | {"model": "denim-tiny"}, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_strict_tools_must_have_schemas_that_hold(caller: openai.OpenAI) -> None:
    bad = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="cannot be guaranteed") as caught:
        caller.chat.completions.create(**ASK, tools=[{"type": "function", "function": bad}])
    assert caught.value.param == "tools.0.function.parameters"
