"""`denim doctor`: true statements about the machine that runs the test."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from denim.commands.doctor import examine, rows, show_machine


def test_report_is_about_this_machine() -> None:
    report = json.loads(json.dumps(examine()))
    assert report["python"] == platform.python_version()
    assert report["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["packages"]["transformers"]
    assert 0 < report["memory"]["free"] <= report["memory"]["total"]
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["chosen_device"].startswith("cuda" if torch.cuda.is_available() else "cpu")


def test_text_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    show_machine(as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    report = examine()
    for name, number in report["packages"].items():
        assert f"{name} {number or 'missing'}" in text
    assert f"Denim runs on {report['chosen_device']}" in text
    forms = f"decode {report['decode_backend']}, prefill {report['prefill_backend']}"
    assert f"linear layers {forms}" in text
    kept = "multiplied as they are" if report["fp8_blocks"] else "dequantised on loading"
    assert f"FP8 blocks {kept}" in text


def test_text_says_what_other_libraries_take_and_could() -> None:
    long = {"peer": "flashinfer", "sequences": 2, "work": 131072}
    report = examine() | {"recurrence_peers": ["flashinfer", "fla"], "long_delta_prefill": long}
    assert dict(rows(report))["linear layers"].endswith(
        "; Gated DeltaNet's on flashinfer for 2 sequences or more from 131,072 tokens x value heads on;"
        " recurrence_backend could force flashinfer, fla"
    )


@pytest.mark.parametrize(
    ("packed", "told"), [(True, "bf16 products packed by oneDNN"), (False, "no fast bf16: prefer float32")]
)
def test_text_says_which_dtype_suits_the_cpu(packed: bool, told: str) -> None:
    assert dict(rows(examine() | {"cpu_bf16_packed": packed}))["cpu"].endswith(f"torch threads; {told}")
