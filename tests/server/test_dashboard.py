"""The dashboard in a real browser, over a real engine: it shows what the engine says, and it can be used."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from denim import AsyncEngine
from denim.server.app import create_app
from tests.browser import Open, browser, open_page
from tests.server.live import Live, live

__all__ = ["browser", "open_page"]

PROMPT = (
    "Fellow citizens of the Senate and House of Representatives: " * 12
)  # longer than a chunk: shorter prompts have no checkpoint


def in_a_thread(coroutine: object) -> None:
    """Beside Playwright, whose event loop this thread runs."""
    with ThreadPoolExecutor(1) as other:
        other.submit(asyncio.run, coroutine).result()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(memory="32MiB", max_num_seqs=4, max_model_len=2048)
    yield engine
    in_a_thread(engine.check())
    in_a_thread(engine.close())


@pytest.fixture(scope="module")
def dashboard(engine: AsyncEngine) -> Iterator[Live]:
    with live(engine) as server:
        yield server


@pytest.fixture
def stats(dashboard: Live):
    return lambda: httpx.get(f"{dashboard.url}/stats").json()


def looked(url: str, **headers: str) -> dict:
    """The first event of the stream."""
    with httpx.stream("GET", f"{url}/api/live", headers=headers) as reply:
        assert reply.status_code == 200
        line = next(line for line in reply.iter_lines() if line.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


def complete(url: str, prompt: str = PROMPT, tokens: int = 8) -> dict:
    body = {"model": "denim-tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def say(page: Page, text: str) -> None:
    turns = page.locator(".turn[data-prompt]").count()
    page.fill("#chat-text", text)
    page.keyboard.press("Enter")
    expect(page.locator(".turn[data-prompt]")).to_have_count(turns + 1)


def test_slabs_and_cache_are_the_engines(dashboard: Live, stats, open_page: Open) -> None:
    complete(dashboard.url)
    complete(dashboard.url)
    page = open_page(dashboard.url)
    expect(page.locator("#pulse")).to_have_text("live")
    now = stats()
    expect(page.locator("#arena i")).to_have_count(now["slabs"]["total"])
    kinds = page.locator("#arena-kinds li")
    slabs = {
        one.get_attribute("data-kind"): int(one.get_attribute("data-slabs") or -1) for one in kinds.all()
    }
    assert sum(slabs.values()) == now["slabs"]["total"]
    assert slabs["empty"] == now["slabs"]["free"] and slabs["slots"] >= now["slots"]["cached"]
    assert page.locator("#arena i.slots").count() == slabs["slots"]

    reasons = {
        one.get_attribute("data-reason"): int(one.get_attribute("data-tokens") or -1)
        for one in page.locator(".reason").all()
    }
    assert reasons == {"reused": now["prefix"]["hit_tokens"], **now["prefix"]["lost"]}
    assert reasons["reused"] > 0 and reasons["one_token"] > 0

    knots = page.locator('#tree [data-checkpoint="true"]')
    expect(knots).to_have_count(now["prefix"]["checkpoints"])
    hits = sum(int(one.get_attribute("data-hits") or 0) for one in knots.all())
    assert hits >= 1
    text = httpx.get(f"{dashboard.url}/metrics").text
    count = next(line for line in text.splitlines() if line.startswith("denim_inter_token_seconds_count"))
    assert page.locator("#inter-token").get_attribute("data-count") == f"{float(count.split()[1]):,.0f}"


def test_a_chat_shows_what_each_turn_took_from_the_cache(dashboard: Live, stats, open_page: Open) -> None:
    page = open_page(dashboard.url)
    page.select_option("#most", "64")
    before = stats()["prefix"]
    for text in ("What of the navy and its ships?", "And of the army?", "And of the harbours?"):
        say(page, text)
    turns = page.locator(".turn[data-prompt]").all()
    cached = [int(turn.get_attribute("data-cached") or -1) for turn in turns]
    prompts = [int(turn.get_attribute("data-prompt") or -1) for turn in turns]
    after = stats()["prefix"]
    assert sum(cached) == after["hit_tokens"] - before["hit_tokens"]
    assert sum(prompts) == after["query_tokens"] - before["query_tokens"]
    assert 0 < cached[1] < cached[2] and cached[1] > prompts[0] / 2
    expect(turns[2].locator(".usage")).to_contain_text(f"{cached[2]} cached of {prompts[2]} prompt tokens")
    drawn = turns[2].locator(".strip").evaluate("bar => bar.firstChild.offsetWidth / bar.clientWidth")
    assert drawn == pytest.approx(cached[2] / prompts[2], abs=0.02)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_a_running_request_is_seen_and_stopped(dashboard: Live, stats, open_page: Open) -> None:
    page = open_page(dashboard.url)

    def endless(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    page.select_option("#most", "1024")
    page.fill("#chat-text", "Tell me of the state of the Union, and of all that was done.")
    page.keyboard.press("Enter")
    row = page.locator('#requests tr[data-status="running"]')
    expect(row).to_have_count(1)
    expect(row.locator(".strip .generated")).not_to_have_attribute("style", "width: 0%;")
    expect(page.locator('[data-fact="running"]')).to_have_attribute("data-value", "1")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#requests")).to_have_attribute("data-total", "0")
    assert stats()["running"] == 0


def test_throughput_moves(dashboard: Live, open_page: Open) -> None:
    page = open_page(dashboard.url)
    other = threading.Thread(target=complete, args=(dashboard.url, "Of peace with all nations", 250))
    other.start()
    rate = page.locator('#throughput [data-key="first"] b')
    expect(rate).not_to_have_text("0 tokens/s")
    other.join()


def test_markup_in_an_answer_stays_text(dashboard: Live, open_page: Open) -> None:
    page = open_page(dashboard.url)
    page.select_option("#most", "64")
    say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    expect(page.locator(".said")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator(".said *").count() == 0


@pytest.mark.parametrize("width", [320, 390, 820])
def test_a_narrow_window(width: int, dashboard: Live, open_page: Open) -> None:
    complete(dashboard.url)
    page = open_page(dashboard.url, viewport={"width": width, "height": 700})
    expect(page.locator("#pulse")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark(dashboard: Live, open_page: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    dark, light = (open_page(dashboard.url, color_scheme=scheme) for scheme in ("dark", "light"))
    assert dark.evaluate(paper) != light.evaluate(paper)


def test_a_sleeping_engine_is_said(dashboard: Live, open_page: Open) -> None:
    page = open_page(dashboard.url, expected="status of 503")
    expect(page.locator("#pulse")).to_have_text("live")
    assert httpx.post(f"{dashboard.url}/sleep").status_code == 200
    expect(page.locator("#unavailable")).to_contain_text("sleeps")
    page.fill("#chat-text", "Are you there?")
    page.keyboard.press("Enter")
    expect(page.locator(".usage .wrong")).to_contain_text("sleeps")
    assert httpx.post(f"{dashboard.url}/wake_up", timeout=60).status_code == 200
    expect(page.locator("#pulse")).to_have_text("live")
    expect(page.locator("#unavailable")).to_be_hidden()


def test_a_key_is_asked_for(engine: AsyncEngine, open_page: Open) -> None:
    with live(engine, api_keys=("secret",)) as server:
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/api/live").status_code == 401
        assert looked(server.url, authorization="Bearer secret")["facts"]
        page = open_page(server.url, expected="status of 401")
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#pulse")).to_have_text("wrong API key")
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#pulse")).to_have_text("live")
        say(page, "Good morning.")
        page.context.close()  # before its server goes


def test_the_stream_ends_when_the_server_stops(engine: AsyncEngine) -> None:
    with (
        live(engine) as server,
        httpx.Client() as client,
        client.stream("GET", f"{server.url}/api/live", timeout=10) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        server.serving.gate.draining = True
        for _ in lines:
            pass


def test_the_page_is_no_part_of_the_api(engine: AsyncEngine) -> None:
    paths = create_app(engine).openapi()["paths"]
    assert "/" not in paths and "/api/live" not in paths
