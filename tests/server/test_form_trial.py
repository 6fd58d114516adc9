"""Forms that would crash, hang or starve the engine are met in a process apart."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from denim import RequestError, StructuredOutput
from denim.engine.tokenizer import load_tokenizer
from denim.server import form_trial, form_trial_process
from denim.server.errors import ApiError
from denim.server.form_trial import FormTrial, is_foreign
from denim.spec.config_file import embedded_model
from tests.server.patience import until

CRASHES = "root ::= root{0,10}"


@pytest.fixture(scope="module")
def trial() -> Iterator[FormTrial]:
    tokenizer = load_tokenizer(embedded_model())
    assert tokenizer is not None
    trial = FormTrial(tokenizer, 6144, [2])
    yield trial
    trial.close()


def check(trial: FormTrial, *forms: StructuredOutput) -> list[str | None]:
    """What is said of each, asked all at once."""

    async def ask() -> list[BaseException | None]:
        return await asyncio.gather(*(trial.check(form) for form in forms), return_exceptions=True)

    results = asyncio.run(ask())
    assert all(result is None or isinstance(result, RequestError) for result in results), results
    return [None if result is None else str(result) for result in results]


def test_what_is_tried() -> None:
    assert is_foreign(StructuredOutput(regex="a"))
    assert is_foreign(StructuredOutput(grammar="root ::= root"))
    assert is_foreign(StructuredOutput(structural_tag={"type": "any_text"}))
    assert is_foreign(StructuredOutput(json={"type": "string", "pattern": "a"}))
    assert is_foreign(StructuredOutput(json={"type": "object", "patternProperties": {"a": {}}}))
    assert not is_foreign(StructuredOutput(json={"type": "string"}))
    assert not is_foreign(StructuredOutput(json_object=True))
    assert not is_foreign(StructuredOutput(choice=["a"]))
    tools = {"type": "json_schema", "json_schema": {}}
    assert not is_foreign(StructuredOutput(structural_tag=tools, named="tools"))
    tools = {"type": "json_schema", "json_schema": {"pattern": "a"}}
    assert is_foreign(StructuredOutput(structural_tag=tools, named="tools"))


def test_harmless_forms_pass_and_bad_ones_are_told(trial: FormTrial) -> None:
    good = StructuredOutput(regex="[a-z]+")
    assert check(trial, good, StructuredOutput(regex="(a"), good) == [
        None,
        "regex: Regex parsing error at position 3: The parenthesis is not closed.",
        None,
    ]


def test_a_crash_hurts_nobody(trial: FormTrial) -> None:
    """This grammar crashes its compiler; where it does not any more, it is refused as endless."""
    crash, fine = check(trial, StructuredOutput(grammar=CRASHES), StructuredOutput(regex="[0-9]{3}"))
    assert crash is not None
    assert fine is None
    assert check(trial, StructuredOutput(regex="[0-9]{4}")) == [None]


@pytest.mark.slow
def test_what_never_ends_is_stopped(trial: FormTrial) -> None:
    endless = StructuredOutput(regex="((a{0,1000}){0,1000}){0,1000}")
    (error,) = check(trial, endless)
    assert error is not None
    assert "within 10 s and 4 GiB" in error or "ms a token" in error


def test_who_leaves_early_disturbs_nobody(trial: FormTrial) -> None:
    async def scene() -> None:
        leaves = asyncio.ensure_future(trial.check(StructuredOutput(regex="[0-9]{5}")))
        await asyncio.sleep(0.01)
        leaves.cancel()
        await trial.check(StructuredOutput(regex="[0-9]{6}"))

    asyncio.run(scene())


def test_many_at_once(trial: FormTrial) -> None:
    """More than are tried at a time, with one that crashes among them."""
    forms = [StructuredOutput(regex=f"[a-z]{{{n + 1}}}") for n in range(3 * form_trial_process.AT_ONCE)]
    results = check(trial, *forms[:6], StructuredOutput(grammar=CRASHES), *forms[6:])
    assert results.pop(6) is not None
    assert set(results) == {None}


def test_a_process_that_ends_is_started_again(trial: FormTrial) -> None:
    check(trial, StructuredOutput(regex="first"))
    assert trial._process is not None
    ended = trial._process.popen
    os.kill(ended.pid, signal.SIGKILL)
    ended.wait()
    assert check(trial, StructuredOutput(regex="second")) == [None]
    until(lambda: ended.stdin.closed and ended.stdout.closed)


def test_a_process_that_ends_as_it_begins(trial: FormTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is started; where that ends as well, the client is told to come again."""
    started = []

    def stillborn(command: list[str], **pipes: Any) -> subprocess.Popen:
        started.append(command)
        if len(started) % 3 == 0:
            return really(command, **pipes)
        process = really([sys.executable, "-c", ""], **pipes)
        process.wait()
        return process

    trial.close()
    really = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", stillborn)
    with pytest.raises(ApiError, match="has ended; ask again"):
        asyncio.run(trial.check(StructuredOutput(regex="never")))
    assert check(trial, StructuredOutput(regex="third")) == [None]
    assert len(started) == 3


