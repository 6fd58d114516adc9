"""In bf16, in every way that the matrix has, each token is the likeliest of the model in fp32 or nearly tied
with it.

That is more than the rule of cases.md, which compares two bf16 runs up to their first difference: every token
counts, and the measure has no rounding of its own. On denim-tiny, which is trained: random weights magnify
rounding to several times the gap that counts as a tie.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from denim.engine.tokenizer import load_tokenizer
from denim.spec.config_file import embedded_model
from tests.exactness.harness import DEVICE, Case, Crossing, crossings, greedy, run
from tests.exactness.judge import BF16_TIE, Judge, judge_run
from tests.exactness.test_matrix import assert_preempted, label

FOLDER = embedded_model()
LENGTHS = (1, 3, 16, 64, 65, 130)
TEXT = (
    "The river rose in the night, and by the morning the old bridge was gone. Nobody in the village had heard"
    " it fall. They stood on the bank and looked at the water. Then the eldest of them, a woman who had kept"
    " the ferry before there was a bridge, went home and came back with a rope. She asked who would go first."
)
# Steps on a CPU take several times as long, and all rows run there in fp32.
ROWS = list(enumerate(crossings()))[:: 1 if DEVICE == "cuda" else 9]
# On a CPU logits themselves are bf16: from 8 on, where denim-tiny's largest are, neighbours are 1/16 apart.
TIE = BF16_TIE if DEVICE == "cuda" else 1 / 16 + 1e-3
LOGPROB = 0.3  # nats, of reported log-probabilities


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    tokens = load_tokenizer(FOLDER).encode(TEXT * 3, add_special_tokens=False)
    return [greedy(tokens[n : 2 * n], 20, logprobs=2, ignore_eos=True) for n in LENGTHS]


@pytest.fixture(scope="module")
def judge() -> Judge:
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return Judge(reference, TIE, relative=False, tolerance=LOGPROB)


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[f"{i}-{label(row)}" for i, row in ROWS])
def test_every_pair_of_ways(cases: list[Case], judge: Judge, number: int, row: Crossing) -> None:
    outcome = run(FOLDER, cases, row.way.with_options(dtype="bfloat16"))
    judge_run(judge, cases, outcome)
    assert_preempted(row, outcome)
