"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from math import inf

from denim.engine.outputs import Logprob
from denim.server.logprobs import LEAST, chat_logprobs, completion_logprobs, prompt_logprobs

# The token that was drawn, the fifth in rank, then the two likeliest.
REPORT = {7: Logprob(-3.0, 5, "x"), 1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}
NEVER = {7: Logprob(-inf, 9, "x"), 1: Logprob(0.0, 1, "a")}


def test_a_completion_s_token_is_among_the_likeliest_as_in_vllm() -> None:
    told = completion_logprobs([7], [REPORT], 1, 0, None)
    assert told.top_logprobs == [{"x": -3.0, "a": -0.5}]
    assert completion_logprobs([7], [REPORT], 2, 0, None).top_logprobs == [{"x": -3.0, "a": -0.5, "b": -1.0}]


def test_a_chat_names_the_likeliest_alone_in_order() -> None:
    (entry,) = chat_logprobs([REPORT], 2, lambda token: bytes([token])).content
    assert (entry.token, entry.logprob, entry.bytes) == ("x", -3.0, [7])
    assert [(top.token, top.bytes) for top in entry.top_logprobs] == [("a", [1]), ("b", [2])]


def test_json_has_no_infinity() -> None:
    told = completion_logprobs([7], [NEVER], 1, 0, None)
    assert told.token_logprobs == [LEAST]
    assert told.top_logprobs == [{"x": LEAST, "a": 0.0}]
    assert chat_logprobs([NEVER], 0, lambda _: b"").content[0].logprob == LEAST
    first, second = prompt_logprobs([None, NEVER])
    assert first is None and second is not None and second[7].logprob == LEAST


def test_offsets_count_characters_and_go_on_from_chunk_to_chunk() -> None:
    words = {1: "Köln", 2: " is"}
    told = completion_logprobs([1, 2], [None, {2: Logprob(-1.0, 1, " is")}], 0, 10, words.__getitem__)
    assert (told.text_offset, told.tokens) == ([10, 14], ["Köln", " is"])
    assert (told.token_logprobs, told.top_logprobs) == ([None, -1.0], [None, {" is": -1.0}])
