"""`denim bench serve` against Denim's own server, and against one that chunks in other ways."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from denim import AsyncEngine
from denim.commands.bench import serve
from denim.commands.bench.serve import base_of, bench_serve, parse_extra_body
from denim.commands.bench.workload import Drawn, Room, Wishes, draw_sessions
from denim.errors import ConfigError
from denim.ledger.lengths import Lengths
from tests.commands.bench.fake_server import Manner, fake_server
from tests.server.live import live
from tests.server.scripted import ScriptedEngine


def wishes(**changes: Any) -> Wishes:
    plain = {
        "requests": 6,
        "turns": 1,
        "prompts": Lengths.fixed(50),
        "outputs": Lengths.fixed(12),
        "paired": False,
        "rate": math.inf,
        "burstiness": 1.0,
        "think": 0.0,
        "shared": 0,
        "prefixes": 1,
        "seed": 0,
    }
    return Wishes(**(plain | changes))


def bench(url: str, capsys: pytest.CaptureFixture[str], asked: Wishes | None = None, **options: Any) -> dict:
    plain: dict[str, Any] = {
        "model": None,
        "chat": True,
        "key": None,
        "concurrency": None,
        "limits": {},
        "percentiles": (50, 99),
        "extra_body": {},
        "timeout": 30.0,
        "out": None,
        "as_json": True,
    }
    bench_serve(url, wishes=asked or wishes(), **(plain | options))
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    engine = AsyncEngine(memory="32MiB", max_num_seqs=8, max_model_len=2048)
    with live(engine) as server:
        yield server.url
    asyncio.run(engine.check())
    asyncio.run(engine.close())


def test_our_own_server(own: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = wishes(requests=12, turns=3, shared=100, prefixes=2, rate=50.0)
    result = bench(own, capsys, asked, limits={"ttft": 60.0}, out=tmp_path)
    assert result["model"] == "denim-tiny" and result["endpoint"] == "chat"
    assert (result["completed"], result["errors"]) == (12, {})
    assert result["ignores_eos"] and result["output_tokens"] == 12 * 12
    for one in result["measured"]:
        assert one["output_tokens"] == 12 and one["finish_reason"] == "length"
    # Turns are as long as was asked for, as the server counts, to a tenth.
    turns = result["turns"]
    assert [row["requests"] for row in turns] == [4, 4, 4]
    assert turns[0]["mean_prompt_tokens"] == pytest.approx(150 + result["template_tokens"], rel=0.1)
    assert turns[1]["mean_cached_tokens"] > turns[0]["mean_prompt_tokens"] / 2
    assert result["goodput"]["share"] == 1
    assert result["first_token"]["p50"] > 0 and result["per_token"]["p50"] > 0
    assert json.loads((tmp_path / "bench-serve.json").read_text()) == result
    assert (tmp_path / "bench-serve.png").read_bytes().startswith(b"\x89PNG")


def test_our_own_server_by_completions(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(own, capsys, chat=False, concurrency=2)
    assert result["completed"] == 6 and result["output_tokens"] == 72
    runs = [(one["sent"], one["ended"]) for one in result["measured"]]
    assert max(sum(sent <= at < ended for sent, ended in runs) for at, _ in runs) == 2


@pytest.mark.parametrize("model", [None, "denim-tiny"])
def test_prompts_that_the_server_says_it_does_not_take(
    model: str | None, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = r"\(999,999,999 tokens\) and answers .* are more than the 2,048 tokens that the server takes; give"
    with pytest.raises(ConfigError, match=told):
        bench(own, capsys, wishes(prompts=Lengths.fixed(999_999_999), shared=10), model=model)


def test_no_request_is_too_long(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A distribution with a long tail, in conversations that would outgrow the context."""
    asked = wishes(requests=20, turns=8, prompts=Lengths.lognormal(900, 1.5), outputs=Lengths.fixed(2))
    result = bench(own, capsys, asked)
    assert (result["completed"], result["errors"], result["room_tokens"]) == (20, {}, 2048)
    assert result["redrawn"] > 0 and result["ended_early"] > 0
    assert max(one["prompt_tokens"] for one in result["measured"]) > 1000


