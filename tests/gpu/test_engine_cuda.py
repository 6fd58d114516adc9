"""The engine on a CUDA device: in fp32 the tokens of the CPU, in bf16 those of fp32 up to near ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from denim import LLM, SamplingParams
from tests.tiny import VOCAB, checkpoint

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 130, 300)
EXPERTS = "moe"
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def run(folder: Path, device: str, **options: object) -> list:
    llm = LLM(folder, device=device, debug=True, **options)
    outputs = [output.outputs[0] for output in llm.generate(prompts(), GREEDY)]
    llm.check()
    stats = llm.stats()
    assert stats["slots"]["used"] == stats["pages"]["used"] == 0
    return [outputs, stats]


def assert_same(ours: list, reference: list, gap: float) -> None:
    """Token by token, up to the first place where the reference's two best are closer than `gap` nats."""
    for mine, theirs in zip(ours, reference, strict=True):
        for place, (a, b) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            if a == b:
                continue
            best = sorted((entry.logprob for entry in theirs.logprobs[place].values()), reverse=True)
            assert best[0] - best[1] < gap, f"position {place}: {a} against {b}"
            break


def distance(ours: list, reference: list) -> float:
    """Mean difference of log-probabilities of drawn tokens, in nats, as far as they are the same."""
    gaps = []
    for mine, theirs in zip(ours, reference, strict=True):
        for place, (a, b) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            if a != b:
                break
            gaps.append(abs(mine.logprobs[place][a].logprob - theirs.logprobs[place][a].logprob))
    assert len(gaps) > 100, "hardly a token is the same"
    return sum(gaps) / len(gaps)


@pytest.fixture(scope="module", params=["dense", EXPERTS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    checkpoint(path, moe=request.param == EXPERTS)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> list:
    return run(folder, "cpu", memory="64MiB")[0]


@pytest.mark.parametrize("records", [2, 5])
def test_deferred_writes_change_nothing(folder: Path, reference: list, records: int) -> None:
    """Eagerly beside prefill, and from captured graphs."""
    ours, _ = run(folder, "cuda", memory="64MiB", max_num_batched_tokens=64, deferred_writes=records)
    assert_same(ours, reference, gap=1e-3)


@pytest.mark.parametrize("batched", [1, 7, 64, 2048])
def test_fp32_tokens_equal_the_cpu(folder: Path, reference: list, batched: int) -> None:
    ours, _ = run(folder, "cuda", memory="64MiB", max_num_batched_tokens=batched)
    assert_same(ours, reference, gap=1e-3)


@pytest.mark.parametrize("swap_space", [0, "64MiB"], ids=["recompute", "swap"])
def test_preempted(folder: Path, reference: list, swap_space: int | str) -> None:
    ours, stats = run(folder, "cuda", memory="600KiB", swap_space=swap_space)
    assert stats["preempted_swap"] + stats["preempted_recompute"] > 0
    assert_same(ours, reference, gap=1e-3)


def test_bf16_differs_at_near_ties_only(folder: Path, reference: list) -> None:
    alone = run(folder, "cuda", dtype="bfloat16", memory="64MiB", max_num_seqs=1)[0]
    together = run(folder, "cuda", dtype="bfloat16", memory="64MiB", max_num_batched_tokens=100)[0]
    for ours in (alone, together):
        assert_same(ours, reference, gap=0.25)  # random weights magnify rounding: 0.23 nats seen, of experts
    if EXPERTS not in folder.name:  # near ties between experts make steps: two batches were 0.4 nats apart
        assert_same(together, alone, gap=0.2)
    assert distance(together, alone) < 0.06  # 0.036 seen, of experts


def test_sampled_tokens_do_not_depend_on_the_device(folder: Path) -> None:
    """Draws come from the host's counters; only rounding of logits differs."""
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(folder, device=device, memory="64MiB")
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts(), params)])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(LENGTHS) - 1
