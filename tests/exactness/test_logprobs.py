"""Log-probabilities as reported: in any order, batch or segmentation, and for every fork."""

from __future__ import annotations

from itertools import permutations

import pytest

from denim import LLM, SamplingParams
from denim.runner.runner import SCORED_ROWS
from tests.exactness.conftest import Model
from tests.exactness.harness import Case, Way, greedy, run, tokens_of
from tests.exactness.judge import FP32_LOGPROB, judge_run
from tests.tiny import VOCAB


def chosen(reports: list) -> list[float]:
    """The log-probability of each token itself."""
    return [next(iter(report.values())).logprob for report in reports if report is not None]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_decode_agrees_with_prefill(models: dict[str, Model], kind: str) -> None:
    """NP-05: reports made while decoding are those of scoring prompt and output, and transformers'."""
    model = models[kind]
    cases = [greedy(tokens_of(n, 7, VOCAB), 40, logprobs=3) for n in (1, 20, 70)]
    for options in ({}, {"max_num_batched_tokens": 13}, {"chunk_size": 16}):
        outcome = run(model.folder, cases, Way(options=options))
        judge_run(model.judge, cases, outcome)
        texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outcome.outputs]
        scored = run(
            model.folder, [greedy(text, 1, prompt_logprobs=3) for text in texts], Way(options=options)
        )
        for decoded, prefilled in zip(outcome.outputs, scored.outputs, strict=True):
            ours = chosen(decoded.outputs[0].logprobs)
            theirs = chosen(prefilled.prompt_logprobs)[-len(ours) :]
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < FP32_LOGPROB


def test_prompts_in_any_order(dense: Model) -> None:
    """AP-05: three prompts with a common head, in all six orders, in one batch, for several segmentations."""
    head = tokens_of(50, 1, VOCAB)
    prompts = [head + tokens_of(n, n, VOCAB) for n in (3, 20, 64)]
    for order in permutations(range(3)):
        for budget in (2048, 70, 17, 1) if order == (2, 0, 1) else (2048, 40):
            cases = [greedy(prompts[place], 2, prompt_logprobs=1) for place in order]
            judge_run(
                dense.judge, cases, run(dense.folder, cases, Way(options={"max_num_batched_tokens": budget}))
            )


def test_prompt_logprobs_in_segments_of_every_length(dense: Model) -> None:
    """No position is left out or told twice, wherever the prompt was cut."""
    cases = [greedy(tokens_of(40, 1, VOCAB), 1, prompt_logprobs=2)]
    for budget in range(1, 42):
        way = Way(options={"max_num_batched_tokens": budget, "chunk_size": 1})
        judge_run(dense.judge, cases, run(dense.folder, cases, way))


def test_prompt_logprobs_of_one_long_segment(dense: Model) -> None:
    """More positions than are scored at one time; and the first token of the vocabulary follows a segment."""
    prompt = tokens_of(SCORED_ROWS + 40, 1, VOCAB)
    prompt[100] = 0
    cases = [greedy(prompt, 1, prompt_logprobs=1)]
    for budget in (len(prompt), 100):
        way = Way(options={"max_num_batched_tokens": budget, "checkpoint_policy": "none"})
        judge_run(dense.judge, cases, run(dense.folder, cases, way))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 65])
def test_completions_of_one_request(dense: Model, length: int) -> None:
    """AP-03, AP-04: four seeds, four texts, the same ones again and as single requests; each one's score is
    that of scoring it anew; the prompt is computed once."""
    prompt = tokens_of(length, 2, VOCAB)
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12, logprobs=0)
    llm = LLM(dense.folder, memory="2MiB", debug=True)
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    texts = [c.token_ids for c in first.outputs]
    assert texts == [c.token_ids for c in second.outputs]
    assert len({tuple(text) for text in texts}) == 4
    assert all(c.finish_reason == "length" for c in first.outputs)
    for index, completion in enumerate(first.outputs):
        single = SamplingParams(seed=7 + index, temperature=1.0, max_tokens=12)
        assert llm.generate(prompt, single)[0].outputs[0].token_ids == completion.token_ids
        dense.judge.logprobs(prompt, completion.token_ids, completion.logprobs)
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = llm.generate(prompt + completion.token_ids, scoring)[0]
        again = sum(chosen(scored.prompt_logprobs)[-12:])
        assert abs(again - completion.cumulative_logprob) < 12 * FP32_LOGPROB
    if length > 1:
        llm = LLM(dense.folder, memory="2MiB", debug=True)
        llm.generate(prompt, params)
        assert llm.stats()["tokens"] == length - 1 + 4 * 12


def test_deltas_of_every_completion(dense: Model) -> None:
    """AP-03: the stream of each index goes on after the first has ended, and ends with a reason."""
    llm = LLM(dense.folder, memory="2MiB", debug=True)
    prompt = tokens_of(20, 3, VOCAB)
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=30, stop_token_ids=range(0, VOCAB, 9))
    whole = llm.generate(prompt, params)[0]
    joined: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons = {}
    for delta in llm.stream(prompt, params):
        assert delta.index not in reasons
        joined[delta.index] += delta.token_ids
        if delta.finish_reason:
            reasons[delta.index] = delta.finish_reason
    assert joined == {c.index: c.token_ids for c in whole.outputs}
    assert reasons == {c.index: c.finish_reason for c in whole.outputs}
    assert len({len(tokens) for tokens in joined.values()}) > 1


def test_the_same_batch_four_times(dense: Model) -> None:
    """AP-13: one schedule, so equal bits. A prefix that is reused makes it another schedule."""
    llm = LLM(dense.folder, memory="2MiB", checkpoint_policy="none")
    prompts = [tokens_of(5 + 13 * i, i, VOCAB) for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5)
    runs = [llm.generate(prompts, params) for _ in range(4)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            assert a.outputs[0].logprobs == b.outputs[0].logprobs


def test_penalties_and_bias_do_not_show_in_reports(dense: Model) -> None:
    """Reports are of the model's own logits."""
    case = Case(
        tokens_of(12, 0, VOCAB),
        SamplingParams(
            temperature=0, max_tokens=8, logprobs=2, logit_bias={5: 100.0}, repetition_penalty=2.0
        ),
    )
    output = run(dense.folder, [case]).outputs[0].outputs[0]
    assert output.token_ids == [5] * 8
    dense.judge.logprobs(case.prompt, output.token_ids, output.logprobs)
