"""The studies on a CUDA device: captured tokens and captured steps give what the CPU gives."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from denim.commands.study.chunk_size import study_chunk_size
from denim.commands.study.drift import drift
from denim.commands.study.inputs import random_inputs, texts_of
from denim.commands.study.perplexity import score
from denim.commands.study.precision import study_precision
from denim.commands.study.storage import STORAGES
from denim.engine import LLM

pytestmark = pytest.mark.gpu


def test_drift_is_that_of_the_cpu() -> None:
    there, here = (drift(random_inputs(512, device=device), STORAGES) for device in ("cuda", "cpu"))
    assert there["points"] == here["points"]
    for name, curve in there["storages"].items():
        for what in ("state", "output"):
            if name == "fp32":
                assert 0 < max(curve[what]) < 1e-5
            else:  # other sums, other neighbours: alike on average
                wanted = here["storages"][name][what][-20:]
                assert sum(curve[what][-20:]) == pytest.approx(sum(wanted), rel=0.1), (name, what)


def test_scores_are_those_of_the_cpu() -> None:
    llm = LLM(device="cpu", memory="16MiB", max_num_seqs=2, checkpoint_policy="none")
    texts = texts_of(llm, None, 72, 2)
    fp32, bf16, *_ = STORAGES
    there, here = (score(texts, device, (fp32, bf16)) for device in ("cuda", "cpu"))
    assert (there[0] - here[0]).abs().max() < 1e-3
    assert (there[1] - here[1]).abs().mean() < 1e-2


def test_both_commands_run(tmp_path: Path) -> None:
    study_chunk_size(2, 64, 256, 1, "cuda", tmp_path, as_json=True)
    study_precision(256, 96, 2, None, "cuda", tmp_path, as_json=True)
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results["study-chunk-size"]["device"] == results["study-precision"]["device"]
    assert results["study-precision"]["device"] == torch.cuda.get_device_name()


def test_a_long_walk_is_a_matter_of_seconds() -> None:
    """65,536 tokens launched kernel by kernel would take a minute."""
    inputs = random_inputs(65_536, device="cuda")
    begin = time.perf_counter()
    drift(inputs, STORAGES)
    assert time.perf_counter() - begin < 20
