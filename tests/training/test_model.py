"""The module that is trained is transformers' Qwen3.5, trunk and MTP head alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import denim
from training.release import load, save

FOLDER = Path(denim.__file__).parent / "weights" / "denim-tiny"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    return load(FOLDER).eval()


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3_5ForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True
    )


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(5, 6144, (2, 150), generator=torch.Generator().manual_seed(0))


def test_transformers_finds_every_weight(reference) -> None:
    _, info = reference
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@torch.no_grad()
def test_logits_are_those_of_transformers(model, reference, ids) -> None:
    hidden, _ = model.hidden(ids)
    expected = reference[0](ids, use_cache=False).logits
    assert (model.logits(hidden) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_drafts_are_those_of_transformers(model, reference, ids) -> None:
    from transformers.modeling_layers import MtpModel

    main = reference[0]
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    head = MtpModel.from_pretrained(main)
    hidden, _ = model.hidden(ids)
    places = torch.arange(1, ids.shape[1])[None].expand(2, -1)
    expected = head.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
    assert (model.drafts(hidden[:, :-1], ids[:, 1:]) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_two_parts_are_the_whole(model, ids) -> None:
    whole, _ = model.hidden(ids)
    first, windows = model.hidden(ids[:, :77])
    second, _ = model.hidden(ids[:, 77:], windows)
    assert (torch.cat((first, second), 1) - whole).abs().max() < TOLERANCE * whole.std()


def test_what_is_saved_is_loaded(model, tmp_path) -> None:
    save(model, tmp_path)
    again = load(tmp_path).state_dict()
    assert all(torch.equal(p, again[name]) for name, p in model.state_dict().items())
    assert (tmp_path / "model.safetensors").stat().st_size < 20e6


def test_the_recurrences_gradient_reaches_every_weight(ids) -> None:
    model = load(FOLDER)
    hidden, _ = model.hidden(ids[:, :70])
    (
        model.logits(hidden).square().mean() + model.drafts(hidden[:, :-1], ids[:, 1:70]).square().mean()
    ).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
