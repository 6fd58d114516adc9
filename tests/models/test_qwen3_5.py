"""Qwen3.5 dense and MoE against transformers in fp32: logits of every way to run a sequence."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.tiny import VOCAB, Bench, checkpoint, full_logits

TOLERANCE = 1e-4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def bench_of(folder: Path) -> Bench:
    spec = read_spec(folder)
    return Bench(load_model(spec, folder, device="cpu", chunk_size=64), spec)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"rope_parameters": YARN}], ids=str)
def test_logits_equal_the_oracle(tmp_path: Path, moe: bool, changes: dict) -> None:
    """Whole prompt, three ragged segments, and prefill then single tokens."""
    model = checkpoint(tmp_path, moe=moe, **changes)
    bench = bench_of(tmp_path)
    tokens = tokens_of(150)
    expected = full_logits(model, tokens)
    for cuts in ([0, 150], [0, 67, 71, 150], [0, 100, *range(101, 151)]):
        parts = []
        for begin, end in pairwise(cuts):
            parts.append(bench.run(tokens, begin, end, slot_in=2 if begin else -1, slot_out=2))
        assert (torch.cat(parts) - expected).abs().max() < TOLERANCE


def test_any_split_of_a_sequence(tmp_path: Path) -> None:
    """MT-01, MT-02: several tokens over a filled state; the pieces around the convolution's width, the
    chunk and the page."""
    model = checkpoint(tmp_path)
    bench = bench_of(tmp_path)
    tokens = tokens_of(300, seed=1)
    expected = full_logits(model, tokens)
    for piece in (2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 128, 129):
        cuts = [*range(0, 300, piece), 300]
        parts = [
            bench.run(tokens, begin, end, slot_in=2 if begin else -1, slot_out=2)
            for begin, end in pairwise(cuts)
        ]
        assert (torch.cat(parts) - expected).abs().max() < TOLERANCE, piece


def test_random_splits_of_a_sequence(tmp_path: Path) -> None:
    """MT-02: a hundred splits of one text; 2 and 3 tokens are as good as 5."""
    model = checkpoint(tmp_path)
    bench = bench_of(tmp_path)
    tokens = tokens_of(300, seed=4)
    expected = full_logits(model, tokens)
    chance = random.Random(0)
    splits = [sorted(chance.sample(range(1, 300), chance.randrange(1, 8))) for _ in range(98)]
    for inner in ([50, 55], [50, 52, 55], *splits):
        parts = [
            bench.run(tokens, begin, end, slot_in=2 if begin else -1, slot_out=2)
            for begin, end in pairwise([0, *inner, 300])
        ]
        assert (torch.cat(parts) - expected).abs().max() < TOLERANCE, inner


def test_a_span_may_read_a_slot_that_it_does_not_write(tmp_path: Path) -> None:
    """PH-05: short tails over a foreign state leave that state as it was."""
    model = checkpoint(tmp_path)
    bench = bench_of(tmp_path)
    shared = tokens_of(70, seed=2)
    bench.run(shared, 0, 70, slot_in=-1, slot_out=1)
    kept = bench.storage.save("slot", [1]).wait()
    for tail in (1, 2, 3, 4, 30):
        tokens = shared + tokens_of(tail, seed=10 + tail)
        logits = bench.run(tokens, 70, 70 + tail, slot_in=1, slot_out=3)
        assert (logits - full_logits(model, tokens)[70:]).abs().max() < TOLERANCE
        assert torch.equal(bench.storage.save("slot", [1]).wait(), kept)


def test_experts_published_one_by_one(tmp_path: Path) -> None:
    """Both forms of an MoE checkpoint hold the same model."""
    model = checkpoint(tmp_path, moe=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj")) and ".experts." in n]:
        stacked = tensors.pop(name)
        prefix, kind = name.rsplit(".", 1)
        for i, expert in enumerate(stacked):
            if kind == "down_proj":
                tensors[f"{prefix}.{i}.down_proj.weight"] = expert.clone()
            else:
                gate, up = expert.chunk(2)
                tensors[f"{prefix}.{i}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}.{i}.up_proj.weight"] = up.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = tokens_of(40)
    logits = bench_of(tmp_path).run(tokens, 0, 40, -1, 0)
    assert (logits - full_logits(model, tokens)).abs().max() < TOLERANCE


def test_vision_language_wrapper(tmp_path: Path) -> None:
    """text_config and prefixed names; the vision tower is left out."""
    model = checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in load_file(file).items()}
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, file, metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    wrapper = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    tokens = tokens_of(40)
    logits = bench_of(tmp_path).run(tokens, 0, 40, -1, 0)
    assert (logits - full_logits(model, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
def test_perplexity_equals_the_oracle(tmp_path: Path, tied: bool) -> None:
    """LD-03, LD-04: the right output matrix is used, tied or not."""
    model = checkpoint(tmp_path, tie_word_embeddings=tied)
    tokens = tokens_of(100, seed=3)
    ours = bench_of(tmp_path).run(tokens, 0, 100, -1, 0)
    theirs = full_logits(model, tokens)
    target = torch.tensor(tokens[1:])
    losses = [torch.nn.functional.cross_entropy(x[:-1], target) for x in (ours, theirs)]
    assert abs(losses[0] - losses[1]) < 1e-4