def test_over_http(client: openai.OpenAI) -> None:
    ask = {"model": "denim-tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="grammar: ") as caught:
        client.chat.completions.create(**ask, extra_body={"structured_outputs": {"grammar": CRASHES}})
    assert caught.value.param == "structured_outputs"
    assert client.chat.completions.create(**ask).choices


def test_its_limits_are_below_the_servers_patience() -> None:
    assert form_trial_process.SECONDS < form_trial.WAIT


def test_forms_that_wait_leave_the_threads_that_read_prompts(trial: FormTrial) -> None:
    """More text than the pipe to the process holds while it is stopped: asking waits, all else goes on."""

    async def read_meanwhile() -> None:
        trial_process = trial._process
        assert trial_process is not None
        os.kill(trial_process.popen.pid, signal.SIGSTOP)
        try:
            forms = [StructuredOutput(regex=f"a{number}" + "b" * 100_000) for number in range(40)]
            asked = [asyncio.ensure_future(trial.check(form)) for form in forms]
            await asyncio.sleep(0.2)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), 5) == "read"
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        finally:
            os.kill(trial_process.popen.pid, signal.SIGKILL)

    check(trial, StructuredOutput(regex="started"))
    asyncio.run(read_meanwhile())
    assert check(trial, StructuredOutput(regex="again")) == [None]


def test_closing_while_asking_waits_for_room(trial: FormTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """More text than the pipe holds, to a process that does not read: it is ended, and who asked is told."""
    asking, send = threading.Event(), form_trial._Process._send

    def noted(process: Any, message: object) -> None:
        asking.set()
        send(process, message)

    async def scene(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            asked = asyncio.ensure_future(trial.check(StructuredOutput(regex="a" + "b" * 200_000)))
            await asyncio.to_thread(asking.wait)
            closing = threading.Thread(target=trial.close)
            closing.start()
            await asyncio.to_thread(closing.join, 20)
            assert not closing.is_alive()
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="has ended; ask again"):
            await asked

    check(trial, StructuredOutput(regex="begun"))
    assert trial._process is not None
    monkeypatch.setattr(form_trial._Process, "_send", noted)
    asyncio.run(scene(trial._process.popen.pid))
    assert check(trial, StructuredOutput(regex="anew")) == [None]


ANSWERS_TWICE = """
import json, pickle, sys
pickle.load(sys.stdin.buffer)
while True:
    try:
        number, _ = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    for _ in range(2):
        print(json.dumps([number, None]), flush=True)
"""


def test_a_form_that_is_answered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child dies behind its answer, and is answered for: those after it still get theirs."""
    really = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **pipes: really([sys.executable, "-c", ANSWERS_TWICE], **pipes)
    )
    monkeypatch.setattr(form_trial, "WAIT", 20.0)
    tokenizer: Any = "not looked at"
    trial = FormTrial(tokenizer, 10, [])
    try:
        assert [check(trial, StructuredOutput(regex=letter)) for letter in "abc"] == [[None]] * 3
    finally:
        trial.close()


@pytest.mark.parametrize("letter", ["a", "\x01", "é", "中", "🧵", "\ud800"])
def test_an_answer_is_one_write(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones would be mixed with those of other children, and nobody could read either."""
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _, data: written.append(data))
    form_trial_process._answer(10**9, letter * 5000)
    (line,) = written
    assert len(line) <= select.PIPE_BUF
    number, text = json.loads(line)
    assert number == 10**9 and len(text) > 100


def test_who_leaves_as_the_answer_comes_has_left(trial: FormTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the request would be computed for nobody."""

    async def scene() -> None:
        answer = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(trial, "_answer", lambda form: answer)
        asked = asyncio.ensure_future(trial.check(StructuredOutput(regex="leaves")))
        await asyncio.sleep(0)
        answer.set_result(None)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(scene())
