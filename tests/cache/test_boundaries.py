from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from denim.cache.boundaries import chat_boundaries
from denim.errors import RequestError

OPEN, CLOSE = "<|im_start|>", "<|im_end|>\n"


def qwen(strips: bool = True, thinking: bool = True, generation: bool = False) -> Callable[[list[Any]], str]:
    """A template as Qwen3.5's: thinking is dropped from all answers before the last user message."""

    def render(messages: list[Any]) -> str:
        text = ""
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for place, message in enumerate(messages):
            text += f"{OPEN}{message['role']}\n"
            if (
                message["role"] == "assistant"
                and message.get("thought")
                and (place > last_user or not strips)
            ):
                text += f"<think>\n{message['thought']}\n</think>\n\n"
            text += message["content"] + CLOSE
        if generation:
            text += f"{OPEN}assistant\n" + ("<think>\n" if thinking else "<think>\n\n</think>\n\n")
        return text

    return render


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def boundaries(messages: list[Any], **template: Any) -> tuple[str, list[int]]:
    prompt = qwen(generation=True, **template)(messages)
    later = qwen(**template)
    return prompt, chat_boundaries(lambda m: ids(later(m)), messages, ids(prompt))


SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello there"}


@pytest.mark.parametrize("thinking", [True, False])
def test_a_plain_turn(thinking: bool) -> None:
    prompt, found = boundaries([SYSTEM, USER], thinking=thinking)
    system_end = prompt.index("hello")
    opener = prompt.index("<think>")
    assert found == [system_end, opener]


def test_without_a_system_part_there_is_one() -> None:
    prompt, found = boundaries([USER])
    assert found == [prompt.index("<think>")]


def test_the_next_turn_agrees_up_to_the_boundary_and_no_further() -> None:
    messages = [SYSTEM, USER]
    for turn in range(4):
        prompt, found = boundaries(messages)
        messages = [
            *messages,
            {"role": "assistant", "content": f"answer {turn}", "thought": "hm"},
            {"role": "user", "content": f"question {turn}"},
        ]
        following, _ = boundaries(messages)
        assert following[: found[-1]] == prompt[: found[-1]]
        assert following[found[-1]] != prompt[found[-1]]


def test_in_a_tool_loop_it_is_the_opener_behind_the_last_user_message() -> None:
    """The loop's own thinking stays until the next user message, and goes with it."""
    call = {"role": "assistant", "content": "call", "thought": "I need the tool"}
    tool = {"role": "tool", "content": "42"}
    prompt, found = boundaries([SYSTEM, USER, call, tool, call, tool])
    assert found[-1] == prompt.index("<think>\nI need")
    kept, found = boundaries([SYSTEM, USER, call, tool, call, tool], strips=False)
    assert found[-1] == kept.rindex("<think>")


def test_a_template_that_refuses_the_dummies_names_nothing() -> None:
    def render(messages: list[Any]) -> list[int]:
        raise RequestError("roles must alternate")

    assert chat_boundaries(render, [SYSTEM, USER], [1, 2, 3]) == []
