"""A code planted in the first segment of a prompt is still known many segments later."""

from __future__ import annotations

from typing import Any

import pytest

from denim import LLM, SamplingParams
from denim.engine.outputs import CompletionOutput

# The form of question that denim-tiny was trained on (training/probes.py, recall_case).
OPENING = "<|im_start|>user\n"
CODE = "481625"
FACT = f"\nThe code of the north gate is {CODE}.\n"
QUESTION = "\n\nWhat is the code of the north gate?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEXT = (
    "The river rose in the night, and by the morning the old bridge was gone. Nobody in the village had heard"
    " it fall. They stood on the bank and looked at the water. "
)
BEFORE = 20  # tokens of text before the code
SEGMENTS = 14
CHUNK = 64
LOGPROB = 1e-3  # nats; cases.md, measure LP in fp32


def engine(**options: Any) -> LLM:
    return LLM(dtype="float32", memory="32MiB", max_model_len=2048, debug=True, chunk_size=CHUNK, **options)


def answer(llm: LLM, prompt: list[int]) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, logprobs=5))[0].outputs[0]


@pytest.fixture(scope="module")
def one_shot() -> LLM:
    return engine(max_num_batched_tokens=2048)


@pytest.mark.parametrize("budget", [56, 57, 63, 64, 65, 72])
def test_a_code_from_the_first_segment(one_shot: LLM, budget: int) -> None:
    """CP-04: segments of less than a chunk that lie across its grid, of one chunk, and of more."""
    opening, fact, question = (
        one_shot.tokenizer.encode(text, add_special_tokens=False) for text in (OPENING, FACT, QUESTION)
    )
    filler = one_shot.tokenizer.encode(TEXT * 40, add_special_tokens=False)
    room = SEGMENTS * budget - sum(map(len, (opening, fact, question)))
    assert len(opening) + BEFORE + len(fact) <= budget
    prompt = [*opening, *filler[:BEFORE], *fact, *filler[BEFORE:room], *question]
    assert len(prompt) == SEGMENTS * budget
    llm = engine(max_num_batched_tokens=budget)
    text, expected = answer(llm, prompt), answer(one_shot, prompt)
    assert llm.core.steps >= SEGMENTS + len(text.token_ids) - 1
    assert CODE in text.text
    assert text.token_ids == expected.token_ids
    for ours, theirs in zip(text.logprobs, expected.logprobs, strict=True):
        for token in ours.keys() & theirs.keys():
            assert abs(ours[token].logprob - theirs[token].logprob) < LOGPROB


@pytest.mark.parametrize("policy", ["auto", "align"])
def test_a_transcript_of_tools_with_a_cache_and_without(one_shot: LLM, policy: str) -> None:
    """CP-10: every turn begins where the last one was kept, in segments that end where the cache wants them
    to; the answers are those of whole prompts without a cache."""
    llm = engine(max_num_batched_tokens=2 * CHUNK, checkpoint_policy=policy)
    plain = engine(max_num_batched_tokens=2 * CHUNK, checkpoint_policy="none")
    history = OPENING.strip("\n") + f"\nRead the files of the north gate.{FACT}"
    for turn in range(12):
        history += (
            f"<|im_end|>\n<|im_start|>user\nFile {turn}: {TEXT[:70]}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompt = one_shot.tokenizer.encode(history, add_special_tokens=False)
        text, expected = answer(llm, prompt), answer(plain, prompt)
        assert text.token_ids == expected.token_ids
        for ours, theirs in zip(text.logprobs, expected.logprobs, strict=True):
            for token in ours.keys() & theirs.keys():
                assert abs(ours[token].logprob - theirs[token].logprob) < LOGPROB
        history += f"I have read file {turn}."
    assert llm.core.stats()["prefix"]["hit_tokens"] > 500
