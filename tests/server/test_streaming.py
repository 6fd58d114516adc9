"""Streams as they reach clients: whole characters, failures on the way, readers that are slow or leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from denim import LLM, AsyncEngine, SamplingParams
from denim.server.attention import WRITE_TICK
from tests.engine.byte_tokenizer import save, token_of
from tests.in_use import in_use
from tests.server.live import Live, live
from tests.server.patience import until
from tests.server.scripted import ScriptedEngine
from tests.server.slow_reader import slow_reader
from tests.tiny import checkpoint

TEXT_VOCAB = 288


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes: most of what it writes is half a character."""
    folder = tmp_path_factory.mktemp("babbler")
    checkpoint(folder, vocab_size=TEXT_VOCAB, seed=3)
    return save(folder)


@pytest.fixture(scope="module")
def babbler(folder: Path) -> Iterator[Live]:
    engine = AsyncEngine(folder, memory="8MiB", max_model_len=512, max_num_seqs=64)
    with live(engine, served_model_name="babbler") as server:
        yield server
    asyncio.run(engine.close())


@pytest.fixture
def script(tmp_path: Path) -> ScriptedEngine:
    return ScriptedEngine(tmp_path)


def events_of(response: httpx.Response) -> list[Any]:
    texts = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


def text_of(url: str, body: dict[str, Any]) -> tuple[str, list[int]]:
    """The joined text of a stream, and its token ids."""
    asked = {"stream": True, "return_token_ids": True} | body
    choices = [
        event["choices"][0]
        for event in events_of(httpx.post(f"{url}/v1/completions", json=asked, timeout=60))
    ]
    return "".join(c["text"] for c in choices), [token for c in choices for token in c["token_ids"]]


# What is written


@pytest.mark.parametrize("text", ["the 中文 thing", "é中😀", "Žluťoučký kůň 🐴", "plain"])
def test_characters_of_several_tokens(script: ScriptedEngine, text: str) -> None:
    """ST-02: a token for every byte."""
    script.say(list(text.encode()))
    with live(script) as server:
        written, ids = text_of(server.url, {"prompt": "x", "max_tokens": 100})
    assert written == text
    assert ids == list(text.encode())


def test_random_bytes_stream_as_they_decode(babbler: Live) -> None:
    """ST-02, ST-05: the stream joined is the text of all its tokens, valid or not."""
    tokenizer = babbler.serving.engine.tokenizer
    assert tokenizer is not None
    for seed in range(5):
        text, ids = text_of(babbler.url, {"prompt": "x", "max_tokens": 40, "seed": seed, "temperature": 2.0})
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_server_changes_no_token(babbler: Live, folder: Path) -> None:
    """What `LLM` writes in this process is what the server answers, token by token and letter by letter."""
    llm = LLM(folder, memory="8MiB", max_model_len=512)
    prompts = ["the thing", "中文", "12345"]
    params = SamplingParams(max_tokens=20, seed=4, temperature=0.8, n=2)
    expected = [one for output in llm.generate(prompts, params) for one in output.outputs]
    body = {"prompt": prompts, "max_tokens": 20, "seed": 4, "temperature": 0.8, "n": 2}
    asked = body | {"return_token_ids": True}
    answer = httpx.post(f"{babbler.url}/v1/completions", json=asked, timeout=60).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [one.token_ids for one in expected]
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in expected]


@pytest.mark.parametrize("length", [1, 2])
def test_a_prompt_that_ends_inside_a_character(babbler: Live, length: int) -> None:
    """ST-03: nothing of the prompt comes out."""
    secret = list(b"PASSWORD ") + list("中".encode())[:length]
    text, ids = text_of(babbler.url, {"prompt": secret, "max_tokens": 20, "temperature": 0})
    tokenizer = babbler.serving.engine.tokenizer
    assert tokenizer is not None
    assert "PASS" not in text
    assert len(text) <= len(tokenizer.decode(ids)) + 1


def test_stop_strings_and_wide_characters(babbler: Live) -> None:
    """ST-04: 50 streams at once of 3-byte characters, stops of 1 to 8 bytes; each is as the whole answer."""
    bias = {str(token_of("文".encode()[:1])): 4, "228": 4, "184": 3, "173": 3}
    body = {"prompt": "中文", "max_tokens": 16, "logit_bias": bias, "temperature": 1.0}

    def both(seed: int) -> tuple[str, str]:
        asked = body | {"seed": seed, "stop": "Z" * (1 + seed % 8)}
        whole = httpx.post(f"{babbler.url}/v1/completions", json=asked, timeout=60).json()
        return whole["choices"][0]["text"], text_of(babbler.url, asked)[0]

    with ThreadPoolExecutor(50) as pool:
        for whole, streamed in pool.map(both, range(50)):
            assert whole == streamed
    assert httpx.get(f"{babbler.url}/health").status_code == 200


# Failures on the way


