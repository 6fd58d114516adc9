"""Reasoning, answers and calls, told apart in a stream."""

from __future__ import annotations

import pytest

from denim.server.reasoning import begins_inside
from denim.server.reply_parser import ReplyParser, parser_for
from denim.server.reply_parts import AnswerText, ReasoningText
from tests.server.tool_calls.replies import TOOLS, answer, calls, cuts, form, parts_of, thoughts

THINKING = "{{ '<think>' }} </think> <tool_call>"
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def check(
    text: str, thought: str, said: str, called: list[tuple[str, str]] | None = None, **how: bool
) -> None:
    for pieces in cuts(text):
        parser = ReplyParser(form("hermes"), TOOLS, **how)
        parts = parts_of(parser, pieces)
        assert (thoughts(parts), answer(parts), calls(parts)) == (thought, said, called or []), pieces


def test_reasoning_then_answer() -> None:
    check("\nLet me see.\n\nYes.\n</think>\n\nIt is 4.", "Let me see.\n\nYes.", "It is 4.", inside=True)


def test_a_reply_that_opens_its_own_reasoning() -> None:
    check("\n<think>\nhm\n</think>\n\n4", "hm", "4", reasons=True)


def test_a_reply_that_does_not_reason() -> None:
    check(" 4 <think> 5\n", "", " 4 <think> 5\n", reasons=True)
    check("< 5", "", "< 5", reasons=True)


def test_reasoning_without_an_end() -> None:
    check("I wonder </thin", "I wonder </thin", "", inside=True)


def test_empty_reasoning() -> None:
    check("\n\n</think>\n\nyes", "", "yes", inside=True)


def test_the_end_of_reasoning_in_an_answer_is_text() -> None:
    check("a</think>b</think>c", "a", "b</think>c", inside=True)


def test_calls_behind_reasoning() -> None:
    check(f"so\n</think>\n\nI call.\n{CALL}\n", "so", "I call.", [("now", "{}")], inside=True)


def test_a_call_inside_reasoning() -> None:
    """AP-16: the model opens a call before it closes its reasoning, or never closes it."""
    check(f"so\n{CALL}", "so", "", [("now", "{}")], inside=True)
    check(f"so {CALL} and\n</think>\ndone", "soand", "done", [("now", "{}")], inside=True)
    check(f"so {CALL}{CALL}</think>{CALL}", "so", "", [("now", "{}")] * 3, inside=True)


def test_reasoning_that_speaks_of_calls() -> None:
    example = '<tool_call>{"name": "name_of_tool", "arguments": {}}</tool_call>'
    check(
        f"I write {example} or <tool_call>.</think>4", f"I write {example} or <tool_call>.", "4", inside=True
    )


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_prompt_says_where_a_reply_begins(prompt: str, inside: bool) -> None:
    """AP-08: a template may close the block by itself; what follows is the answer."""
    assert begins_inside(prompt) is inside
    parser = parser_for(THINKING, thinking=begins_inside(prompt))
    expected = ReasoningText("Yes.") if inside else AnswerText("Yes.")
    assert parts_of(parser, ["Yes."]) == [expected]


def test_an_answer_is_not_held_back_without_tools() -> None:
    parser = parser_for(THINKING)
    assert parser.feed("Yes \n") == [AnswerText("Yes \n")]


def test_text_is_given_out_at_once() -> None:
    parser = parser_for(THINKING, tools=TOOLS, thinking=True)
    assert parser.feed("Hm ") == [ReasoningText("Hm")]
    assert parser.feed("so") == [ReasoningText(" so")]
    assert parser.feed("</think>\n\nYes") == [AnswerText("Yes")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s> ") == [AnswerText(" <tools>")]
    assert parser.finish() == [AnswerText(" ")]


def test_markers_that_must_not_be_skipped() -> None:
    assert parser_for("{{ content }}", tools=TOOLS).markers == ()
    assert parser_for(THINKING).markers == ("<think>", "</think>")
    assert parser_for(THINKING, tools=TOOLS).markers[2:] == ("<tool_call>", "</tool_call>")


def test_a_long_reply_takes_time_in_proportion() -> None:
    """100,000 characters of a call in single characters: a parser that reads all again would take minutes."""
    parser = parser_for(THINKING, tools=TOOLS)
    text = '<tool_call>{"name": "write_file", "arguments": {"text": "' + "a" * 100_000 + '"}}</tool_call>'
    parts = parts_of(parser, list(text))
    assert len(calls(parts)[0][1]) == 100_000 + len('{"text": ""}')
