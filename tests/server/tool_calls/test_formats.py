"""Every form of tool calls, however the text is cut, broken off or spoilt."""

from __future__ import annotations

import json

import pytest

from denim.server.reply_parser import ReplyParser, parser_for
from denim.server.reply_parts import AnswerText, ToolCallStart
from denim.server.tool_calls.formats import FORMATS, format_of
from tests.server.tool_calls.replies import REPLIES, TOOLS, Reply, answer, calls, cuts, form, parts_of

NAMES = [f"{place}-{reply.form}" for place, reply in enumerate(REPLIES)]


def test_every_form_is_tried() -> None:
    assert {reply.form for reply in REPLIES} == {form.name for form in FORMATS}


@pytest.mark.parametrize("reply", REPLIES, ids=NAMES)
def test_the_same_calls_however_the_text_is_cut(reply: Reply) -> None:
    """AP-10: a parser must not expect one token a step."""
    first = None
    for pieces in cuts(reply.text):
        parts = parts_of(ReplyParser(form(reply.form), TOOLS), pieces)
        if first is None:
            first = parts
            assert [(name, json.loads(text)) for name, text in calls(parts)] == reply.calls
            assert answer(parts) == reply.answer
        assert parts == first, pieces


@pytest.mark.parametrize("reply", REPLIES, ids=NAMES)
def test_a_reply_that_breaks_off_gives_the_beginning(reply: Reply) -> None:
    """At any place: nothing raises, whole calls stay, the last one's arguments are a beginning of them."""
    whole = calls(parts_of(ReplyParser(form(reply.form), TOOLS), [reply.text]))
    for end in range(len(reply.text)):
        parts = parts_of(ReplyParser(form(reply.form), TOOLS), [reply.text[:end]])
        got = calls(parts)
        said = answer(parts)
        shared = next(n for n in range(len(said), -1, -1) if reply.answer.startswith(said[:n]))
        beyond = said[shared:]
        assert reply.text[:end].endswith(beyond), "a call of which no name is known is text"
        assert got[:-1] == whole[: max(0, len(got) - 1)]
        if got:
            name, text = whole[len(got) - 1]
            assert got[-1][0] == name
            assert text.startswith(got[-1][1])
        assert parts or not reply.text[:end].strip(), f"nothing is left of {reply.text[:end]!r}"


@pytest.mark.parametrize("reply", REPLIES, ids=NAMES)
def test_a_part_of_the_marker_behind_the_last_call_is_no_answer(reply: Reply) -> None:
    """As when max_tokens is reached there."""
    close = form(reply.form).close
    if not close or not reply.text.endswith(close):
        pytest.skip("nothing follows its calls, or text does")
    if reply.form == "ling" and not reply.calls[-1][1]:
        pytest.skip("the marker is what ends its name")
    for missing in range(1, len(close)):
        parts = parts_of(ReplyParser(form(reply.form), TOOLS), [reply.text[:-missing]])
        assert [(name, json.loads(text)) for name, text in calls(parts)] == reply.calls
        assert answer(parts) == reply.answer


@pytest.mark.parametrize("reply", REPLIES, ids=NAMES)
def test_calls_are_streamed(reply: Reply) -> None:
    """The name is out before the arguments are whole, and arguments come piece by piece."""
    if not any(arguments for _, arguments in reply.calls) or reply.text.startswith('<tool_call>{"arguments'):
        pytest.skip("nothing to stream")
    parser = ReplyParser(form(reply.form), TOOLS)
    starts, pieces = [], 0
    for at, character in enumerate(reply.text):
        for part in parser.feed(character):
            starts += [at] if isinstance(part, ToolCallStart) else []
            pieces += not isinstance(part, ToolCallStart | AnswerText)
    assert starts[0] < len(reply.text) - 10
    assert pieces > 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name" "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "if a <tool_call b"),
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
        ("qwen-xml", "<tool_call>\n<func=x>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=>\n</tool_call>"),
        ("ling", "<tool_call></tool_call>"),
        ("kimi", "<|tool_calls_section_begin|>well<|tool_calls_section_end|>"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("olmo", "<function_calls>?</function_calls>"),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    for pieces in cuts(text + " tail"):
        assert parts_of(ReplyParser(form(name), TOOLS), pieces) == [AnswerText(text + " tail")], pieces


def test_a_call_behind_what_is_none() -> None:
    text = 'See <tool_call> here: <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for pieces in cuts(text):
        parts = parts_of(ReplyParser(form("hermes"), TOOLS), pieces)
        assert (answer(parts), calls(parts)) == ("See <tool_call> here:", [("now", "{}")])


def test_what_spoils_a_section_behind_a_call_is_text() -> None:
    text = '<tool_calls>[{"name": "now", "arguments": {}}, oops]</tool_calls>'
    for pieces in cuts(text):
        parts = parts_of(ReplyParser(form("jamba"), TOOLS), pieces)
        assert (answer(parts), calls(parts)) == (", oops]</tool_calls>", [("now", "{}")])


def test_without_tools_markup_is_text() -> None:
    template = "{{ '<tool_call>' }}"
    parser = parser_for(template)
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call> '
    assert parts_of(parser, [text]) == [AnswerText(text)]


def test_kimi_ids_are_the_models_own() -> None:
    reply = next(reply for reply in REPLIES if reply.form == "kimi")
    parts = ReplyParser(form("kimi"), TOOLS).feed(reply.text)
    assert [part.id for part in parts if isinstance(part, ToolCallStart)] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]


def test_a_kimi_tool_may_have_a_colon_in_its_name() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert calls(parts_of(ReplyParser(form("kimi"), TOOLS), [text])) == [("clock:now", "{}")]


def test_values_in_brackets_inside_brackets() -> None:
    text = '<|tool_call_start|>[now(a=[[1], (2, 3)], b={"x": [{}, "]"]}, c=1)]<|tool_call_end|>'
    for pieces in cuts(text):
        ((name, arguments),) = calls(parts_of(ReplyParser(form("lfm2"), TOOLS), pieces))
        assert (name, json.loads(arguments)) == ("now", {"a": [[1], [2, 3]], "b": {"x": [{}, "]"]}, "c": 1})


def test_other_ids_are_new_every_time() -> None:
    reply = REPLIES[0]
    parts = [part for _ in range(2) for part in ReplyParser(form("hermes"), TOOLS).feed(reply.text)]
    assert len({part.id for part in parts if isinstance(part, ToolCallStart)}) == 4


# How the published templates show earlier calls.
SIGNS = {
    "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}": "qwen-xml",
    '{{- \'<tool_call>\\n{"name": "\' }}{{ tool_call.name }}': "hermes",
    "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>": "ling",
    "<|tool_calls_section_begin|>{% for tool_call in message['tool_calls'] %}<|tool_call_begin|>": "kimi",
    "{{- '<TOOLCALL>[' -}}": "nemotron",
    "{{ '<|tool_call_start|>[' }}": "lfm2",
    "{{ '<function_calls>' }}": "olmo",
    '{{- "<tool_calls>[" -}}': "jamba",
    "{{- '<tool_calls>\\n' -}}": "minimax",
    "{{- '<|tool_call|>' }}": "granite",
}


@pytest.mark.parametrize(("template", "name"), SIGNS.items())
def test_a_template_shows_its_form(template: str, name: str) -> None:
    found = format_of(template)
    assert found is not None
    assert found.name == name


def test_a_template_without_calls_has_no_form() -> None:
    assert format_of("{{ message.content }}") is None
