"""/v1/completions by the official client: text, token ids, batches; whole, streamed, echoed, scored."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import openai
import pytest

from denim import AsyncEngine
from denim.server.completion_schema import CompletionRequest
from tests.server.live import Live

PROMPT = "Fellow citizens of the Senate"
SHORT: dict[str, Any] = {"model": "denim-tiny", "max_tokens": 10, "temperature": 0}


def streamed(client: openai.OpenAI, **body: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def ids_of(engine: AsyncEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text)


def test_a_completion_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **SHORT)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert whole.usage.completion_tokens == 10
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    assert streamed(client, prompt=PROMPT, **SHORT) == {0: whole.choices[0].text}


def test_the_default_length(client: openai.OpenAI) -> None:
    body = {"model": "denim-tiny", "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(**body).usage.completion_tokens == 16


def test_every_form_of_prompt(client: openai.OpenAI, engine: AsyncEngine) -> None:
    other = "In the execution of the laws"
    expected = [client.completions.create(prompt=text, **SHORT).choices[0].text for text in (PROMPT, other)]
    ids = [ids_of(engine, PROMPT), ids_of(engine, other)]
    assert client.completions.create(prompt=ids[0], **SHORT).choices[0].text == expected[0]
    for batch in ([PROMPT, other], ids):
        answer = client.completions.create(prompt=batch, **SHORT)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 20
        assert streamed(client, prompt=batch, **SHORT) == dict(enumerate(expected))


def test_a_batch_of_several_completions_each(client: openai.OpenAI) -> None:
    body = SHORT | {"prompt": [PROMPT, "The"], "n": 3, "seed": 5, "temperature": 1.0}
    answer = client.completions.create(**body)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = [client.completions.create(**body | {"prompt": prompt}) for prompt in (PROMPT, "The")]
    assert texts == [choice.text for one in alone for choice in one.choices]
    assert streamed(client, **body) == dict(enumerate(texts))


def test_usage_of_a_streamed_batch(client: openai.OpenAI, engine: AsyncEngine) -> None:
    chunks = list(
        client.completions.create(
            prompt=[PROMPT, "The"], stream=True, stream_options={"include_usage": True}, **SHORT
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == len(ids_of(engine, PROMPT)) + len(ids_of(engine, "The"))


def test_echo(client: openai.OpenAI, engine: AsyncEngine) -> None:
    text = client.completions.create(prompt=PROMPT, **SHORT).choices[0].text
    for prompt in (PROMPT, ids_of(engine, PROMPT)):
        body = SHORT | {"prompt": prompt, "echo": True}
        assert client.completions.create(**body).choices[0].text == PROMPT + text
        assert streamed(client, **body) == {0: PROMPT + text}


def test_logprobs(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt=PROMPT, logprobs=2, **SHORT).choices[0]
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset == list(itertools.accumulate(map(len, scores.tokens[:-1]), initial=0))
    for token, logprob, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    ends = {token[-1] + "#" for token in scores.tokens}  # each may be coming, and holds back half a token
    for stop in ([], sorted(ends)):
        chunks = list(client.completions.create(prompt=PROMPT, logprobs=2, stream=True, stop=stop, **SHORT))
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        assert [token for part in parts for token in part.tokens] == scores.tokens
        assert [offset for part in parts for offset in part.text_offset] == scores.text_offset


def test_a_prompt_is_scored(client: openai.OpenAI, engine: AsyncEngine) -> None:
    """echo with max_tokens=0, as evaluation harnesses ask: the prompt's own log-probabilities."""
    body = {"model": "denim-tiny", "prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = client.completions.create(**body)
    choice, scores = answer.choices[0], answer.choices[0].logprobs
    ids = ids_of(engine, PROMPT)
    assert choice.text == PROMPT == "".join(scores.tokens)
    assert len(scores.tokens) == len(ids)
    assert scores.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in scores.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0
    assert streamed(client, **body | {"logprobs": None}) == {0: PROMPT}
    with_more = client.completions.create(**body | {"max_tokens": 4, "temperature": 0}).choices[0]
    assert with_more.logprobs.tokens[: len(ids)] == scores.tokens
    assert len(with_more.logprobs.tokens) == len(ids) + 4
    assert with_more.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(
        scores.token_logprobs[1:], abs=0.05
    )


def test_prompt_logprobs_by_token_id(client: openai.OpenAI, engine: AsyncEngine) -> None:
    """vLLM's form, for each choice."""
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(prompt=[PROMPT, "The"], n=2, extra_body=extra, **SHORT)
    for choice, prompt in zip(answer.choices, (PROMPT, PROMPT, "The", "The"), strict=True):
        ids = ids_of(engine, prompt)
        assert choice.prompt_logprobs[0] is None
        for token, report in zip(ids[1:], choice.prompt_logprobs[1:], strict=True):
            entry = report[str(token)]
            assert entry["logprob"] < 0 and entry["rank"] >= 1 and entry["decoded_token"] in prompt


def test_scores_of_batches_are_the_same_in_any_order(client: openai.OpenAI, server: Live) -> None:
    """AP-05: prompts with a common head, every order, cold and warm."""
    head = "The river runs through the city, and "
    prompts = [
        head + tail for tail in ("the people walk.", "it is cold in winter.", "no one knows why it does.")
    ]

    def scores(order: tuple[str, ...]) -> dict[str, list[float]]:
        body = {"model": "denim-tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
        choices = client.completions.create(prompt=list(order), **body).choices
        return {
            prompt: choice.logprobs.token_logprobs[1:] for prompt, choice in zip(order, choices, strict=True)
        }

    expected = {prompt: scores((prompt,))[prompt] for prompt in prompts}
    for order in itertools.permutations(prompts):
        for prompt, found in scores(order).items():
            assert len(found) == len(expected[prompt]), "no position is missing"
            assert found == pytest.approx(expected[prompt], abs=0.05)  # bf16; 1e-3 is asked of fp32


def test_a_batch_is_the_same_every_time(client: openai.OpenAI, server: Live) -> None:
    """AP-13: eight prompts in one call, four times, the cache reset in between."""
    prompts = [f"{PROMPT} and of the House, number {i}: " for i in range(8)]
    found = []
    for _ in range(4):
        assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
        answer = client.completions.create(prompt=prompts, extra_body={"return_token_ids": True}, **SHORT)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        found.append([choice.token_ids for choice in answer.choices])
    assert found == [found[0]] * 4


def test_marks_by_position(client: openai.OpenAI, engine: AsyncEngine) -> None:
    head = ids_of(engine, "The law of the land is this: " * 12)
    tail = [ids_of(engine, "one"), ids_of(engine, "two of them")]
    extra = {"cache_control": [len(head)], "cache_salt": "positions"}
    cached = [
        client.completions.create(prompt=head + end, extra_body=extra, **SHORT).usage.prompt_tokens_details
        for end in tail
    ]
    assert [details.cached_tokens for details in cached] == [0, len(head)]


def test_nothing_is_stored_where_it_is_not_wanted(client: openai.OpenAI) -> None:
    body = SHORT | {"prompt": "A text that is new to the cache. " * 8}
    extra = {"no_store": True, "cache_salt": "secret"}
    for _ in range(2):
        usage = client.completions.create(**body, extra_body=extra).usage
        assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": [[]]}, "prompt.0", "empty"),
        ({"prompt": ["x", "x " * 9000]}, "prompt.1", "max_model_len=4096"),
        ({"prompt": [[1], [2], [99999]]}, "prompt.2", "outside the vocabulary of 6144"),
        ({"prompt": 7}, "prompt", "got 7"),
        ({"prompt": ["x", 3]}, "prompt.0", "got 'x'"),
        ({"prompt": [3, True]}, "prompt.1", "valid integer"),
        ({"prompt": [1, 99999]}, "prompt", "outside the vocabulary of 6144"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
        ({"prompt": "x " * 9000}, "prompt", "max_model_len=4096"),
        ({"max_tokens": 0}, "max_tokens", "needs echo=true"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"best_of": 2}, "best_of", "ask for n completions"),
        ({"suffix": "end"}, "suffix", "fills in the middle"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs", "not sent in streams"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not sent in streams"),
        ({"cache_control": [0]}, "cache_control", "at least 1"),
        ({"cache_control": [500]}, "cache_control", "the prompt has"),
        ({"messages": []}, "messages", "Unknown parameter"),
        ({"prompt": None}, "prompt", "got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_name_the_parameter(
    client: openai.OpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"prompt": "x", "max_tokens": 2} | body, cast_to=object)
    assert caught.value.param == param
    assert message in caught.value.message


def test_a_missing_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Missing: the parameter 'prompt'") as caught:
        client.post("/completions", body={"max_tokens": 2}, cast_to=object)
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        client.embeddings.create(model="denim-tiny", input="x")


def test_a_completion_by_a_regular_expression(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "[0-9]{4}"}}
    text = client.completions.create(prompt="In the year ", extra_body=extra, **SHORT).choices[0].text
    assert len(text) == 4 and text.isdecimal()


def test_a_prompt_is_scored_only_where_its_scores_are_shown() -> None:
    def scored(**body: Any) -> int | None:
        return CompletionRequest(prompt="x", **body).params().prompt_logprobs

    assert scored(logprobs=2) is None
    assert scored(logprobs=2, echo=True) == 2
    assert scored(logprobs=2, echo=True, prompt_logprobs=5) == 5
    assert scored(echo=True) is None
    assert (scored(prompt_logprobs=0), scored()) == (0, None)
