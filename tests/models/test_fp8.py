"""FP8 block-quantised checkpoints: read, dequantised, and refused where something does not fit (LD-08)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from denim.errors import ConfigError
from denim.models.fp8 import dequantise
from denim.models.weights import load_model
from denim.spec.reader import read_spec
from tests.families import qwen3_next
from tests.tiny import VOCAB, Bench, checkpoint, full_logits

BLOCK = (16, 10)  # does not divide the small model's matrices: the last blocks are cut off
LARGEST = 448.0  # of float8_e4m3fn
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def quantised(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, scales, and what they stand for, block by block."""
    rows, columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[at].abs().max() / LARGEST
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = values[at].float() * scales[i, j]
    return values, scales, meant


def quantise(
    folder: Path, model: nn.Module, chosen: Callable[[str], bool], block: tuple[int, int] = BLOCK
) -> list[str]:
    """Quantise the chosen projections in the files, and set them in the oracle `model` to what is meant."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = [n for n, t in tensors.items() if t.ndim == 2 and "proj" in n and chosen(n)]
    for name in names:
        tensors[name], tensors[f"{name}_scale_inv"], meant = quantised(tensors[name], block)
        place_of(name, model).copy_(meant)
    save_file(tensors, file, metadata={"format": "pt"})
    say(folder, QUANTISATION | {"weight_block_size": list(block)})
    return names


def place_of(name: str, model: nn.Module) -> Tensor:
    """A published tensor's memory in transformers' model, which stacks the experts of a layer."""
    parameters = dict(model.named_parameters())
    if name in parameters:
        return parameters[name].data
    prefix, expert, projection, _ = name.rsplit(".", 3)
    if projection == "down_proj":
        return parameters[f"{prefix}.down_proj"].data[int(expert)]
    return parameters[f"{prefix}.gate_up_proj"].data[int(expert)].chunk(2)[projection == "up_proj"]


def say(folder: Path, quantisation: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))


def load(folder: Path) -> Bench:
    spec = read_spec(folder)
    return Bench(load_model(spec, folder, device="cpu", chunk_size=64), spec)


CHOICES = {
    "all": lambda name: True,
    "linear layers": lambda name: "linear_attn" in name,
    "all but linear layers": lambda name: "linear_attn" not in name,
    "qkv alone": lambda name: "in_proj_qkv" in name,
    "some layers": lambda name: ".1." in name or ".3." in name,
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("save", [checkpoint, qwen3_next.save], ids=["qwen3_5", "qwen3_next"])
def test_logits_of_the_dequantised_model(
    tmp_path: Path, save: Callable[[Path], nn.Module], choice: str
) -> None:
    model = save(tmp_path)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    before = full_logits(model, tokens)
    assert quantise(tmp_path, model, CHOICES[choice])
    expected = full_logits(model, tokens)
    spread = expected.std()
    assert (before - expected).abs().max() > 1e-2 * spread, "quantisation must be seen in the logits"
    assert (load(tmp_path).run(tokens, 0, 40, -1, 0) - expected).abs().max() < 3e-4 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_either_dtype(dtype: torch.dtype) -> None:
    """Published checkpoints hold them in bf16 or fp32; stacks of experts have a block grid each."""
    scale = torch.tensor([[[1.0, 2.0], [4.0, 8.0]], [[0.5, 1.0], [1.0, 1.0]]], dtype=dtype)
    weight = torch.ones(2, 3, 3).to(torch.float8_e4m3fn)
    expected = torch.tensor([[1.0, 1, 2], [1, 1, 2], [4, 4, 8]])
    out = dequantise(weight, scale, (2, 2))
    assert out.dtype == torch.float32
    assert torch.equal(out[0], expected)
    assert torch.equal(out[1], torch.tensor([[0.5, 0.5, 1], [0.5, 0.5, 1], [1, 1, 1]]))


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), "down_proj.* has no scale"),
        (lambda t: t.update({NAME: t[NAME].float()}), "down_proj.* is torch.float32 and has a scale"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": torch.ones(1, 1)}),
            r"scale_inv' has shape \[1, 1\], expected \[3, 8\] for blocks of \[16, 10\]",
        ),
        (lambda t: t.update({"model.x.weight_scale_inv": torch.ones(1)}), "no weights belong .*'model.x"),
        (lambda t: t.update({NAME: t[NAME].float().to(torch.float8_e5m2)}), "float8_e5m2, quantised"),
    ],
    ids=["no scale", "no weight", "shape", "stray", "e5m2"],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    quantise(tmp_path, checkpoint(tmp_path), CHOICES["all"])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_config_that_does_not_mention_it(tmp_path: Path) -> None:
    quantise(tmp_path, checkpoint(tmp_path), CHOICES["all"])
    say(tmp_path, None)
    with pytest.raises(ConfigError, match="scale_inv"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "supported: FP8 weights in blocks"),
        ("fp8", "supported: FP8 weights in blocks"),
        (QUANTISATION | {"weight_block_size": None}, "'weight_block_size' is missing"),
        (QUANTISATION | {"weight_block_size": [128]}, r"'weight_block_size' is \[128\]"),
        (
            QUANTISATION | {"activation_scheme": "static"},
            "'activation_scheme' is 'static'; supported: 'dynamic'",
        ),
        (QUANTISATION | {"fmt": "e5m2"}, "'fmt' is 'e5m2'"),
        (QUANTISATION | {"scale_fmt": "ue8m0"}, "'scale_fmt' is 'ue8m0'"),
        (QUANTISATION | {"expert_dtype": "fp4"}, "unknown key 'expert_dtype'"),
    ],
    ids=str,
)
def test_other_formats_are_refused(tmp_path: Path, values: object, message: str) -> None:
    checkpoint(tmp_path)
    say(tmp_path, values)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


def test_vision_language_wrapper(tmp_path: Path) -> None:
    """`quantization_config` stands outside text_config, names have the wrapper's prefix."""
    model = checkpoint(tmp_path)
    tokens = list(range(30))
    quantise(tmp_path, model, CHOICES["all"])
    file = tmp_path / "model.safetensors"
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    quantisation = text.pop("quantization_config")
    wrapper = {"model_type": "qwen3_5", "text_config": text, "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    expected = full_logits(model, tokens)
    assert (load(tmp_path).run(tokens, 0, 30, -1, 0) - expected).abs().max() < 3e-4 * expected.std()
