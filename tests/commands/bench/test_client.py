"""What a client sees of one answer, piece by piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from denim.commands.bench.client import Api, Measured, ask
from denim.commands.bench.load import meet
from denim.errors import ConfigError

API = Api("http://server/v1", "m")


def asked(*chunks: dict[str, Any], status: int = 200) -> Measured:
    """An answer of these pieces, or of the first one alone where the status is an error's."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    if status != 200:
        text = json.dumps(chunks[0])
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))

    async def once() -> Measured:
        async with httpx.AsyncClient(transport=transport) as client:
            return await ask(client, API, [{"role": "user", "content": "x"}], 9, 0.0)

    return asyncio.run(once())


def piece(so_far: int | None = None, **delta: str) -> dict[str, Any]:
    usage = {} if so_far is None else {"usage": {"prompt_tokens": 7, "completion_tokens": so_far}}
    return {"choices": [{"delta": delta}]} | usage


def test_tokens_of_a_piece_are_those_since_the_last_one() -> None:
    one = asked(piece(0, content=""), piece(3, content="a"), piece(3), piece(5, content="b"))
    assert (one.text, one.piece_tokens, one.output_tokens, one.prompt_tokens) == ("ab", [3, 2], 5, 7)
    assert one.cached_tokens is None and one.error is None


def test_thoughts_are_pieces_and_no_text() -> None:
    one = asked(piece(reasoning_content="hm"), piece(reasoning="so"), piece(content="yes"))
    assert (one.text, len(one.pieces), one.output_tokens) == ("yes", 3, None)


@pytest.mark.parametrize("chunks", [[], [piece(content="")], [{"choices": [], "usage": None}]])
def test_an_answer_without_any_text_is_an_error(chunks: list[dict[str, Any]]) -> None:
    assert asked(*chunks).error == "an answer without any text"


def test_errors_are_in_the_server_s_words() -> None:
    told = {"error": {"message": "no such model", "code": 404}}
    assert asked(told, status=404).error == "status 404: no such model"
    assert asked(piece(content="a"), told).error == "no such model"


@pytest.mark.parametrize(("status", "tries"), [(503, 1), (400, 4), (422, 4)])
def test_only_what_may_be_a_field_s_fault_is_tried_again_with_fewer(status: int, tries: int) -> None:
    bodies: list[dict[str, Any]] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(status, json={"error": {"message": "no"}})

    async def meeting() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
            await meet(client, API)

    with pytest.raises(ConfigError, match=f"cannot be measured with model 'm': status {status}: no"):
        asyncio.run(meeting())
    assert len(bodies) == 2 * tries
    assert "ignore_eos" in bodies[0] and ("ignore_eos" in bodies[-1]) == (tries == 1)
