"""Mamba's own: names of early checkpoints, sums in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families.mamba import save
from tests.tiny import Bench


def test_the_embedding_s_early_name(tmp_path: Path) -> None:
    save(tmp_path)
    spec = read_spec(tmp_path)
    expected = load_model(spec, tmp_path, device="cpu", chunk_size=64).embedding
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, file)
    assert torch.equal(load_model(spec, tmp_path, device="cpu", chunk_size=64).embedding, expected)


def test_half_precision_adds_up_in_fp32(tmp_path: Path) -> None:
    save(tmp_path)
    spec = read_spec(tmp_path, dtype="bfloat16")
    model = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    logits = Bench(model, spec).run(list(range(20)), 0, 20, slot_in=-1, slot_out=1)
    assert seen == [torch.float32]
    exact = read_spec(tmp_path)
    bench = Bench(load_model(exact, tmp_path, device="cpu", chunk_size=64), exact)
    expected = bench.run(list(range(20)), 0, 20, slot_in=-1, slot_out=1)
    assert (logits - expected).abs().max() < 0.1 * expected.std()
