"""Health, readiness, metrics, the cache emptied, sleep and waking; models and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import denim
from denim import AsyncEngine
from denim.commands.cache_inspect import read_snapshot
from tests.server.live import Live, live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose engine nobody else uses."""
    engine = AsyncEngine(memory="16MiB", max_num_seqs=8)
    with live(engine) as server:
        yield server
    asyncio.run(engine.close())


def families_of(url: str) -> list[Metric]:
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return list(text_string_to_metric_families(response.text))


def metrics_of(url: str) -> dict[str, float]:
    """Samples by name and labels: 'denim_pages{state="used"}'."""
    found = {}
    for family in families_of(url):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def complete(url: str, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "A text of some length, to be kept. " * 16, "max_tokens": 4, "ignore_eos": True} | body
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def test_health_and_readiness(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": denim.__version__}
    for path in ("/health", "/ready"):  # as some load balancers ask
        assert (http.head(path).status_code, http.head(path).content) == (200, b"")


def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    engine = AsyncEngine(memory="16MiB")
    with live(engine) as server:
        asyncio.run(engine.close())
        for path in ("/health", "/ready"):
            response = httpx.get(server.url + path)
            assert (response.status_code, response.json()["status"]) == (503, "the engine is gone")
        assert metrics_of(server.url)["denim_engine_up"] == 0
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert "closed" in response.json()["error"]["message"]


def test_metrics_count_requests_and_tokens(own: Live) -> None:
    before = metrics_of(own.url)
    complete(own.url, n=2)
    httpx.post(f"{own.url}/v1/completions", json={"prompt": "x", "max_tokens": -1})
    httpx.get(f"{own.url}/a/path/that/is/none")
    after = metrics_of(own.url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("denim_http_requests_total{path=/v1/completions,status=200}") == 1
    assert grown("denim_http_requests_total{path=/v1/completions,status=400}") == 1
    assert grown("denim_http_requests_total{path=(none),status=404}") == 1
    assert grown("denim_request_tokens_total{kind=completion}") == 8
    assert grown("denim_request_tokens_total{kind=prompt}") > 10
    assert grown("denim_completions_total{finish_reason=length}") == 2
    assert grown("denim_request_seconds_count") == 1
    assert grown("denim_time_to_first_token_seconds_count") == 1
    assert grown("denim_inter_token_seconds_count") <= 6  # tokens that came together are one sample
    assert grown("denim_engine_steps_total") >= 4
    assert after["denim_completions_in_work"] == 0


def test_tokens_are_timed_one_by_one(tmp_path: Path) -> None:
    script = ScriptedEngine(tmp_path)
    script.say("four")
    with live(script) as server:
        complete(server.url, n=2)
        found = metrics_of(server.url)
    assert found["denim_time_to_first_token_seconds_count"] == 1
    assert found["denim_inter_token_seconds_count"] == 6


def test_gauges_are_the_engine_s(own: Live) -> None:
    found, stats = metrics_of(own.url), httpx.get(f"{own.url}/stats").json()
    for kind in ("slabs", "pages", "slots"):
        for state in ("total", "used", "cached", "free"):
            assert found[f"denim_{kind}{{state={state}}}"] == stats[kind][state]
    assert found["denim_requests_running"] == stats["running"] == 0
    assert found["denim_prefix_queries_total"] == stats["prefix"]["queries"]
    for reason, tokens in stats["prefix"]["lost"].items():
        assert found[f"denim_prefix_lost_tokens_total{{reason={reason}}}"] == tokens


def test_the_sizes_in_force_are_told(own: Live) -> None:
    """AP-12: the page that is reported is the page that prompts of growing length are cut into."""
    engine = own.serving.engine
    info = next(name for name in metrics_of(own.url) if name.startswith("denim_engine_info"))
    assert f"page_size={engine.facts.page_size}" in info
    assert f"chunk_size={engine.facts.chunk_size}" in info
    size = engine.facts.page_size
    for pages in (1, 2, 5):
        # From its first token to its last this request needs just so many pages.
        body = {"prompt": [100] * ((pages - 1) * size + 1), "max_tokens": size - 1, "ignore_eos": True}
        assert pages_in_use(own.url, body | {"stream": True, "no_store": True}) == pages


def pages_in_use(url: str, body: dict[str, Any]) -> int:
    """While the request runs; it is sent again until it was seen running."""
    with httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(30):
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
                used = http.get("/stats").json()["pages"]["used"]
            if used:
                return used
    raise AssertionError("the request was never seen running")


def test_counters_only_grow(own: Live) -> None:
    """What can fall is a gauge, also when the cache is emptied."""
    complete(own.url)
    before, counters = metrics_of(own.url), set()
    httpx.post(f"{own.url}/reset_prefix_cache")
    for family in families_of(own.url):
        if family.type == "counter":
            counters |= {sample.name for sample in family.samples}
    after = metrics_of(own.url)
    fallen = {name.partition("{")[0] for name, value in before.items() if after.get(name, 0) < value}
    assert "denim_prefix_checkpoints" in fallen and not fallen & counters


def test_the_cache_is_emptied(own: Live) -> None:
    complete(own.url)
    assert complete(own.url)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    stats = httpx.get(f"{own.url}/stats").json()
    assert stats["slots"]["cached"] > 0
    shown = read_snapshot(own.url)  # as `denim cache inspect` reads it
    assert shown["account"] == stats["prefix"] and any(node["checkpoint"] for node in shown["nodes"])
    assert httpx.post(f"{own.url}/reset_prefix_cache").json() == {"status": "ok"}
    assert httpx.get(f"{own.url}/stats").json()["slots"]["cached"] == 0
    assert complete(own.url)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_sleep_and_wake(own: Live) -> None:
    text = complete(own.url, temperature=0)["choices"][0]["text"]
    with httpx.Client(base_url=own.url, timeout=60) as http:
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            assert http.post("/sleep").json() == {"is_sleeping": True}
            assert any("ended by the server" in line for line in lines), "what runs ends with an error"
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert "wake it first" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        found = metrics_of(own.url)
        assert (found["denim_engine_up"], found["denim_engine_asleep"]) == (0, 1)
        assert http.post("/wake_up").json() == {"is_sleeping": False}
        assert http.get("/ready").status_code == 200
    again = complete(own.url, temperature=0)
    assert again["choices"][0]["text"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# Models


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("denim-tiny", "model")
    assert model.max_model_len == 4096
    assert client.models.retrieve("denim-tiny").id == "denim-tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_a_model_under_other_names(tmp_path: Path) -> None:
    engine = ScriptedEngine(tmp_path, "word")
    with (
        live(engine, served_model_name=("org/name", "gpt-4")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list().data] == ["org/name", "gpt-4"]
        assert client.models.retrieve("org/name").root == "scripted"
        assert client.completions.create(model="gpt-4", prompt="x").model == "gpt-4"
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).json()["model"] == "org/name"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="scripted", prompt="x")


# Tokens


def test_tokens_there_and_back(http: httpx.Client) -> None:
    text = "A text: 中文, é, 😀."
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokens_of_a_conversation(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    count = http.post("/tokenize", json=chat).json()["count"]
    answer = http.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count


def test_tokens_of_what_is_too_long_to_answer(http: httpx.Client) -> None:
    text = "word " * 9000
    alone = http.post("/tokenize", json={"prompt": text}).json()["count"]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
    assert chat["count"] > alone > chat["max_model_len"]
    late = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    error = http.post("/tokenize", json={"messages": late}).json()["error"]
    assert (error["param"], "must be the first message" in error["message"]) == ("messages", True)


def test_lines_that_are_left_out_are_not_counted(tmp_path: Path) -> None:
    engine = ScriptedEngine(tmp_path, "x", HERMES_TEMPLATE, strip_lines=("^today",))
    turns = [{"role": "system", "content": "today is Monday\nBe short."}, {"role": "user", "content": "x"}]
    with live(engine) as server, httpx.Client(base_url=server.url) as http:
        count = http.post("/tokenize", json={"messages": turns}).json()["count"]
        usage = http.post("/v1/chat/completions", json={"messages": turns}).json()["usage"]
        assert count == usage["prompt_tokens"]
        turns[0]["content"] = "Be short."
        assert http.post("/tokenize", json={"messages": turns}).json()["count"] == count


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either"),
        ("/tokenize", {"prompt": 7}, "valid string"),
        ("/tokenize", {"prompt": "x" * (2**22 + 1)}, "send at most 4,194,304 at once"),
        ("/tokenize", {"messages": []}, "at least 1"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "not served"),
        ("/detokenize", {"tokens": [6144]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": "x"}, "valid list"),
        ("/detokenize", {}, "Missing"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]["message"]


def test_methods_and_paths_that_are_none(http: httpx.Client) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET")):
        response = http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert response.json()["error"]["message"].endswith(f"it takes {allowed}")
    assert http.post("/assets/look.css").json()["error"]["message"].endswith("it takes GET, HEAD")
    error = http.get("/v1/nothing").json()["error"]
    assert error["type"] == "not_found_error"
    assert "/docs lists what there is" in error["message"]
