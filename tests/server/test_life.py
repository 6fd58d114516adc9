"""`denim serve` as an operator has it, in its two processes: it starts, loses its engine, drains, ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.raw_client import request
from bench.served import HOST, Served
from tests.in_use import in_use
from tests.server.patience import PATIENCE, until

MODEL = ["--device", "cpu", "--memory", "48MiB", "--max-model-len", "1024", "--max-num-seqs", "8"]
PROMPT = "Fellow citizens of the Senate"
LONG = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(MODEL) as served:
        yield served


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def url(served: Served, path: str = "/v1/completions") -> str:
    return f"http://{HOST}:{served.port}{path}"


def stats(served: Served) -> dict[str, Any]:
    return json.loads(served.get("/stats")[1])


def metric(served: Served, name: str) -> float:
    lines = served.get("/metrics")[1].decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


def idle(served: Served) -> bool:
    return in_use(stats(served)) == 0


def hang_up_after(served: Served, body: dict[str, Any], seconds: float) -> None:
    """Ask, and close the connection a little later."""
    with socket.create_connection((HOST, served.port)) as connection:
        connection.sendall(request("/v1/completions", body))
        time.sleep(seconds)


def test_kill_9_of_the_engine_in_mid_stream(served: Served, threads: ThreadPoolExecutor) -> None:
    """Streams end with an error event, whole answers are 503, and within seconds the server serves again."""
    before = httpx.post(url(served), json=SHORT, timeout=PATIENCE).json()["choices"]
    crashes = metric(served, "denim_engine_crashes_total")
    tasks, files = metric(served, "denim_server_tasks"), served.server.num_fds()
    whole = [threads.submit(httpx.post, url(served), json=LONG, timeout=PATIENCE) for _ in range(3)]
    streams = [threads.submit(httpx.post, url(served), json=LONG | {"stream": True}, timeout=PATIENCE)]
    with openai.OpenAI(base_url=url(served, "/v1"), api_key="none", max_retries=0) as client:
        asked = {name: LONG[name] for name in ("prompt", "max_tokens", "temperature")}
        extra = {"ignore_eos": True}
        stream = client.completions.create(model="denim-tiny", stream=True, extra_body=extra, **asked)
        next(iter(stream))
        until(lambda: stats(served)["running"] == 5)
        served.engine.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
    for answer in (one.result() for one in whole):
        assert answer.status_code == 503
        assert "SIGKILL" in answer.json()["error"]["message"]
    events = [line for line in streams[0].result().text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and "SIGKILL" in json.loads(events[-2][6:])["error"]["message"]
    refused = httpx.post(url(served), json=SHORT, timeout=PATIENCE)
    assert refused.status_code == 503
    until(lambda: served.get("/ready")[0] == 200)
    assert httpx.post(url(served), json=SHORT, timeout=PATIENCE).json()["choices"] == before
    assert metric(served, "denim_engine_crashes_total") == crashes + 1
    (served.engine,) = served.server.children()
    assert idle(served)
    assert metric(served, "denim_completions_in_work") == 0
    assert metric(served, "denim_server_tasks") == tasks
    until(lambda: served.server.num_fds() <= files)  # a connection may just be closing


def test_who_hangs_up_while_waiting_leaves_nothing(served: Served, threads: ThreadPoolExecutor) -> None:
    """AB-06, AB-07: eight run, the others wait, with a prefix that is warm; half hang up while they wait, and
    all slots are there for those who stay and for whoever comes."""
    body = {**SHORT, "max_tokens": 40, "ignore_eos": True, "prompt": PROMPT * 6}
    httpx.post(url(served), json=body, timeout=PATIENCE)
    stay = [threads.submit(httpx.post, url(served), json=body, timeout=PATIENCE) for _ in range(25)]
    leave = [threads.submit(hang_up_after, served, body, 0.02 * place) for place in range(25)]
    for answer in (one.result() for one in stay):
        assert answer.json()["usage"]["completion_tokens"] == 40
    for one in leave:
        one.result()
    until(lambda: idle(served))  # AB-03
    assert metric(served, "denim_completions_in_work") == 0
    eight = [threads.submit(httpx.post, url(served), json=LONG, timeout=PATIENCE) for _ in range(8)]
    until(lambda: stats(served)["running"] == 8 or all(one.done() for one in eight))
    for one in eight:
        assert one.result().json()["usage"]["completion_tokens"] == 300


def test_a_reader_that_does_not_read_holds_up_nobody(served: Served) -> None:
    """What the others get, and how fast, does not depend on it; its answer waits for it, and is whole."""
    content = request("/v1/completions", {**LONG, "n": 4, "stream": True, "logprobs": 5})
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((HOST, served.port))
        lazy.sendall(content)
        until(lambda: stats(served)["running"] == 4)
        quick = httpx.post(url(served), json=LONG, timeout=PATIENCE)
        assert quick.json()["usage"]["completion_tokens"] == 300
        until(lambda: idle(served))  # the engine has long finished what the reader has not begun to read
        answer, lazy_file = b"", lazy.makefile("rb")
        while not answer.endswith(b"0\r\n\r\n"):
            answer += lazy_file.read1(65536)
    assert b"data: [DONE]" in answer
    assert answer.count(b'"finish_reason":"length"') == 4


def test_sigterm_drains(threads: ThreadPoolExecutor) -> None:
    """What runs gets its whole answer, whoever comes is turned away, both processes end."""
    with Served(MODEL) as served:
        running: list[Future[httpx.Response]] = [
            threads.submit(httpx.post, url(served), json=LONG | {"stream": bool(i)}, timeout=PATIENCE)
            for i in range(2)
        ]
        until(lambda: stats(served)["running"] == 2)
        os.kill(served.server.pid, signal.SIGTERM)
        until(lambda: refused(served))
        whole, streamed = (one.result() for one in running)
        assert whole.json()["usage"]["completion_tokens"] == 300
        assert streamed.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in streamed.text
        assert served.server.wait(PATIENCE) == 0
        assert not served.engine.is_running()


def refused(served: Served) -> bool:
    try:
        return httpx.post(url(served), json=SHORT, timeout=PATIENCE).status_code == 503
    except httpx.TransportError:
        return True


def test_sleep_and_wake_over_http(served: Served) -> None:
    """The memory of the model is given back; what is asked for meanwhile is told to come again."""
    before = httpx.post(url(served), json=SHORT, timeout=PATIENCE).json()
    used = served.engine.memory_info().rss
    assert json.loads(served.post("/sleep")[1]) == {"is_sleeping": True}
    assert served.engine.memory_info().rss < used
    assert served.get("/health")[0] == 200 and served.get("/ready")[0] == 503
    asleep = httpx.post(url(served), json=SHORT, timeout=PATIENCE)
    assert asleep.status_code == 503 and "sleeps" in asleep.json()["error"]["message"]
    assert metric(served, "denim_engine_up") == 0
    assert json.loads(served.post("/wake_up")[1]) == {"is_sleeping": False}
    after = httpx.post(url(served), json=SHORT, timeout=PATIENCE).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.slow  # 60 prompts
def test_the_files_of_the_prefix_cache_survive_kill_9(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """More prompts than the arena holds, so that some go down to the files; the engine is killed while others
    are on their way there. Afterwards all answers are as before, and some prompts are found in the files."""
    tiers = ["--host-memory", "32MiB", "--disk-cache", str(tmp_path / "prefixes")]
    small = ["--device", "cpu", "--dtype", "float32", "--memory", "8MiB", "--max-model-len", "512", *tiers]
    prompts = [f"{place}. {PROMPT}. " * 20 for place in range(30)]

    def ask(prompt: str) -> tuple[str, int]:
        answer = httpx.post(url(served), json=SHORT | {"prompt": prompt}, timeout=PATIENCE).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Served(small) as served:
        before = [ask(prompt)[0] for prompt in prompts]
        until(lambda: stats(served)["tiers"]["disk"]["checkpoints"] >= 5)
        more = [
            threads.submit(httpx.post, url(served), json=LONG | {"prompt": f"{i} {PROMPT}"}, timeout=PATIENCE)
            for i in range(9)
        ]
        until(lambda: stats(served)["running"] > 0)
        served.engine.send_signal(signal.SIGKILL)
        assert {one.result().status_code for one in more} <= {200, 503}
        until(lambda: served.get("/ready")[0] == 200)
        assert stats(served)["tiers"]["disk"]["checkpoints"] >= 5
        after = [ask(prompt) for prompt in prompts]
        assert [text for text, _ in after] == before
        assert sum(cached > 100 for _, cached in after) >= 5
