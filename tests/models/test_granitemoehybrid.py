"""Granite-4 checkpoints: the published names, and those that transformers holds in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from denim.models.families.granitemoehybrid import PUBLISHED
from denim.models.tensor_files import find_tensors
from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families.granitemoehybrid import save


def test_both_spellings_load(tmp_path: Path) -> None:
    published, renamed = tmp_path / "published", tmp_path / "renamed"
    reference = save(published)
    assert any(name.endswith("block_sparse_moe.router.layer.weight") for name in find_tensors(published))
    renamed.mkdir()
    state = {
        name: tensor.contiguous() for name, tensor in reference.state_dict().items() if "lm_head" not in name
    }
    assert all(any(name.endswith(ending) for name in state) for ending in PUBLISHED)
    save_file(state, renamed / "model.safetensors")

    spec = read_spec(published)
    one, other = (load_model(spec, place, device="cpu", chunk_size=64) for place in (published, renamed))
    targets = other.targets()
    assert all(torch.equal(tensor, targets[name]) for name, tensor in one.targets().items())
