"""Completions that must have a form: how they are drawn, how they end, together with all else one may ask."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import regex
import torch

from denim import LLM, AsyncEngine, RequestError, SamplingParams, StructuredOutput
from denim.engine.outputs import CompletionOutput
from denim.engine.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import save
from tests.engine.conftest import TEXT_VOCAB
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import checkpoint

PROMPT = tokens_of(20, 5, 256)
END = 272  # <|im_end|>


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    """A model with a byte-level tokenizer that ends with <|im_end|>, and its judge."""
    folder = tmp_path_factory.mktemp("judged")
    judge = Judge(checkpoint(folder, vocab_size=TEXT_VOCAB, seed=3))
    save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder, judge


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"], scope="module")
def llm(request: pytest.FixtureRequest, judged: tuple[Path, Judge]) -> LLM:
    return LLM(judged[0], memory="2MiB", max_model_len=256, debug=True, async_scheduling=request.param)


def ask(llm: LLM, form: dict[str, Any], **params: Any) -> CompletionOutput:
    given = {"temperature": 0, "max_tokens": 40, **params}
    return llm.generate([PROMPT], SamplingParams(structured=StructuredOutput(**form), **given))[0].outputs[0]


def test_end_token(llm: LLM) -> None:
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode_one(END) == "<|im_end|>"


FORMS = [
    {"regex": r"([a-c]{2}[0-9] )*x"},
    {"choice": ["first", "second", "中文"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"pattern": "^[a-z中]{0,3}$", "type": "string"}},
            "required": ["a", "b"],
        }
    },
    {"grammar": 'root ::= "<" [a-z]+ ">" root | "."'},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("random", [False, True])
def test_the_text_has_its_form(llm: LLM, form: dict[str, Any], random: bool) -> None:
    for seed in range(8 if random else 1):
        out = ask(llm, form, temperature=float(random), seed=seed, max_tokens=60)
        if out.finish_reason == "length":
            continue
        assert out.finish_reason == "stop"
        match form:
            case {"regex": pattern}:
                assert re.fullmatch(pattern, out.text)
            case {"choice": choices}:
                assert out.text in choices
            case {"json": _}:
                value = json.loads(out.text)
                assert value["a"] in (1, 2)
                assert len(value["b"]) <= 3
            case _:
                assert re.fullmatch(r"(<[a-z]+>)*\.", out.text)


def test_each_token_is_the_likeliest_that_is_allowed(
    llm: LLM, judged: tuple[Path, Judge], tokenizer: Tokenizer
) -> None:
    """Against transformers' logits, and another library's idea of what may still match a pattern."""
    pattern = rb"([a-f]{2}[0-9]{1,3} ?)+"
    out = ask(llm, {"regex": pattern.decode()}, ignore_eos=True)
    assert out.finish_reason == "length"
    logits = judged[1].logits([*PROMPT, *out.token_ids])[len(PROMPT) - 1 : -1]
    words = [tokenizer.inner.convert_ids_to_tokens(token) for token in range(TEXT_VOCAB)]
    text = b""
    for place, token in enumerate(out.token_ids):
        # Every token that could match is one ASCII character, whose letter is itself; 'Ġ' is the space.
        may = [
            number
            for number, word in enumerate(words)
            if word
            and len(word) < 4
            and regex.fullmatch(pattern, text + word.replace("Ġ", " ").encode(), partial=True)
        ]
        best = max(may, key=lambda number: logits[place, number])
        assert token == best, f"token {place}"
        text += words[token].replace("Ġ", " ").encode()
    assert text.decode() == out.text


def test_a_form_that_is_whole_ends_the_text_without_a_token_more(llm: LLM) -> None:
    out = ask(llm, {"regex": "[0-9]{4}"})
    assert out.finish_reason == "stop"
    assert out.stop_reason is None
    assert len(out.token_ids) == 4


def test_also_where_ends_are_ignored_or_too_early(llm: LLM) -> None:
    """ignore_eos and min_tokens keep the model's end away, but a whole text has nothing to go on with."""
    for params in ({"ignore_eos": True}, {"min_tokens": 30}):
        out = ask(llm, {"regex": "[0-9]{4}"}, **params)
        assert (out.finish_reason, len(out.token_ids)) == ("stop", 4)


def test_at_the_last_token_it_is_whole_not_cut(llm: LLM) -> None:
    assert ask(llm, {"regex": "[0-9]{4}"}, max_tokens=4).finish_reason == "stop"
    assert ask(llm, {"regex": "[0-9]{4}"}, max_tokens=3).finish_reason == "length"


