from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from denim.cache.boundaries import ChatText, chat_boundaries, marked_positions
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


def chat_of(messages: list[Any], **template: Any) -> ChatText:
    prompt = qwen(generation=True, **template)(messages)
    return ChatText(prompt, ids(prompt), qwen(**template), ids, specials=[OPEN, CLOSE[:-1]])


def boundaries(messages: list[Any], **template: Any) -> tuple[str, list[int]]:
    chat = chat_of(messages, **template)
    found = chat_boundaries(chat, messages)
    assert chat_boundaries(chat._replace(specials=[]), messages) == found, "the short way is another"
    return chat.text, found


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
    def render(messages: list[Any]) -> str:
        raise RequestError("roles must alternate")

    chat = chat_of([SYSTEM, USER])._replace(render=render)
    assert chat_boundaries(chat, [SYSTEM, USER]) == []


def test_marks_are_ends_of_messages() -> None:
    marked = {**USER, "cache_control": {"type": "ephemeral"}}
    messages = [SYSTEM, marked, {"role": "assistant", "content": "yes"}, USER]
    chat = chat_of(messages)
    assert marked_positions(chat, messages) == [chat.text.index(OPEN + "assistant")]
    assert marked_positions(chat, [SYSTEM, USER]) == []


def test_only_the_surroundings_are_tokenised() -> None:
    """A long history is not tokenised again for every turn."""
    history = [SYSTEM]
    for turn in range(200):
        history += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": "x" * 80},
        ]
    history.append(USER)
    chat = chat_of(history)
    encoded: list[int] = []
    counting = chat._replace(encode=lambda text: encoded.append(len(text)) or ids(text))
    assert chat_boundaries(counting, history) == chat_boundaries(chat, history)
    assert sum(encoded) < len(chat.text) / 5


def test_a_tokenizer_that_does_not_cut_at_special_tokens() -> None:
    """Pairs of characters, counted from the beginning: then everything is tokenised."""

    def pairs(text: str) -> list[int]:
        return [hash(text[at : at + 2]) for at in range(0, len(text), 2)]

    messages = [SYSTEM, USER]
    prompt = qwen(generation=True)(messages)
    chat = ChatText(prompt, pairs(prompt), qwen(), pairs, specials=[OPEN, CLOSE[:-1]])
    system_end, opener = prompt.index("hello"), prompt.index("<think>")
    assert chat_boundaries(chat, messages) == [system_end // 2, opener // 2]


def test_tools_are_a_system_part() -> None:
    chat = chat_of([USER])._replace(has_tools=True)
    assert chat_boundaries(chat, [USER])[0] == chat.text.index("hello")


def test_marks_inside_a_message() -> None:
    messages = [{**SYSTEM, "cache_control": [2, 8]}, USER]
    chat = chat_of(messages)
    begin = chat.text.index("be brief")
    # Behind the whole content the template goes on, and that is shared too.
    assert marked_positions(chat, messages) == [begin + 2, begin + 8 + len(CLOSE)]
