"""/v1/chat/completions by the official client, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from denim.errors import RequestError
from denim.server.chat_schema import ChatRequest
from tests.server.chats import HELLO, SHORT, SILENT, chunks_of, text_of
from tests.server.live import Live, live
from tests.server.scripted import ScriptedEngine


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SHORT, extra_body=SILENT)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role) == (
        "chat.completion",
        "denim-tiny",
        "assistant",
    )
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**SHORT, extra_body=SILENT)
    chunks = chunks_of(client, **SHORT, extra_body=SILENT)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    chunks = chunks_of(client, **SHORT, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0


def test_continuous_usage(script: ScriptedEngine, caller: openai.OpenAI) -> None:
    """The role comes with the first token, the end with the last."""
    script.say("word")
    chunks = chunks_of(
        caller, model="scripted", messages=HELLO, stream_options={"continuous_usage_stats": True}
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 1, 2, 3, 4, 4]


def test_reasoning_is_apart(client: openai.OpenAI) -> None:
    """AP-08: the template opens the block, or closes it at once."""
    thinking = client.chat.completions.create(**SHORT | {"max_tokens": 60})
    message = thinking.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert "think>" not in message.content + message.reasoning_content
    assert 0 < thinking.usage.completion_tokens_details.reasoning_tokens < thinking.usage.completion_tokens
    silent = client.chat.completions.create(**SHORT, extra_body=SILENT)
    assert silent.choices[0].message.content
    assert silent.choices[0].message.reasoning_content is None
    assert silent.usage.completion_tokens_details.reasoning_tokens == 0
    chunks = chunks_of(client, **SHORT | {"max_tokens": 60})
    assert text_of(chunks, field="reasoning_content") == message.reasoning_content
    assert text_of(chunks) == message.content


def test_effort_none_switches_thinking_off(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SHORT, reasoning_effort="none")
    assert answer.choices[0].message.reasoning_content is None
    assert answer.choices[0].message.content


def test_reasoning_of_earlier_turns_goes_to_the_template(client: openai.OpenAI, server: Live) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Hi.", "reasoning_content": "It greets."}]
    asked = {"model": "denim-tiny", "messages": turns, "max_tokens": 1}
    more = client.chat.completions.create(**asked).usage.prompt_tokens
    turns[1]["reasoning"] = turns[1].pop("reasoning_content")
    same = client.chat.completions.create(**asked).usage.prompt_tokens
    assert same == more, "the name that other servers have for it"
    del turns[1]["reasoning"]
    assert more > client.chat.completions.create(**asked).usage.prompt_tokens


def test_n_and_seed(client: openai.OpenAI) -> None:
    """AP-03: four texts, the same four again, and as a stream; each index ends."""
    body = SHORT | {"temperature": 1.0, "n": 4, "seed": 7, "max_tokens": 12}
    first = client.chat.completions.create(**body)
    texts = [choice.message.reasoning_content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    again = client.chat.completions.create(**body)
    assert [choice.message.reasoning_content for choice in again.choices] == texts
    chunks = chunks_of(client, **body)
    assert [text_of(chunks, index, "reasoning_content") for index in range(4)] == texts
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    alone = [
        client.chat.completions.create(**body | {"n": 1, "seed": 7 + i}).choices[0].message for i in range(4)
    ]
    assert [message.reasoning_content for message in alone] == texts
    prompt = client.chat.completions.create(**body | {"n": 1}).usage.prompt_tokens
    assert first.usage.prompt_tokens == prompt, "the prompt counts once"


def test_logprobs(client: openai.OpenAI) -> None:
    body = SHORT | {"logprobs": True, "top_logprobs": 3, "extra_body": SILENT}
    choice = client.chat.completions.create(**body).choices[0]
    entries = choice.logprobs.content
    shown = [entry.token for entry in entries]
    assert "".join(shown).startswith(choice.message.content)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
    streamed = [
        entry
        for chunk in chunks_of(client, **body)
        for part in chunk.choices
        if part.logprobs
        for entry in part.logprobs.content
    ]
    assert [entry.token for entry in streamed] == shown
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries])


def test_a_stop_string(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**SHORT, extra_body=SILENT).choices[0].message.content
    stop = free[2:6]
    body = SHORT | {"stop": [stop, "never"], "extra_body": SILENT}
    choice = client.chat.completions.create(**body).choices[0]
    assert choice.message.content == free[: free.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert text_of(chunks_of(client, **body)) == choice.message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_length(client: openai.OpenAI, name: str) -> None:
    body = {"model": "denim-tiny", "messages": HELLO, name: 3}
    answer = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    for extra in ({"min_tokens": 20}, {"ignore_eos": True}):
        answer = client.chat.completions.create(**SHORT | {"max_tokens": 20}, extra_body=SILENT | extra)
        assert answer.usage.completion_tokens == 20


def test_logit_bias_forces_a_token(client: openai.OpenAI) -> None:
    body = SHORT | {"max_tokens": 3, "logit_bias": {"100": 100}}
    answer = client.chat.completions.create(**body, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [100, 100, 100]
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens


def test_token_ids_of_a_stream(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(**SHORT, extra_body=extra).choices[0].token_ids
    chunks = chunks_of(client, **SHORT, extra_body=extra)
    told = [getattr(choice, "token_ids", None) or [] for chunk in chunks for choice in chunk.choices]
    assert [token for ids in told for token in ids] == whole


def test_a_conversation_finds_its_prefix(client: openai.OpenAI) -> None:
    turns = [
        {"role": "system", "content": "You answer. " * 20},
        {"role": "user", "content": "What is a river? " * 6},
    ]
    body = {"model": "denim-tiny", "messages": turns, "max_tokens": 8, "extra_body": {"cache_salt": "turns"}}
    first = client.chat.completions.create(**body)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And?"},
    ]
    second = client.chat.completions.create(**body)
    shared = first.usage.prompt_tokens
    assert shared - 4 <= second.usage.prompt_tokens_details.cached_tokens <= shared
    salted = client.chat.completions.create(**body | {"extra_body": {"cache_salt": "another"}})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_a_mark_is_where_another_question_begins(client: openai.OpenAI) -> None:
    """cache_control on a part: the next request, which differs behind it, finds everything before."""

    def ask(question: str) -> Any:
        document = {"type": "text", "text": "A document. " * 30, "cache_control": {"type": "ephemeral"}}
        parts = [document, {"type": "text", "text": question}]
        return client.chat.completions.create(
            model="denim-tiny",
            messages=[{"role": "user", "content": parts}],
            max_tokens=1,
            extra_body={"cache_salt": "marks"},
        ).usage

    assert ask("Who wrote it?").prompt_tokens_details.cached_tokens == 0
    usage = ask("When was it?")
    assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens < 20


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "needs content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'system', 'developer'"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"seed": 2**70}, "seed", "at most 18446744073709551615"),
        ({"logit_bias": {"ten": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "below the vocabulary size 6144"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
        ({"stop": ["x"] * 65}, "stop", "at most 64 strings"),
        ({"stop": "x" * 1025}, "stop", "1024 characters"),
        ({"stop": 5}, "stop", "valid string"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"stop": ""}, "stop", "of 1 to 1024"),
        ({"best_of": 3}, "best_of", "best_of is not served"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"colour": "red"}, "colour", "Unknown parameter: 'colour'"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "/v1/completions"),
        ({"tool_choice": "required"}, "tool_choice", "tools has none"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "not for"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "not for"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages.0.content.0", "image_url: this model reads text only"),
        ({"messages": [*HELLO, {"role": "system", "content": "x"}]}, "messages", "must be the first message"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", "max_model_len=4096"),
        ({"cache_salt": ""}, "cache_salt", "not empty"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}},
         "response_format", "?"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "not both"),
        ({"model": "gpt-9"}, "model", "'gpt-9' is not served here; there is 'denim-tiny'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_refusals_name_the_parameter(
    client: openai.OpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    asked = {"model": "denim-tiny", "messages": HELLO, "max_tokens": 2} | body
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=asked, cast_to=object)
    error = caught.value
    assert (error.status_code, error.param) == (404 if param == "model" else 400, param)
    assert message in error.message


def test_an_error_keeps_a_stream_from_beginning(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chunks_of(client, **SHORT | {"max_tokens": -3})


def test_fields_with_null_are_left_out(client: openai.OpenAI) -> None:
    required = {"messages"}
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - required)
    answer = client.post("/chat/completions", body=nulls | SHORT, cast_to=object)
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_fields_without_effect(client: openai.OpenAI) -> None:
    """They are taken from those who send them, and the answer is the same."""
    given = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
    }  # fmt: skip
    fields = ChatRequest.model_fields.items()
    told = {name for name, field in fields if (field.description or "").startswith("Without effect")}
    assert told == set(given)
    answers = [
        client.post("/chat/completions", body=SHORT | {"temperature": 0} | more, cast_to=object)
        for more in ({}, given)
    ]
    first, second = (answer["choices"][0]["message"] for answer in answers)
    assert first == second


def test_params_are_checked_once() -> None:
    with pytest.raises(RequestError, match="presence_penalty"):
        ChatRequest(messages=HELLO, presence_penalty=3.0).params()  # type: ignore[arg-type]


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    engine = ScriptedEngine(tmp_path, template="")
    with (
        live(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="no chat template"),
    ):
        client.chat.completions.create(model="scripted", messages=HELLO)
