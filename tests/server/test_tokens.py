"""`/tokenize`, `/detokenize` and the counting of conversations: what the engine would read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from denim.server import tokens
from tests.engine.byte_tokenizer import SPECIAL
from tests.server.live import live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine

TURNS = [{"role": "system", "content": "Now: 12:03\nBe brief."}, {"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    """Its tokenizer puts a start token before texts, and a line that changes is left out of chats."""
    folder: Path = tmp_path_factory.mktemp("script")
    script = ScriptedEngine(folder, "ok", template=HERMES_TEMPLATE, strip_lines=("^Now: ",))
    assert script.tokenizer is not None
    start = script.tokenizer.encode(SPECIAL[0])[0]
    script.tokenizer.inner.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], start)]
    )
    return script


@pytest.fixture(scope="module")
def http(script: ScriptedEngine) -> Iterator[httpx.Client]:
    with live(script) as server, httpx.Client(base_url=server.url) as client:
        yield client


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_has_the_start_token_unless_it_is_not_wanted(http: httpx.Client) -> None:
    with_start = posted(http, "/tokenize", prompt="ab", return_token_strs=True)
    assert with_start["token_strs"] == [SPECIAL[0], "a", "b"]
    assert (with_start["count"], with_start["max_model_len"]) == (3, 4096)
    assert posted(http, "/tokenize", prompt="ab", add_special_tokens=False)["tokens"] == [97, 98]


def test_a_conversation_is_counted_as_it_is_answered(http: httpx.Client, script: ScriptedEngine) -> None:
    posted(http, "/v1/chat/completions", messages=TURNS)
    prompt = script.added[-1].prompt
    assert script.tokenizer is not None
    text = script.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    assert "Now" not in text and "Be brief." in text and not text.startswith(SPECIAL[0])
    assert posted(http, "/tokenize", messages=TURNS)["tokens"] == prompt.tokens
    body: dict[str, Any] = {"model": "scripted", "system": TURNS[0]["content"], "messages": TURNS[1:]}
    counted = posted(http, "/v1/messages/count_tokens", **body, chat_template_kwargs={})
    assert counted["input_tokens"] == len(prompt.tokens)


def test_back_to_text(http: httpx.Client) -> None:
    ids = posted(http, "/tokenize", prompt="ab")["tokens"]
    assert posted(http, "/detokenize", tokens=ids)["prompt"] == f"{SPECIAL[0]}ab"
    assert posted(http, "/detokenize", tokens=ids, skip_special_tokens=True)["prompt"] == "ab"
    for token in (-1, 300):
        error = http.post("/detokenize", json={"tokens": [1, token]}).json()["error"]
        assert error["param"] == "tokens"
        assert f"token id {token} at position 1 is outside the vocabulary of 300" in error["message"]


def test_a_text_that_takes_too_long(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LONGEST_TEXT", 100)
    for body, field in (({"prompt": "x" * 101}, "prompt"), ({"messages": TURNS * 20}, "messages")):
        error = http.post("/tokenize", json=body).json()["error"]
        assert (error["param"], "send at most 100 at once" in error["message"]) == (field, True)
    assert posted(http, "/tokenize", prompt="x" * 100)["count"] == 101


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": TURNS}])
def test_one_of_two(http: httpx.Client, body: dict[str, Any]) -> None:
    error = http.post("/tokenize", json=body).json()["error"]
    assert error["message"] == "give either prompt or messages"
