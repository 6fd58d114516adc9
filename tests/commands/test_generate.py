"""`denim generate`: the text alone on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from denim import DenimError, RequestError, SamplingParams
from denim.cli import app
from denim.commands.generate import print_completion, read_prompt, stream_completion
from denim.engine import LLM, StreamDelta

GREEDY = SamplingParams(temperature=0, max_tokens=12)


class Piped(io.StringIO):
    def isatty(self) -> bool:
        return False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Scripted:
    """An engine that gives out "one ", "two ", "three "; `between` is called before the third."""

    def __init__(self, between: Any, finish_reason: str = "stop") -> None:
        self.between = between
        self.finish_reason = finish_reason

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StreamDelta]:
        for number, word in enumerate(["one ", "two ", "three "]):
            if number == 2:
                self.between()
            yield StreamDelta(
                "r", 0, word, [number], finish_reason=self.finish_reason if number == 2 else None
            )


def test_stream_is_the_text_and_the_pace_is_apart(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_completion(llm, "hello", GREEDY)
    seen = capsys.readouterr()
    assert seen.out == llm.generate("hello", GREEDY)[0].outputs[0].text + "\n"
    assert "12 tokens, the first after" in seen.err
    assert "tokens/s" in seen.err
    assert "end: length" in seen.err


def test_json(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    print_completion(llm, "hello", GREEDY)
    result = json.loads(capsys.readouterr().out)
    expected = llm.generate("hello", GREEDY)[0].outputs[0]
    assert (result["text"], result["token_ids"]) == (expected.text, expected.token_ids)
    assert (result["prompt_tokens"], result["completion_tokens"], result["finish_reason"]) == (
        5,
        12,
        "length",
    )
    assert 0 < result["seconds_to_first_token"] <= result["seconds"]


def test_ctrl_c_ends_the_stream_and_closes_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    engine: Any = Scripted(lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert not stream_completion(engine, "x", GREEDY)
    assert capsys.readouterr().out == "one two three \n"
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_ends_at_once() -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    engine: Any = Scripted(twice)
    with pytest.raises(KeyboardInterrupt):
        stream_completion(engine, "x", GREEDY)


def test_a_failed_request_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    engine: Any = Scripted(lambda: None, finish_reason="error")
    with pytest.raises(DenimError, match="the engine failed"):
        stream_completion(engine, "x", GREEDY)


def test_where_the_prompt_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Piped("from the pipe"))
    assert read_prompt("given") == "given"
    assert read_prompt(None) == "from the pipe"
    monkeypatch.setattr("sys.stdin", Terminal("typed"))
    assert read_prompt("-") == "typed"
    with pytest.raises(RequestError, match="no prompt"):
        read_prompt(None)


@pytest.mark.parametrize("typed", [None, "-"])
def test_an_empty_stdin_is_refused_before_a_model_is_read(
    typed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Piped(""))
    arguments = ["generate", "--model", "/no/model", *([] if typed is None else [typed])]
    error = CliRunner().invoke(app, arguments, input="").exception
    assert isinstance(error, RequestError) and "the prompt is empty" in str(error)


def test_json_says_what_came_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(memory="16MiB")
    prompt = "The river runs through the city, and the people walk along it. " * 10
    cached = []
    for _ in range(2):
        print_completion(llm, prompt, GREEDY)
        cached.append(json.loads(capsys.readouterr().out)["cached_tokens"])
    assert cached[0] == 0 < cached[1]