def test_an_end_token_ends_it_where_the_form_may_end(llm: LLM) -> None:
    out = ask(llm, {"regex": "[0-9]{3,}"}, logit_bias={END: 100})
    assert out.finish_reason == "stop"
    assert len(out.token_ids) == 4
    assert out.token_ids[-1] == END
    assert re.fullmatch("[0-9]{3}", out.text)


def test_min_tokens_keeps_it_going_where_it_can(llm: LLM) -> None:
    out = ask(llm, {"regex": "[0-9]{3,}"}, logit_bias={END: 100}, min_tokens=6)
    assert len(out.token_ids) == 7
    assert re.fullmatch("[0-9]{6}", out.text)


def test_ignore_eos_leaves_no_end(llm: LLM) -> None:
    out = ask(llm, {"regex": "[0-9]{3,}"}, logit_bias={END: 100}, ignore_eos=True)
    assert out.finish_reason == "length"
    assert len(out.token_ids) == 40


def test_stop_tokens_and_stop_strings(llm: LLM) -> None:
    out = ask(llm, {"regex": "[0-9]{3,}"}, logit_bias={ord("z"): 100}, stop_token_ids=[ord("z")])
    assert (out.finish_reason, out.stop_reason, len(out.token_ids)) == ("stop", ord("z"), 4)
    out = ask(llm, {"regex": "(ab)+"}, stop="bab", ignore_eos=True)
    assert (out.text, out.stop_reason) == ("a", "bab")


def test_a_bias_does_not_break_the_form(llm: LLM) -> None:
    out = ask(llm, {"regex": "[a-d]{10}"}, logit_bias={ord("z"): 100, ord("c"): 100})
    assert out.text == "c" * 10


def test_penalties_count(llm: LLM) -> None:
    plain = ask(llm, {"regex": "[a-d]{12}"})
    penalised = ask(llm, {"regex": "[a-d]{12}"}, frequency_penalty=2.0, presence_penalty=2.0)
    assert set(plain.text) != set(penalised.text)
    assert re.fullmatch("[a-d]{12}", penalised.text)


def test_logprobs_are_the_models_own(llm: LLM, judged: tuple[Path, Judge]) -> None:
    out = ask(llm, {"regex": "[0-9]{6}"}, logprobs=2)
    judged[1].logprobs(PROMPT, out.token_ids, out.logprobs)


def test_completions_of_one_request_go_each_their_own_way(llm: LLM) -> None:
    form = StructuredOutput(regex="[a-z]{8}")
    params = SamplingParams(n=4, temperature=1.0, seed=3, structured=form, max_tokens=20)
    texts = [one.text for one in llm.generate([PROMPT], params)[0].outputs]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    singles = [
        llm.generate(
            [PROMPT],
            SamplingParams(temperature=1.0, seed=3 + place, structured=form, max_tokens=20),
        )[0]
        .outputs[0]
        .text
        for place in range(4)
    ]
    assert texts == singles


def test_the_form_begins_behind_reasoning(llm: LLM, judged: tuple[Path, Judge]) -> None:
    """The end of reasoning as one token, as several, and in any place; before it any text may stand."""
    assert llm.tokenizer is not None
    (think_end,) = llm.tokenizer.encode("</think>", add_special_tokens=False)
    form = {"regex": "[0-9]{3}", "after": "</think>"}
    out = ask(llm, form)
    logits = judged[1].logits([*PROMPT, *out.token_ids])[len(PROMPT) - 1 : -1].clone()
    logits[:, sorted(llm.tokenizer.special_ids)] = -torch.inf
    free = logits[:, : think_end + 1].argmax(-1).tolist()  # the tokenizer's last token
    begun = out.token_ids.index(think_end) + 1 if think_end in out.token_ids else 40
    assert out.token_ids[:begun] == free[:begun]
    assert begun > 10
    seen = set()
    for seed in range(12):
        params = {"temperature": 1.0, "seed": seed, "logit_bias": {think_end: 4}, "max_tokens": 60}
        text = ask(llm, form, skip_special_tokens=False, **params).text
        before, mark, after = text.partition("</think>")
        if mark:
            assert regex.fullmatch("\n{0,2}[0-9]{3}", after, partial=True)
            seen.add(len(before) > 0)
    assert seen == {False, True}
    spelt = ask(
        llm,
        {"regex": "[0-9]{3}", "after": "ab"},
        temperature=1.0,
        seed=1,
        logit_bias={ord("a"): 9, ord("b"): 9},
    )
    assert re.fullmatch(r"((?!ab).)*ab\n{0,2}[0-9]{3}", spelt.text, re.DOTALL)


