"""KV in 8 bits: half the pages, a bounded drift, and the same tokens however a request is run."""

from __future__ import annotations

from statistics import mean

import pytest

from denim import LLM
from tests.exactness.conftest import Model
from tests.exactness.harness import Way, greedy, run, tokens_of
from tests.exactness.judge import BF16_TIE, agree_up_to_a_tie
from tests.tiny import VOCAB


def test_half_the_pages(dense: Model) -> None:
    layouts = [
        LLM(dense.folder, memory="1MiB", dtype="bfloat16", kv_dtype=name).core.layout
        for name in ("auto", "fp8", "fp8_e4m3")
    ]
    pages = [layout.size_class("page").entry_bytes for layout in layouts]
    assert pages[0] == 2 * pages[1] == 2 * pages[2]


def test_drift(dense: Model) -> None:
    """Mean NLL within 1% of fp32 KV. That nothing changes would mean that nothing was stored in 8 bits."""
    cases = [greedy(tokens_of(400, 4, VOCAB), 1, prompt_logprobs=0)]
    nll = {}
    for kv_dtype in ("float32", "fp8"):
        way = Way(options={"kv_dtype": kv_dtype, "max_num_batched_tokens": 64})
        reports = run(dense.folder, cases, way).outputs[0].prompt_logprobs[1:]
        nll[kv_dtype] = [-next(iter(report.values())).logprob for report in reports]
    assert nll["float32"] != nll["fp8"]
    assert mean(nll["fp8"]) == pytest.approx(mean(nll["float32"]), rel=0.01)


@pytest.mark.parametrize(
    "way",
    [
        Way(options={"max_num_batched_tokens": 17}),
        Way(company="joining", recycled=True),
        Way(bump=5, swap=True, options={"max_num_seqs": 2}),
    ],
    ids=["segments", "joining", "swapped"],
)
def test_differs_at_near_ties_only(dense: Model, way: Way) -> None:
    """A key on the edge between two numbers of 8 bits may go to either: the rule for bf16 holds."""
    cases = [greedy(tokens_of(n, 2, VOCAB), 30, logprobs=2) for n in (3, 17, 64, 130)]
    cold = run(dense.folder, cases, Way(company="alone").with_options(kv_dtype="fp8"))
    outcome = run(dense.folder, cases, way.with_options(kv_dtype="fp8"))
    for reference, output in zip(cold.outputs, outcome.outputs, strict=True):
        agree_up_to_a_tie(reference.outputs[0], output.outputs[0].token_ids, BF16_TIE)
