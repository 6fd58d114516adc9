"""Other dtypes of states and weights: refused at the start, or served; how far they drift."""

from __future__ import annotations

from itertools import product
from statistics import mean

import pytest

from denim import LLM, ConfigError, SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import Way, greedy, run, tokens_of
from tests.tiny import VOCAB


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), list(product(["auto", "float32", "bfloat16", "float16"], repeat=2))
)
def test_every_pair_of_dtypes_serves(dense: Model, dtype: str, state_dtype: str) -> None:
    """NP-02: prompts of 1, width - 1 and three chunks."""
    llm = LLM(dense.folder, memory="1MiB", dtype=dtype, state_dtype=state_dtype, debug=True)
    outputs = llm.generate(
        [tokens_of(n, 0, VOCAB) for n in (1, 3, 192)], SamplingParams(temperature=0, max_tokens=4)
    )
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    state = "float32" if state_dtype == "auto" else state_dtype
    assert str(llm.core.runner.storage.state(0, "recurrent").dtype) == f"torch.{state}"


@pytest.mark.parametrize("option", ["dtype", "state_dtype", "kv_dtype"])
def test_unknown_dtypes_are_refused(dense: Model, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='float8'; supported: auto, float32, bfloat16, float16"):
        LLM(dense.folder, **{option: "float8"})


@pytest.mark.parametrize(("length", "budget"), [(2000, 64), (400, 1)])
def test_drift_of_bf16_states(dense: Model, length: int, budget: int) -> None:
    """NP-04: mean NLL within 0.5%, and no growth along the text, with the state rounded after every segment
    of 64 tokens and after every token."""
    cases = [greedy(tokens_of(length, 4, VOCAB), 1, prompt_logprobs=0)]
    nll = {}
    for state_dtype in ("float32", "bfloat16"):
        way = Way(options={"state_dtype": state_dtype, "max_num_batched_tokens": budget})
        reports = run(dense.folder, cases, way).outputs[0].prompt_logprobs[1:]
        nll[state_dtype] = [-next(iter(report.values())).logprob for report in reports]
    assert nll["float32"] != nll["bfloat16"]
    base = mean(nll["float32"])
    assert abs(mean(nll["bfloat16"]) - base) < 0.005 * base
    tenth = length // 10
    drift = [
        mean(
            abs(a - b)
            for a, b in zip(nll["float32"][i : i + tenth], nll["bfloat16"][i : i + tenth], strict=True)
        )
        for i in range(0, 10 * tenth, tenth)
    ]
    assert mean(drift[5:]) < 2 * max(mean(drift[:5]), 1e-3)
