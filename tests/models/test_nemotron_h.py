"""Nemotron-H checkpoints: both spellings of names, MTP heads left out, residuals in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.models.weights import load_model
from denim.spec.families.mamba2 import Details
from denim.spec.reader import read_spec
from tests.exactness.harness import Way, greedy, make_core, tokens_of
from tests.exactness.judge import Judge
from tests.families.nemotron_h import save, sparse
from tests.families.row import VOCAB
from tests.tiny import Bench


def test_both_spellings_load_and_mtp_heads_are_left_out(tmp_path: Path) -> None:
    published, renamed = tmp_path / "published", tmp_path / "renamed"
    reference = sparse(published)
    state = load_file(published / "model.safetensors")
    assert "backbone.layers.1.mixer.experts.0.up_proj.weight" in state
    save_file(state | {"mtp.layers.0.norm.weight": torch.ones(40)}, published / "model.safetensors")
    renamed.mkdir()
    state = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert "model.layers.1.mixer.experts.up_proj" in state
    save_file(state, renamed / "model.safetensors")

    spec = read_spec(published)
    one, other = (load_model(spec, place, device="cpu", chunk_size=64) for place in (published, renamed))
    pairs = zip(one.modules(), other.modules(), strict=True)
    tensors = [(a, b) for x, y in pairs for a, b in zip(x.parameters(), y.parameters(), strict=True)]
    assert tensors and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("wide", [False, True])
def test_residuals_in_fp32_or_the_model_s_dtype(tmp_path: Path, wide: bool) -> None:
    """A small part that a bf16 sum swallows stays in an fp32 sum."""
    save(tmp_path)
    spec = read_spec(tmp_path, dtype="bfloat16")
    assert isinstance(spec.details, Details)
    spec = replace(spec, details=replace(spec.details, fp32_residual=wide))
    model = load_model(spec, tmp_path, device="cpu", chunk_size=64)
    sums = []
    model.blocks[-1].register_forward_hook(lambda block, arguments, out: sums.append(out))
    logits = Bench(model, spec).run(list(range(20)), 0, 20, slot_in=-1, slot_out=2)
    assert logits.isfinite().all()
    assert sums[0].dtype == (torch.float32 if wide else torch.bfloat16)
    rounded = sums[0].to(torch.bfloat16).to(sums[0].dtype)
    assert torch.equal(rounded, sums[0]) != wide


def test_decode_beside_segments_of_a_prompt(tmp_path: Path) -> None:
    """CP-08, without drafts: two requests decode in all steps of a third one's prompt."""
    judge = Judge(save(tmp_path))
    cases = [greedy(tokens_of(n, 0, VOCAB), tokens) for n, tokens in ((20, 40), (33, 40), (1000, 12))]
    core = make_core(tmp_path, cases, Way(options={"max_num_batched_tokens": 128}))
    outputs = [core.requests[core.add(*case)].output for case in cases[:2]]
    core.step()
    outputs.append(core.requests[core.add(*cases[2])].output)
    while not outputs[2].outputs[0].token_ids:
        core.step()
    assert core.steps > 1000 // 128
    assert [len(output.outputs[0].token_ids) for output in outputs] == [core.steps, core.steps, 1]
    while core.has_work:
        core.step()
    for case, output in zip(cases, outputs, strict=True):
        judge.greedy(case.prompt, output.outputs[0].token_ids)
