"""The embedded model: the same in transformers and in the engine, and text that a person can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from denim import LLM, SamplingParams
from denim.spec import embedded_model
from tests.exactness.harness import Way, greedy, run
from tests.exactness.judge import Judge, judge_run

TEXT = (
    "The river rose in the night, and by the morning the old bridge was gone. Nobody in the village had heard"
    " it fall. They stood on the bank and looked at the water. "
)
FOLDER = embedded_model()


@pytest.fixture(scope="module")
def judge() -> Judge:
    import transformers

    return Judge(transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(memory="64MiB", max_model_len=2048)


def prompt_of(llm: LLM, length: int) -> list[int]:
    tokens = llm.tokenizer.encode(TEXT * 20)
    assert len(tokens) > length
    return tokens[:length]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 67, "chunk_size": 1}, {"max_num_batched_tokens": 1}],
    ids=["whole", "segments", "token by token"],
)
def test_200_tokens_as_transformers(llm: LLM, judge: Judge, options: dict) -> None:
    """In fp32: a prompt at once, in three ragged segments, and token by token; log-probabilities too."""
    cases = [
        greedy(prompt_of(llm, 150), 200, ignore_eos=True, logprobs=1, prompt_logprobs=0, detokenize=False)
    ]
    judge_run(judge, cases, run(FOLDER, cases, Way(options={"dtype": "float32", **options})))
    judge.check_ties()


def test_any_way_to_run_it(llm: LLM, judge: Judge) -> None:
    """Among mates, preempted, on used memory."""
    cases = [greedy(prompt_of(llm, n), 40, ignore_eos=True) for n in (1, 33, 64, 130)]
    way = Way(company="joining", bump=5, swap=True, recycled=True)
    way = way.with_options(dtype="float32", max_num_seqs=2, max_num_batched_tokens=50)
    outcome = run(FOLDER, cases, way)
    assert outcome.stats["preempted_swap"] > 0
    judge_run(judge, cases, outcome)


def test_it_answers_and_stops(llm: LLM) -> None:
    """A chat turn is text, and ends with the end token of the template."""
    messages = [{"role": "user", "content": "Hello!"}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200), enable_thinking=False)[0]
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason is None
    assert completion.text.strip()
    assert "<|im" not in completion.text
    assert completion.token_ids[-1] in llm.core.defaults.end_token_ids


def test_short_prompts_after_planted_codes(llm: LLM) -> None:
    """DS-01: codes in long prompts leave nothing in the slots for short ones."""
    params = SamplingParams(temperature=0, max_tokens=12)
    short = [llm.tokenizer.encode(TEXT)[:n] for n in (1, 2, 3, 4, 63)]
    cold = [LLM(memory="32MiB", max_model_len=512).generate(p, params)[0].outputs[0].token_ids for p in short]
    codes = [f"{TEXT} The code is {number:06d}. {TEXT}" for number in range(123456, 123466)]
    llm.generate(codes, params)
    assert [llm.generate(p, params)[0].outputs[0].token_ids for p in short] == cold


def test_the_folder_is_small() -> None:
    """At most 20 MB in the package."""
    assert sum(file.stat().st_size for file in Path(FOLDER).iterdir()) <= 20 * 10**6
