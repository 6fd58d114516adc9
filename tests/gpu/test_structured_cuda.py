"""Structured output on a CUDA device: masks on captured steps, overlapped, without a wait for the device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from denim import LLM, SamplingParams, StructuredOutput
from denim.engine.grammars import Grammars
from denim.engine.tokenizer import load_tokenizer
from denim.runner.sampler import Sampler, SamplingState
from tests.engine.byte_tokenizer import save
from tests.tiny import checkpoint

pytestmark = pytest.mark.gpu

VOCAB = 288
PROMPT = list(range(40, 90))
FORMS = [
    StructuredOutput(regex="([a-f]{2}[0-9]{1,3} ?)+"),
    StructuredOutput(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}),
    StructuredOutput(choice=["yes", "no"]),
    None,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speaking")
    checkpoint(path, vocab_size=VOCAB, seed=3)
    return save(path)


def texts(folder: Path, device: str, **options: object) -> list[str]:
    """Of 16 requests at once, greedy and random, with forms and free."""
    llm = LLM(folder, device=device, debug=True, memory="64MiB", max_model_len=256, **options)
    params = [
        SamplingParams(
            temperature=float(seed % 2),
            seed=seed,
            max_tokens=24,
            structured=FORMS[seed % len(FORMS)],
            frequency_penalty=0.5 if seed % 3 == 0 else 0.0,
        )
        for seed in range(16)
    ]
    outputs = llm.generate([PROMPT[: 20 + seed] for seed in range(16)], params)
    llm.check()
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_the_texts_of_the_cpu(folder: Path, eager: bool) -> None:
    """Logits of this model are far enough apart that fp32 on either device draws the same."""
    ours = texts(folder, "cuda", enforce_eager=eager)
    assert ours == texts(folder, "cpu")
    assert all(re.fullmatch("yes|no", text) for text in ours[2::4])


def test_drawing_does_not_wait_for_the_device(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    grammars = Grammars(tokenizer, VOCAB, [])
    form = StructuredOutput(regex="[a-f]+")
    states = []
    for row in range(8):
        params = SamplingParams(temperature=1.0, structured=form if row % 2 else None).resolve(seed=row)
        constraint = grammars.constraint(form, []) if row % 2 else None
        states.append(SamplingState(params, [1], VOCAB, constraint=constraint))
    logits = torch.randn(8, VOCAB, device="cuda")
    sampler = Sampler()
    sampler.draw(logits, states).result()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = sampler.draw(logits, states)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tokens = drawn.result().tokens
    assert all(chr(token) in "abcdef" for token in tokens[1::2])