def test_a_dead_end_ends_with_an_error(llm: LLM, judged: tuple[Path, Judge]) -> None:
    """A grammar may lead where no text goes on, which only shows when it is there; others go on."""
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        structured=StructuredOutput(grammar='root ::= "a" dead\ndead ::= dead "b"'),
    )
    try:
        dead, other = llm.generate([PROMPT, PROMPT], [params, SamplingParams(temperature=0, max_tokens=9)])
    except RequestError as error:
        assert "allows no text" in str(error)
    else:
        assert dead.outputs[0].finish_reason == "error"
        assert other.outputs[0].finish_reason == "length"


def test_what_a_form_has_no_place_for_is_no_part_of_the_output(llm: LLM) -> None:
    """`min_tokens` keeps back a stop token which is all that the form allows: text, tokens and reports end
    before what is drawn then."""
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        min_tokens=5,
        stop_token_ids=[ord("i")],
        logprobs=0,
        structured=StructuredOutput(choice=["first"]),
    )
    deltas = list(llm.stream(PROMPT, params))
    assert "".join(delta.text for delta in deltas) == "f"
    assert [token for delta in deltas for token in delta.token_ids] == [ord("f")]
    out = llm.generate([PROMPT], params)[0].outputs[0]
    assert (out.text, out.token_ids, out.finish_reason) == ("f", [ord("f")], "error")
    assert out.logprobs is not None and len(out.logprobs) == 1


def test_refused_before_anything_runs(llm: LLM) -> None:
    bad = SamplingParams(structured=StructuredOutput(regex="(a"))
    with pytest.raises(RequestError, match="regex"):
        llm.generate([PROMPT], bad)
    with pytest.raises(RequestError, match="regex"):
        llm.generate([PROMPT], SamplingParams(n=3, structured=StructuredOutput(regex="(a")))
    assert not llm.core.has_work
    llm.check()


def test_a_model_without_a_tokenizer(mute: tuple[Path, Judge]) -> None:
    llm = LLM(mute[0], memory="1MiB", max_model_len=64)
    with pytest.raises(RequestError, match="Structured output needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured=StructuredOutput(regex="a")))


def test_a_request_that_needs_its_last_token_holds_nobody_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps overlap, a batch with a form in it is planned ahead like any other: one step a token."""
    form = SamplingParams(structured=StructuredOutput(regex="[0-9]{20}"), temperature=0, max_tokens=40)
    plain = SamplingParams(temperature=0, max_tokens=20)
    before = llm.core.steps
    llm.generate([PROMPT, PROMPT], [form, plain])
    assert llm.core.steps - before <= 20 + 2


def test_a_step_that_fails_to_draw_ends_its_requests(
    judged: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(judged[0], memory="2MiB", max_model_len=256, debug=True, async_scheduling=True)
    real, calls = llm.core.runner.draw, []

    def fail(flight: Any) -> None:
        calls.append(flight)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        real(flight)

    monkeypatch.setattr(llm.core.runner, "draw", fail)
    out = ask(llm, {"regex": "[0-9]{20}"})
    assert out.finish_reason == "error"
    llm.check()
    assert ask(llm, {"regex": "[0-9]{20}"}).finish_reason == "stop"


def test_compiling_does_not_hold_up_other_requests(
    judged: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run to their end while a form is compiled; who waits for it may leave."""
    gate = threading.Event()

    async def scene() -> None:
        async with AsyncEngine(judged[0], memory="2MiB", max_model_len=256, debug=True) as engine:
            core = engine._loop.core
            assert core is not None
            compiler = core.grammars._compiler

            def slow(source: str) -> Any:
                gate.wait(60)
                return compiler(source)

            monkeypatch.setattr(core.grammars, "_compiler", slow)

            async def text(**params: Any) -> str:
                given = SamplingParams(temperature=0, max_tokens=20, **params)
                return "".join([delta.text async for delta in engine.generate(PROMPT, given)])

            form = StructuredOutput(regex="[0-9]{5}")
            waits = asyncio.ensure_future(text(structured=form))
            leaves = asyncio.ensure_future(text(structured=StructuredOutput(regex="[0-9]{6}")))
            bad = asyncio.ensure_future(text(structured=StructuredOutput(regex="(")))
            await text()
            assert not waits.done()
            leaves.cancel()
            gate.set()
            assert re.fullmatch("[0-9]{5}", await waits)
            with pytest.raises(RequestError, match="regex"):
                await bad
            stats = await engine.stats()
            assert stats["running"] == stats["waiting"] == 0

    asyncio.run(asyncio.wait_for(scene(), 60))
