"""Every family on a CUDA device in fp32: log-probabilities and greedy tokens of the CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from denim import LLM, SamplingParams
from denim.engine.outputs import RequestOutput
from denim.layers import linear
from tests.families.row import VOCAB
from tests.families.small import configs, save

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 4, 17, 65, 130)  # around the convolution's width, the page and the chunk
BATCHED_TOKENS = 50  # so that prompts are cut, and segments run beside decode rows
TOLERANCE = 3e-4  # of the spread of log-probabilities, as against transformers in tests/test_families.py
NEAR_TIE = 1e-3  # nats between the two best tokens: the lesser may win
PARAMS = SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=0, ignore_eos=True)
CAPTURED = replace(PARAMS, prompt_logprobs=None)  # a captured step reports nothing on prompts


class Results(NamedTuple):
    outputs: list[RequestOutput]

    def prompt_logprobs(self) -> torch.Tensor:
        """Of every prompt token behind a first one, all requests behind one another."""
        entries = [entry for output in self.outputs for entry in output.prompt_logprobs[1:]]
        return torch.tensor([one.logprob for entry in entries for one in entry.values()])


def run(folder: Path, device: str, params: SamplingParams = PARAMS, **options: object) -> Results:
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    defaults = {"memory": "32MiB", "max_num_seqs": 8, "max_num_batched_tokens": BATCHED_TOKENS}
    options = {**defaults, "debug": True, **options}
    llm = LLM(folder, device=device, **options)
    outputs = llm.generate(prompts, params)
    llm.check()
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return Results(outputs)


@pytest.fixture(scope="module", params=configs())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(request.param, path)
    return path


@pytest.fixture(autouse=True)
def torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Denim's own products have tests of their own; here each of the many shapes would be compiled for
    nothing."""
    monkeypatch.setattr(linear, "FEW_ROWS", 0)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Results:
    return run(folder, "cpu")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_as_on_the_cpu(folder: Path, reference: Results, captured: bool) -> None:
    params = CAPTURED if captured else PARAMS
    check(run(folder, "cuda", params, enforce_eager=not captured), reference)


def check(ours: Results, reference: Results) -> None:
    expected = reference.prompt_logprobs()
    spread = expected.std().item()
    assert 0.1 < spread < 100, f"logits of spread {spread} test nothing"
    bound = TOLERANCE * spread
    difference = worst = 0.0
    if ours.outputs[0].prompt_logprobs is not None:
        difference = (ours.prompt_logprobs() - expected).abs().max().item()
    for mine, theirs in zip(ours.outputs, reference.outputs, strict=True):
        a, b = mine.outputs[0], theirs.outputs[0]
        for place, (token, wanted) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            best = list(b.logprobs[place].values())
            if token != wanted:
                assert best[0].logprob - best[1].logprob < NEAR_TIE, f"token {place}: {token}, not {wanted}"
                break
            worst = max(worst, abs(a.logprobs[place][token].logprob - best[0].logprob))
    print(f"prompts {difference / spread:.1e}, decode {worst / spread:.1e} of the spread")
    assert difference < bound and worst < bound, (difference / spread, worst / spread)