@pytest.mark.parametrize("model", [None, "not in its list"])
def test_prompts_beyond_what_anybody_takes(model: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    manner = Manner()
    with fake_server(manner) as url:
        with pytest.raises(ConfigError, match="more than the 1,048,576 tokens .* give shorter ones"):
            bench(url, capsys, wishes(prompts=Lengths.fixed(999_999_999)), model=model)
        assert len(manner.seen) == 2, "no more than what it takes to meet it"
        assert bench(url, capsys, model=model)["completed"] == 6


def test_the_template_s_tokens_take_room_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = []

    def drawn(asked: Wishes, words_per_token: float, room: Room) -> Drawn:
        rooms.append(room)
        return draw_sessions(asked, words_per_token, room)

    monkeypatch.setattr(serve, "draw_sessions", drawn)
    with fake_server(Manner()) as url:
        assert bench(url, capsys)["template_tokens"] == 5
    assert rooms == [Room(1 << 20, 5)]


@pytest.mark.parametrize("usage", ["each", "last", "none"])
@pytest.mark.parametrize("chat", [True, False])
def test_other_chunking(usage: str, chat: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Five tokens a piece, CRLF, the network cut into 7 bytes, no [DONE]."""
    manner = Manner(per_piece=5, pause=0.01, usage=usage, wire=7, crlf=True, done=False)
    with fake_server(manner) as url:
        result = bench(url, capsys, chat=chat)
    assert result["completed"] == 6 and result["errors"] == {}
    assert {len(one["pieces"]) for one in result["measured"]} == {3}  # 5, 5 and 2 tokens
    if usage == "none":
        assert (result["output_tokens"], result["output_tokens_are"]) == (18, "pieces")
        assert result["prompt_tokens"] is None and result["template_tokens"] is None
    else:
        assert (result["output_tokens"], result["output_tokens_are"]) == (72, "tokens")
        assert result["prompt_tokens"] == 6 * 55  # a word is a token there, and 5 are the template's
        assert result["words_per_token"] == 1
    assert result["whole_answer"]["p50"] >= 0.03  # three pauses; a busy client may see pieces together
    if usage != "none":
        assert result["per_token"]["mean"] < result["between_pieces"]["mean"] / 2


def test_a_server_that_refuses_what_is_not_standard(capsys: pytest.CaptureFixture[str]) -> None:
    manner = Manner(refused=("ignore_eos", "continuous_usage_stats"))
    with fake_server(manner) as url:
        result = bench(url, capsys)
        bench_serve(
            url,
            "fake",
            wishes(),
            chat=True,
            key=None,
            concurrency=None,
            limits={"e2el": 9.0},
            percentiles=(50, 99.9),
            extra_body={},
            timeout=9.0,
            out=None,
            as_json=False,
        )
    assert result["completed"] == 6 and not result["ignores_eos"] and result["output_tokens"] == 72
    assert "ignore_eos" not in manner.seen[-1]
    shown = capsys.readouterr().out
    assert "without ignore_eos: answers may be shorter" in shown and "goodput (e2el ≤ 9 s)" in shown
    assert "p99.9" in shown and "(TPOT)" in shown and "at most 6 requests in work at once" in shown
    assert "first token" in shown and "6 of 6 requests" in shown


def test_multi_turn_sends_the_answers_back(capsys: pytest.CaptureFixture[str]) -> None:
    manner = Manner()
    with fake_server(manner) as url:
        bench(url, capsys, wishes(requests=2, turns=2, shared=8, think=0.01))
    roles = [message["role"] for message in manner.seen[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert manner.seen[-1]["messages"][2]["content"] == "é\u2028 " * 12


def test_a_server_that_wants_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live(ScriptedEngine(tmp_path, "some words"), api_keys="k") as server:
        with pytest.raises(ConfigError, match="/v1/models answers 401 Unauthorized; give --api-key"):
            bench(server.url, capsys)
        assert bench(server.url, capsys, key="k", chat=False)["completed"] == 6


def test_errors_in_mid_stream(capsys: pytest.CaptureFixture[str]) -> None:
    manner = Manner(per_piece=4, fail_after=2)  # the two prompts before the run have one piece
    with fake_server(manner) as url, pytest.raises(ConfigError, match="no request was completed: the engine"):
        bench(url, capsys, wishes(requests=4, turns=2))
    assert json.loads(capsys.readouterr().out)["errors"] == {"the engine died": 2}


def test_more_fields_of_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    """They stand in the place of the run's own."""
    manner = Manner()
    with fake_server(manner) as url:
        result = bench(url, capsys, extra_body={"temperature": 0.7, "top_p": 0.9, "ignore_eos": False})
    assert result["extra_body"]["top_p"] == 0.9 and not result["ignores_eos"]
    assert all(body["temperature"] == 0.7 and body["ignore_eos"] is False for body in manner.seen)
    assert parse_extra_body(None) == {} and parse_extra_body('{"top_k": 3}') == {"top_k": 3}
    for text, told in (
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "give a JSON object"),
        ('{"stream": false}', "'stream'"),
    ):
        with pytest.raises(ConfigError, match=f"--extra-body.*{told}"):
            parse_extra_body(text)


def test_a_server_s_words_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Not read as markup."""
    manner = Manner(per_piece=4, fail_after=2, words="no end: [/INST] [red]")
    with fake_server(manner) as url, pytest.raises(ConfigError, match="no request was completed"):
        bench_serve(
            url,
            "[bold]",
            wishes(),
            chat=True,
            key=None,
            concurrency=None,
            limits={},
            percentiles=(50,),
            extra_body={},
            timeout=9.0,
            out=None,
            as_json=False,
        )
    shown = capsys.readouterr().out
    assert "6 failed: no end: [/INST] [red]" in shown and shown.startswith("[bold] at http")


def test_arrivals_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Manner(pause=0.02)) as url:
        result = bench(url, capsys, wishes(requests=8, rate=20.0))
    sent = [one["sent"] for one in result["measured"]]
    assert sent == sorted(sent) and sent[-1] > 0.1
    assert max(sent) < result["seconds"]


def test_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Manner(refused=("model",))) as url:
        with pytest.raises(ConfigError, match="with model 'fake': status 400: unknown field model"):
            bench(url, capsys)
        with pytest.raises(ConfigError, match="--concurrency is 0"):
            bench(url, capsys, concurrency=0)
        with pytest.raises(ConfigError, match="--timeout is 0"):
            bench(url, capsys, timeout=0.0)
    with pytest.raises(ConfigError, match="names no model"):
        bench(url, capsys)
    for wrong in ("::::", "http://127.0.0.1:99999", "http://[::1"):
        with pytest.raises(ConfigError, match=f"URL is {re.escape(repr(wrong))}: .*give one such as http"):
            bench(wrong, capsys, model="x")
    with pytest.raises(ConfigError, match="cannot be measured with model 'x': ConnectError"):
        bench(url, capsys, model="x")


@pytest.mark.parametrize("given", ["127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"])
def test_addresses(given: str) -> None:
    assert base_of(given) == "http://127.0.0.1:8000/v1"


def test_without_the_libraries() -> None:
    code = "import sys; sys.modules['httpx'] = None; from denim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "serve"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "denim: denim bench needs httpx; install it with: pip install 'denim-llm[bench]'\n"
