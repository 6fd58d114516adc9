"""Which projections stay in FP8, and that values, scales and plain rows come where they belong.

The device's product is replaced by one in fp32 without quantised activations, so that logits must be those of
the dequantised model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from denim.layers import fp8_linear
from denim.layers.fp8_linear import BLOCK, Fp8Linear
from denim.layers.moe import SparseMoE
from denim.ledger.fp8_blocks import fp8_saving
from denim.models import fp8_kept, weights
from denim.models.fp8 import dequantise
from denim.spec.reader import read_spec
from tests.families import qwen3_next
from tests.models.test_fp8 import load, quantise
from tests.tiny import VOCAB, checkpoint, full_logits

LENGTH = 40
DIMS = {
    "hidden_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "intermediate_size": 384,
}


@pytest.fixture(autouse=True)
def exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        grid = weight_scales[:, : weight.shape[1] // BLOCK]
        return values @ dequantise(weight, grid, (BLOCK, BLOCK)).t()

    monkeypatch.setattr(fp8_linear, "quantise", lambda x: (x, torch.ones(1)))
    monkeypatch.setattr(fp8_linear, "product", product)
    monkeypatch.setattr(fp8_kept, "multiplies_blocks", lambda device, dtype: True)


def published(name: str) -> bool:
    """As Qwen's checkpoints choose: all projections but those of gates."""
    return not name.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"))


QKV = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
LINEAR, ATTENTION, FFN = (
    ("mixer.in_proj", "mixer.out"),
    ("mixer.qkv", "mixer.out"),
    ("ffn.gate_up", "ffn.down"),
)
SHARED = ("ffn.shared.gate_up", "ffn.shared.down")


@pytest.mark.parametrize(
    ("changes", "chosen", "linear", "attention"),
    [
        ({}, published, LINEAR + FFN, ATTENTION + FFN),
        ({}, lambda n: True, LINEAR[1:] + FFN, ATTENTION + FFN),  # gates' rows make no block
        ({}, lambda n: "k_proj" not in n and published(n), LINEAR + FFN, ATTENTION[1:] + FFN),
        ({}, lambda n: "v_proj" not in n and published(n), LINEAR + FFN, ATTENTION + FFN),
        ({"intermediate_size": 192}, published, LINEAR, ATTENTION),
        (
            {"linear_key_head_dim": 32, "linear_num_key_heads": 1},
            published,
            LINEAR[1:] + FFN,
            ATTENTION + FFN,
        ),
    ],
    ids=["published", "gates too", "no key", "no value", "networks of 192", "qkv of 1088 rows"],
)
def test_what_stays(
    tmp_path: Path,
    changes: dict[str, Any],
    chosen: Callable[[str], bool],
    linear: tuple[str, ...],
    attention: tuple[str, ...],
) -> None:
    model = checkpoint(tmp_path, **DIMS | changes)
    quantise(tmp_path, model, chosen, (BLOCK, BLOCK))
    bench = load(tmp_path)
    for block, expected in zip(bench.model.blocks, [linear, linear, linear, attention], strict=True):
        kept = {name for name, module in block.named_modules() if isinstance(module, Fp8Linear)}
        assert kept == set(expected)
    check_logits(bench, model)


def check_logits(bench: Any, oracle: torch.nn.Module) -> None:
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = full_logits(oracle, tokens)
    assert (bench.run(tokens, 0, LENGTH, -1, 0) - expected).abs().max() < 3e-4 * expected.std()


@pytest.mark.parametrize("key_dim", [128, 64])
def test_projections_grouped_by_key_head(tmp_path: Path, key_dim: int) -> None:
    """With key heads of 64 the published order puts two of them into a block, which is torn apart."""
    dims = DIMS | {"linear_key_head_dim": key_dim, "shared_expert_intermediate_size": 128}
    model = qwen3_next.save(tmp_path, **dims)
    quantise(tmp_path, model, published, (BLOCK, BLOCK))
    bench = load(tmp_path)
    mixer, sparse = bench.model.blocks[0].mixer, bench.model.blocks[0].ffn
    assert mixer.in_proj.quantised == (2 * 2 * 128 + 2 * 4 * 256 if key_dim == 128 else 0)
    assert isinstance(sparse.shared.gate_up, Fp8Linear)
    check_logits(bench, model)


def test_the_log_says_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = checkpoint(tmp_path, **DIMS)
    names = quantise(tmp_path, model, lambda n: "k_proj" not in n and published(n), (BLOCK, BLOCK))
    with caplog.at_level(logging.INFO, "denim"):
        load(tmp_path)
    assert f"{len(names) - 2} tensors are multiplied as they are, 2 are dequantised to float32" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("dims", [DIMS, DIMS | {"intermediate_size": 192, "num_key_value_heads": 3}])
def test_the_ledger_counts_what_stays(tmp_path: Path, family: str, dims: dict[str, Any]) -> None:
    if family == "qwen3_next":
        model = qwen3_next.save(tmp_path, **dims | {"shared_expert_intermediate_size": 128})
    elif family == "qwen3_5":
        model = checkpoint(tmp_path, **dims)
    else:
        model = checkpoint(tmp_path, moe=True, **dims | EXPERTS)
    quantise(tmp_path, model, published, (BLOCK, BLOCK))
    spec = read_spec(tmp_path, dtype="bfloat16")
    loaded = weights.load_model(spec, tmp_path, device="cpu", chunk_size=64)
    kept = [module for module in loaded.modules() if isinstance(module, Fp8Linear)]
    saved = sum(module.values.numel() - module.scales.nbytes for module in kept)
    for module in loaded.modules():
        if isinstance(module, SparseMoE) and module.up_scales is not None:
            grids = module.up_scales.nbytes + module.down_scales.nbytes
            saved += module.up.numel() + module.down.numel() - grids
    assert kept and saved == fp8_saving(loaded.spec)


EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 5}


@pytest.mark.parametrize("form", ["one by one", "fused", "one is not in FP8"])
def test_experts(tmp_path: Path, form: str) -> None:
    oracle = checkpoint(tmp_path, moe=True, **DIMS | EXPERTS)
    other = "layers.2.mlp.experts.3.up_proj" if form == "one is not in FP8" else "none"
    quantise(tmp_path, oracle, lambda n: published(n) and other not in n, (BLOCK, BLOCK))
    if form == "fused":
        fuse_experts(tmp_path / "model.safetensors")
    bench = load(tmp_path)
    held = [block.ffn.up.dtype == torch.float8_e4m3fn for block in bench.model.blocks]
    assert held == [True, True, form != "one is not in FP8", True]
    check_logits(bench, oracle)


def fuse_experts(file: Path) -> None:
    """All experts of a layer in one tensor a projection, the other published form."""
    tensors = load_file(file)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        for suffix in ("", "_scale_inv"):
            parts = {
                projection: [tensors.pop(f"{prefix}{i}.{projection}_proj.weight{suffix}") for i in range(5)]
                for projection in ("gate", "up", "down")
            }
            pairs = zip(parts["gate"], parts["up"], strict=True)
            tensors[f"{prefix}gate_up_proj{suffix}"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{prefix}down_proj{suffix}"] = torch.stack(parts["down"])
    save_file(tensors, file, metadata={"format": "pt"})


def test_other_blocks_are_dequantised(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, **DIMS)
    quantise(tmp_path, model, published, (128, 64))
    bench = load(tmp_path)
    assert not any(isinstance(module, Fp8Linear) for module in bench.model.modules())
    check_logits(bench, model)
