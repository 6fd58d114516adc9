"""`denim chat`: what the model is sent, and the commands inside the conversation."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from denim import RequestError, SamplingParams
from denim.commands.answer import Pace
from denim.commands.chat import Chat, run_chat
from denim.engine import LLM, StreamDelta

GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Echo:
    """An engine that answers with the number of messages it was sent; `on_stream` runs first."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, str]]] = []
        self.options: dict[str, Any] = {}
        self.on_stream: Any = lambda: None

    def read_chat(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt is too long")
        self.sent.append(messages)
        self.options = options
        return [1]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamDelta]:
        yield StreamDelta("r", 0, f"{len(self.sent[-1])} ", [1])
        self.on_stream()
        yield StreamDelta("r", 0, "messages", [2])
        yield StreamDelta("r", 0, ".", [3], finish_reason="stop")


def talk(engine: Any, lines: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Chat:
    chat = Chat(engine, GREEDY, options.get("system"), options.get("thinking", False))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    run_chat(chat)
    return chat


def test_turns_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Echo()
    chat = talk(engine, "hello\n\nand now?\n", monkeypatch, system="be brief", thinking=True)
    assert capsys.readouterr().out == "2 messages.\n4 messages.\n"
    assert [message["role"] for message in chat.messages] == ["system"] + ["user", "assistant"] * 2
    assert chat.messages[2]["content"] == "2 messages."
    assert engine.options == {"enable_thinking": True}


def test_reset_keeps_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = talk(Echo(), "hello\n/reset\n", monkeypatch, system="be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]


def test_exit_and_unknown_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Echo()
    talk(engine, "/what\n/exit\nhello\n", monkeypatch)
    assert engine.sent == []
    assert "/reset forgets" in capsys.readouterr().err


def test_a_turn_that_cannot_be_served_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = talk(Echo(), "too long\nhello\n", monkeypatch)
    seen = capsys.readouterr()
    assert "denim: the prompt is too long" in seen.err
    assert seen.out == "1 messages.\n"
    assert len(chat.messages) == 2


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Echo()
    engine.on_stream = lambda: signal.raise_signal(signal.SIGINT)
    chat = talk(engine, "hello\nagain\n", monkeypatch)
    assert capsys.readouterr().out == "1 messages\n3 messages\n"
    assert chat.messages[1]["content"] == "1 messages"


def test_a_real_model_gets_its_template(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = talk(llm, "hi\n", monkeypatch)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.messages[1]["content"] == llm.generate(prompt, GREEDY)[0].outputs[0].text
    assert "6 tokens, the first after" in capsys.readouterr().err


def test_the_pace_is_of_the_tokens_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 0.5, 1.5, 2.5))
    monkeypatch.setattr("denim.commands.answer.time.perf_counter", lambda: next(now))
    pace = Pace()
    for tokens in (1, 3, 7):
        pace.count(tokens)
    assert str(pace) == "11 tokens, the first after 500 ms, 5 tokens/s after it"


def test_two_interrupts_leave_only_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(
        [KeyboardInterrupt, "hello", KeyboardInterrupt, "again", KeyboardInterrupt, KeyboardInterrupt]
    )

    def type_line(_: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    chat = Chat(Echo(), GREEDY, None, False)
    run_chat(chat)
    assert [message["content"] for message in chat.messages[::2]] == ["hello", "again"]
    assert next(typed, None) is None
    assert capsys.readouterr().err.count("Ctrl-C again or /exit to leave") == 3
