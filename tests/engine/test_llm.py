"""The offline interface: prompts of every form, text, stops, chats, streams, and bad requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import denim
from denim import LLM, RequestError, SamplingParams
from denim.engine.tokenizer import Tokenizer
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB

SHORT = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def talker(speaking: Path) -> LLM:
    return LLM(speaking, memory="2MiB", max_model_len=300, debug=True)


def script(llm: LLM, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Make the model draw these tokens, whatever it is asked."""
    drawn = iter(tokens)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(hidden), llm.core.spec.vocab_size)
        out[:, next(drawn)] = 50.0
        return out

    monkeypatch.setattr(llm.core.runner.forward.model, "logits", logits)


# Prompts and outputs


def test_prompts_of_every_form(talker: LLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the thing")
    one = talker.generate("the thing", SHORT)
    assert len(one) == 1
    assert one[0].prompt == "the thing"
    assert one[0].prompt_token_ids == ids
    as_ids = talker.generate(ids, SHORT)
    assert as_ids[0].prompt is None
    mixed = talker.generate(["the thing", ids, (*ids,)], [SHORT, SHORT, SHORT], priority=[2, 0, 1])
    tokens = one[0].outputs[0].token_ids
    arrays = [
        output
        for same in (np.array(ids), torch.tensor([ids]), array("i", ids))
        for output in talker.generate(same, SHORT)
    ]
    assert [output.outputs[0].token_ids for output in [*as_ids, *mixed, *arrays]] == [tokens] * 7
    assert talker.generate([], SHORT) == []
    assert [output.request_id for output in mixed] == sorted(
        {o.request_id for o in mixed}, key=lambda i: int(i[8:])
    )


def test_outputs_say_all(talker: LLM) -> None:
    output = talker.generate(
        "the", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    )[0]
    completion = output.outputs[0]
    assert output.finished
    assert output.num_cached_tokens == 0
    assert completion.index == 0
    assert completion.finish_reason == "length"
    assert completion.stop_reason is None
    assert completion.text == talker.tokenizer.decode(completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids) == 3
    for token, report in zip(completion.token_ids, completion.logprobs, strict=True):
        assert report[token].decoded_token == talker.tokenizer.decode_one(token)
        assert report[token].rank == 1
    assert completion.cumulative_logprob == sum(
        report[token].logprob for token, report in zip(completion.token_ids, completion.logprobs, strict=True)
    )


def test_default_params(talker: LLM) -> None:
    """vLLM's: 16 tokens at temperature 1, where the model says nothing."""
    output = talker.generate("the")[0].outputs[0]
    assert len(output.token_ids) == 16 or output.finish_reason == "stop"


def test_the_engine_s_seed(speaking: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    texts = [LLM(speaking, memory="1MiB", seed=seed).generate(["the"] * 2, params) for seed in (0, 0, 1)]
    first, again, other = ([output.outputs[0].token_ids for output in outputs] for outputs in texts)
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_beyond_the_context_is_clamped(talker: LLM) -> None:
    for max_tokens in (1000, None):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = talker.generate([tokens_of(290, 0, 250)], params)[0].outputs[0]
        assert len(output.token_ids) == 10
        assert output.finish_reason == "length"


# Text


@pytest.mark.parametrize("text", ["the 中文 thing", "é中😀", "plain"])
def test_streamed_text_is_whole_characters(
    talker: LLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """ST-02: the model's tokens spell characters of up to 4 bytes, a byte each."""
    tokens = list(text.encode())
    script(talker, monkeypatch, tokens)
    deltas = list(talker.stream("x", SamplingParams(temperature=0, max_tokens=len(tokens))))
    assert "".join(delta.text for delta in deltas) == text
    assert "\ufffd" not in "".join(delta.text for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert [delta.finish_reason for delta in deltas] == [None] * (len(tokens) - 1) + ["length"]


def test_a_prompt_that_ends_inside_a_character(talker: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-03: the text is what was generated, with a mark for what is only the rest of a character."""
    whole = list("中".encode())
    script(talker, monkeypatch, [whole[2], *b" the"])
    output = talker.generate([whole[:2]], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0]
    assert output.text == "\ufffd the"


@pytest.mark.parametrize(
    ("params", "text", "reason", "count"),
    [
        ({"stop": "two"}, "one ", "two", 7),
        ({"stop": ["never", "tw"]}, "one ", "tw", 6),
        ({"stop": "two", "include_stop_str_in_output": True}, "one two", "two", 7),
        ({"stop": "e t", "min_tokens": 5}, "one two three", None, 13),
        ({"stop": "o", "min_tokens": 3}, "one tw", "o", 7),
        ({"stop_token_ids": [ord("w")]}, "one t", ord("w"), 6),
        ({"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}, "one tw", ord("w"), 6),
        ({"stop": "zzz"}, "one two three", None, 13),
    ],
    ids=str,
)
def test_stops(
    talker: LLM, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], text: str, reason: Any, count: int
) -> None:
    asked = SamplingParams(temperature=0, max_tokens=13, **params)
    for streamed in (False, True):
        script(talker, monkeypatch, list(b"one two three"))
        if streamed:
            deltas = list(talker.stream("x", asked))
            got = (
                "".join(d.text for d in deltas),
                deltas[-1].stop_reason,
                sum(len(d.token_ids) for d in deltas),
            )
            finish = deltas[-1].finish_reason
        else:
            output = talker.generate("x", asked)[0].outputs[0]
            got, finish = (output.text, output.stop_reason, len(output.token_ids)), output.finish_reason
        assert got == (text, reason, count)
        assert finish == ("length" if reason is None else "stop")
    talker.check()


def test_stop_strings_of_batch_mates_are_their_own(talker: LLM) -> None:
    base = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = talker.generate("the", base)[0].outputs[0]
    letter = whole.text[len(whole.text) // 2]
    stopped, free = talker.generate(
        ["the", "the"], [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=letter), base]
    )
    assert free.outputs[0].text == whole.text
    assert stopped.outputs[0].text == whole.text[: whole.text.index(letter)]


# The model's own defaults


def test_generation_config(with_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every end token counts; ignore_eos passes them; min_tokens forbids them; do_sample=false is greedy."""
    ends = [ord("!"), ord("?")]
    llm = LLM(with_config(eos_token_id=ends, do_sample=False), memory="1MiB", debug=True)
    for end in ends:
        script(llm, monkeypatch, [*b"ab", end, *b"cd"])
        output = llm.generate("x", SamplingParams(max_tokens=5))[0].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
        assert output.token_ids == [*b"ab", end]
        script(llm, monkeypatch, [*b"ab", end, *b"cd"])
        output = llm.generate("x", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0]
        assert (output.text, output.finish_reason) == (f"ab{chr(end)}cd", "length")
    monkeypatch.undo()
    greedy = llm.generate("the", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert llm.generate("the", SamplingParams(max_tokens=6))[0].outputs[0].token_ids == greedy
    forced = SamplingParams(max_tokens=20, min_tokens=20, logit_bias=dict.fromkeys(ends, 100.0))
    tokens = llm.generate("the", forced)[0].outputs[0].token_ids
    assert not set(tokens[:19]) & set(ends)
    assert len(tokens) == 20
    at_once = SamplingParams(max_tokens=20, logit_bias={ends[1]: 100.0})
    assert llm.generate("the", at_once)[0].outputs[0].token_ids == [ends[1]]


def test_generation_config_s_numbers(with_config: Callable[..., Path]) -> None:
    """What a request leaves open is the model's; what it says itself wins."""
    llm = LLM(with_config(temperature=0.7, top_k=1, top_p=0.9, eos_token_id=257), memory="1MiB")
    greedy = llm.generate("the", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert llm.generate("the", SamplingParams(max_tokens=6))[0].outputs[0].token_ids == greedy
    free = SamplingParams(max_tokens=6, top_k=0, top_p=1.0, temperature=5.0, seed=1, ignore_eos=True)
    assert llm.generate("the", free)[0].outputs[0].token_ids != greedy


# Chats


def test_a_chat(talker: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the thing"}]
    ids = tokenizer.apply_chat_template(messages, enable_thinking=False)
    assert talker.render(messages, enable_thinking=False) == ids
    answer = talker.chat(messages, SHORT, enable_thinking=False)[0]
    assert answer.prompt_token_ids == ids
    assert answer.outputs[0].token_ids == talker.generate(ids, SHORT)[0].outputs[0].token_ids
    assert talker.chat(messages, SHORT)[0].prompt_token_ids != ids
    several = talker.chat([messages, [{"role": "user", "content": "a"}]], SHORT)
    assert len(several) == 2
    for nothing in ([], None, 3, "hello", {"role": "user", "content": "a"}):
        with pytest.raises(RequestError, match="messages must be a list of at least one message"):
            talker.chat(nothing, SHORT)  # type: ignore[arg-type]


# Streams


def test_interleaved_streams(talker: LLM) -> None:
    """Each gets its own deltas, in any order of asking, beside a call of generate."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["the", "a thing", "ing 12"]
    expected = [output.outputs[0].token_ids for output in talker.generate(prompts, params)]
    streams = [talker.stream(prompt, params) for prompt in prompts]
    got: list[list[int]] = [[], [], []]
    for place in (0, 0, 2, 1, 0, 2):
        got[place] += next(streams[place]).token_ids
    assert talker.generate("the", params)[0].outputs[0].token_ids == expected[0]
    for place, stream in enumerate(streams):
        for delta in stream:
            got[place] += delta.token_ids
    assert got == expected
    assert_idle(talker)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_left(talker: LLM, taken: int, how: str) -> None:
    """Closing a stream, or letting go of it, aborts its request, whether or not it was ever asked."""
    stream = talker.stream("the", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    other = talker.stream("a", SHORT)
    for _ in range(taken):
        next(stream)
    if how == "closed":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        talker.check()  # finalisers only leave word; the next call carries it out
    assert len(talker.core.requests) == 1
    assert len(list(other)) == 5
    assert_idle(talker)


def test_a_stream_that_another_thread_drops_while_its_delta_is_handed_out(talker: LLM) -> None:
    """The others of that step get theirs."""

    class Drops(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            return self._behind(name, super().__contains__(name))

        def get(self, name: str, default: Any = None) -> Any:
            return self._behind(name, super().get(name, default))

        def _behind(self, name: object, found: Any) -> Any:
            if name == dropped._request_id:
                self.pop(dropped._request_id, None)  # as its finaliser does
            return found

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    dropped, other = talker.stream("the", params), talker.stream("a", params)
    streams, talker._streams = talker._streams, Drops(talker._streams)
    try:
        assert sum(len(delta.token_ids) for delta in other) == 12
    finally:
        talker._streams = streams
        dropped.close()
    assert_idle(talker)


def test_a_stream_is_refused_at_once(talker: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        talker.stream("")


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
    assert [stats[name] for name in ("running", "waiting", "swapped")] == [0, 0, 0]
    assert not llm.core.requests
    llm.check()


# Bad requests


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[1, 2], []], "the prompt is empty"),
        ([[1, -1]], "token id -1 at position 1 is outside the vocabulary of 199"),
        ([[1, 5, VOCAB]], f"token id {VOCAB} at position 2"),
        ([[1.5]], "a prompt is a string or a list of token ids"),
        ([[True]], "a prompt is a string or a list of token ids"),
        ([np.array([True, False])], "a prompt is a string or a list of token ids"),
        ([torch.tensor([True])], "a prompt is a string or a list of token ids"),
        ([[1, "a"]], "a prompt is a string or a list of token ids"),
        ([None], "a prompt is a string or a list of token ids"),
        ([1, "a"], "a prompt is a string or a list of token ids"),
        (np.array([True, False]), "a prompt is a string or a list of token ids"),
        (np.array(5), "prompts are a string"),
        (None, "prompts are a string"),
        (5, "prompts are a string"),
        (b"abc", "prompts are a string"),
        ({"prompt": "x"}, "prompts are a string"),
        ([[1] * 256], "has 256 tokens; with one token of output max_model_len=256 allows 255"),
        ("text", "A text prompt needs a tokenizer"),
    ],
    ids=repr,
)
def test_bad_prompts(llm: LLM, mute: tuple[Path, Judge], prompt: Any, message: str) -> None:
    """One clear error; nothing is kept; the engine goes on. Without a tokenizer text is refused too."""
    if isinstance(prompt, str) and not prompt:
        message = "needs a tokenizer"
    before = llm.stats()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, SHORT)
    assert llm.stats() == before
    assert_idle(llm)
    ok = tokens_of(9, 0, VOCAB)
    mute[1].greedy(ok, llm.generate(ok, SHORT)[0].outputs[0].token_ids)


def test_an_empty_text(talker: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty; give at least one token"):
        talker.generate("", SHORT)
    assert_idle(talker)


def test_one_bad_prompt_among_good_ones(llm: LLM) -> None:
    before = llm.stats()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[1, 2], [3], [10**6]], SHORT)
    assert llm.stats() == before
    assert_idle(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids=199: .*below the vocabulary size"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias=199: .*below the vocabulary size"),
        ({"stop": "x"}, "needs a tokenizer"),
    ],
)
def test_params_that_do_not_fit_the_model(llm: LLM, params: dict[str, Any], message: str) -> None:
    before = llm.stats()
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2]], SamplingParams(**params))
    assert llm.stats() == before
    assert_idle(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"max_tokens": 0},
        {"min_tokens": 20, "max_tokens": 10},
        {"n": 0},
        {"logprobs": -1},
        {"stop": "x", "detokenize": False},
        {"repetition_penalty": float("nan")},
    ],
    ids=str,
)
def test_contradictory_params(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


def test_lists_of_another_length(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params must be one for all prompts or a list of 2"):
        llm.generate([[1], [2]], [SHORT])
    with pytest.raises(RequestError, match="priority must be one for all prompts or a list of 2"):
        llm.generate([[1], [2]], SHORT, priority=[1, 2, 3])
    assert_idle(llm)


def test_errors_are_what_python_users_expect() -> None:
    assert issubclass(denim.RequestError, (denim.DenimError, ValueError))
    assert issubclass(denim.ConfigError, ValueError)
    assert issubclass(denim.CapacityError, RuntimeError)


def test_without_a_tokenizer_ids_are_served(llm: LLM) -> None:
    output = llm.generate([[1, 2, 3]], SHORT)[0]
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 5
    with pytest.raises(RequestError, match="A chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_stats_have_the_keys_of_the_design(llm: LLM) -> None:
    stats = llm.stats()
    for kind in ("slabs", "pages", "slots"):
        assert stats[kind].keys() == {"total", "used", "cached", "free"}
        assert stats[kind]["total"] == stats[kind]["free"] > 0
    assert {"running", "waiting", "swapped", "prefix", "steps", "tokens"} <= stats.keys()
    assert {"queries", "hit_tokens", "query_tokens", "lost"} <= stats["prefix"].keys()
    llm.reset_prefix_cache()
    llm.check()