def test_an_error_before_the_first_token_has_a_status(script: ScriptedEngine) -> None:
    script.say("x", ends="error")
    with live(script) as server:
        for stream in (True, False):
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": stream})
            assert response.status_code == 500
            assert "the engine failed" in response.json()["error"]["message"]


def test_an_error_in_mid_stream_is_an_event(script: ScriptedEngine) -> None:
    script.say("some words", ends="error")
    with live(script) as server:
        events = events_of(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}))
        assert "the engine failed" in events[-1]["error"]["message"]
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError, match="the engine failed"),
        ):
            list(client.completions.create(model="scripted", prompt="x", stream=True))


def test_the_death_of_the_engine_is_told_to_every_client(script: ScriptedEngine) -> None:
    script.say("some words", ends=None)

    def read(url: str, stream: bool) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": stream}, timeout=20)

    with live(script) as server, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(read, server.url, stream) for stream in [True] * 4 + [False] * 2]
        until(lambda: server.serving.gate.open == 6 and server.serving.gate.waiting == 0)
        script.die()
        streams, wholes = [answer.result() for answer in answers[:4]], [a.result() for a in answers[4:]]
        for response in streams:
            assert "ended by SIGKILL" in events_of(response)[-1]["error"]["message"]
        for response in wholes:
            assert response.status_code == 503
            assert "ended by SIGKILL" in response.json()["error"]["message"]
            assert "retry-after" in response.headers
        until(lambda: server.serving.gate.open == 0)


# Readers that leave or are slow


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_let_go(script: ScriptedEngine, stream: bool) -> None:
    """AB-03, AB-04: streaming or not."""
    script.say("some words", ends=None)
    body = {"prompt": "x", "stream": stream}
    with live(script) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
        until(lambda: bool(script.aborted) and server.serving.gate.open == 0)


def test_a_client_that_leaves_before_the_first_token(script: ScriptedEngine) -> None:
    """AB-05."""
    script.say("x", pause=30.0)
    with live(script) as server:
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{server.url}/v1/completions", json={"prompt": "x", "stream": stream}, timeout=0.3
                )
        until(lambda: len(script.aborted) == 2 and server.serving.gate.open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_a_batch(script: ScriptedEngine, stream: bool) -> None:
    script.say("some words", ends=None)
    body = {"prompt": ["a", "b", "c"], "n": 2, "stream": stream}
    with live(script) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
        until(lambda: len(script.aborted) == 3 and server.serving.gate.open == 0)


def test_one_bad_prompt_ends_its_batch(babbler: Live) -> None:
    """The engine refuses the second one when the first runs already."""
    body = {"prompt": ["a long prompt", "x"], "max_tokens": 300, "ignore_eos": True, "cache_control": [5]}
    for stream in (True, False):
        response = httpx.post(f"{babbler.url}/v1/completions", json=body | {"stream": stream}, timeout=30)
        if response.status_code == 200:  # the first one had begun to stream
            assert "cache_control has 5" in events_of(response)[-1]["error"]["message"]
        else:
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "cache_control"
    until(lambda: babbler.serving.gate.open == 0)
    until(lambda: httpx.get(f"{babbler.url}/stats").json()["running"] == 0)


def test_clients_that_leave_a_real_engine(babbler: Live) -> None:
    """Twenty streams, closed after a few tokens; nothing runs or is held soon after."""
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(base_url=babbler.url, timeout=20) as client:
        for _ in range(20):
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(5):
                    next(lines)

        until(lambda: in_use(client.get("/stats").json()) == 0)
    assert babbler.serving.gate.open == 0


def test_slow_readers_hold_nobody_up(script: ScriptedEngine) -> None:
    script.say("word " * 300, ends=None)  # some 300 kB of events; none is over before the last begins
    with live(script) as server:
        sleepers = [slow_reader(server.url, {"prompt": "x", "stream": True}) for _ in range(8)]
        until(lambda: server.serving.gate.open == 8)
        script.say("a word")
        assert text_of(server.url, {"prompt": "x"})[0] == "a word"
        for sleeper in sleepers:
            sleeper.close()
        until(lambda: server.serving.gate.open == 0)


def test_a_reader_that_stops_reading_is_cut(script: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("denim.server.attention.WRITE_TICK", 0.1)
    assert WRITE_TICK > 0.1
    script.say("a long text that fills every buffer between here and there " * 4000)
    with live(script, write_timeout=0.5) as server:
        sleeper = slow_reader(server.url, {"prompt": "x", "stream": True})
        until(lambda: server.serving.gate.open == 1)
        until(lambda: server.serving.gate.open == 0)
        sleeper.close()


def test_many_streams_at_once_stay_apart(babbler: Live) -> None:
    def write(seed: int) -> tuple[str, str]:
        body = {"prompt": "x", "max_tokens": 12, "seed": seed, "temperature": 1.0}
        return text_of(babbler.url, body)[0], text_of(babbler.url, body)[0]

    threads = threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        pairs = list(pool.map(write, range(32)))
    assert all(first == second for first, second in pairs)
    assert len({first for first, _ in pairs}) > 16
    assert threading.active_count() < threads + 60
