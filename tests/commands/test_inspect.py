"""`denim inspect`: sizes as the other parts have them, and headers only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from denim.commands.configs import find_config
from denim.commands.inspect import describe, show_model
from denim.errors import ConfigError
from denim.ledger import ledger_of
from denim.spec import read_spec
from denim.spec.published import FOLDER as CONFIGS
from tests.spec.configs import qwen3_5_0_8b, qwen3_5_35b_a3b_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "Qwen3.5-0.8B"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(qwen3_5_0_8b()))
    (place / "generation_config.json").write_text(json.dumps({"top_k": 20, "eos_token_id": [248046, 248044]}))
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(5, np.float32)}, place / "1.safetensors")
    save_file({"c": np.zeros((2, 2), np.float16)}, place / "2.safetensors")
    return place


def test_report(folder: Path) -> None:
    report = describe(find_config(folder))
    ledger = ledger_of(read_spec(folder))
    assert report["layers"] == "LLLF" * 6
    assert report["entries"]["page"]["bytes"] == 16 * ledger.kv_bytes_per_token == 192 * 1024
    assert report["entries"]["slot"]["bytes"] == ledger.bytes_per_request
    assert report["slab_bytes"] == 100 * report["entries"]["page"]["bytes"]
    assert {key: report["files"][key] for key in ("count", "tensors")} == {"count": 2, "tensors": 3}
    assert report["files"]["elements"] == {"F16": 16, "F32": 5}
    assert not report["tokenizer"]
    assert json.loads(json.dumps(report))["generation"]["end_token_ids"] == [248046, 248044]


def test_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_model(folder, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "layers LLLF × 6 = 24" in text
    assert "FullAttention: num heads 8, num kv heads 2, head dim 256, rotary dim 64, gated, qk norm" in text
    assert "a slab 18.8 MiB = 100 pages or 1 slot" in text
    assert "end tokens 248046, 248044" in text
    assert "sampling top k 20" in text


@pytest.mark.parametrize(
    ("promised", "name", "text"),
    [
        (1, "mtp.fc.weight", "there: layers 1, tensors 1"),
        (1, "a", "expected, not in the files"),
        (0, "mtp.fc.weight", "in the files, not in the config: it is left out"),
        (0, "a", "none"),
    ],
)
def test_mtp_head_found_or_not(
    promised: int, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = qwen3_5_35b_a3b_text() | {"mtp_num_hidden_layers": promised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(3, np.float16)}, tmp_path / "model.safetensors")
    show_model(tmp_path, as_json=False)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("MTP head"))
    assert " ".join(line.split()) == f"MTP head {text}"


def test_a_config_alone_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_5_35b_a3b_text()))
    show_model(tmp_path / "config.json", as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "MoEFFN: num experts 256, top k 8" in text
    assert "files no *.safetensors" in text


def test_a_published_model_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B"):
        show_model(Path(name), as_json=False)
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith("model Qwen3.5-0.8B (qwen3_5) layers LLLF × 6 = 24")
        assert text.endswith("files none: a published model's config alone comes with Denim")
    show_model(Path("Qwen3.5-0.8B"), as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert (values["files"], values["tokenizer"]) == (None, None)
    with pytest.raises(ConfigError, match="such as Qwen3"):
        show_model(Path("Qwen3.5-1B"), as_json=False)


def test_fp8_blocks_that_hopper_takes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "qwen3_5_27b_fp8.json"
    show_model(config, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "as they are on Hopper (27.9 GiB of weights there), dequantised elsewhere" in text


def test_fp8_blocks_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    config = qwen3_5_35b_a3b_text() | {"quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_torch({"a": torch.ones(3, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    show_model(tmp_path, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "states float32; files: FP8 weights in blocks of 128 × 64, dequantised on loading" in text
    assert "1 tensors (12 in F8_E4M3)" in text


def test_truncated_weights_are_named(folder: Path) -> None:
    place = folder / "2.safetensors"
    place.write_bytes(place.read_bytes()[:20])
    with pytest.raises(ConfigError, match=r"2\.safetensors cannot be read as safetensors"):
        describe(find_config(folder))


def test_reads_no_weight_and_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from denim.cli import app\n"
        "app(['inspect', sys.argv[1], '--json'], standalone_mode=False)\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["family"] == "qwen3_5"
