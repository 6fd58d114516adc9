"""Qwen3-Next: the order of the fused rows, and the MTP head."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from denim.models.families.qwen3_next import published_rows
from denim.models.weights import load_model
from denim.spec.linear import GatedDeltaNet
from denim.spec.reader import read_spec
from tests.families.qwen3_next import save


def test_rows_by_hand() -> None:
    """2 key heads of 2 dims, 4 value heads of 1 dim: [q q k k v v z z | q q k k v v z z | b b a a | ...]."""
    spec = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_dim=2, value_dim=1, conv_width=4)
    q, k, v, z = [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]
    b, a = [16, 17, 20, 21], [18, 19, 22, 23]
    assert published_rows(spec).tolist() == q + k + v + z + b + a


def test_mtp_head_is_loaded_and_kept(tmp_path: Path) -> None:
    """The config does not count it; experts come one by one there too."""
    save(tmp_path)
    spec = read_spec(tmp_path)
    assert len(spec.mtp_layers) == 1
    empty = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    assert empty.mtp is None
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    last = "model.layers.3."
    head = {n.replace(last, "mtp.layers.0."): torch.randn_like(t) for n, t in tensors.items() if last in n}
    head["mtp.fc.weight"] = torch.randn(48, 96)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = torch.randn(48)
    save_file(tensors | head, file, metadata={"format": "pt"})
    model = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    targets = model.targets(tensors | head)
    for name, tensor in head.items():
        assert torch.equal(targets[name], tensor), name
