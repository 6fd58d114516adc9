"""`denim study chunk-size`: the facts in its rows, and its files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from denim.commands.study import chunk_forms
from denim.commands.study.chunk_size import CHUNKS, NAME, _quartiles, measure, study_chunk_size
from denim.errors import ConfigError


def test_flops_grow_and_serial_steps_fall_with_the_chunk() -> None:
    rows = measure(2, 16, 300, 4, torch.device("cpu"), CHUNKS)["rows"]
    assert [row["chunk"] for row in rows] == list(CHUNKS)
    assert [row["serial_steps"] for row in rows] == [19, 10, 5, 3, 2]
    assert all(a["flops"] < b["flops"] for a, b in pairwise(rows))
    assert len({row["flops_with_state"] for row in rows}) == 1
    for row in rows:
        # The formula of the mixer: 2 C (3 d_k + 2 d_v) a token and head inside a chunk.
        assert row["flops_inside_chunks"] == 300 * 2 * 2 * row["chunk"] * 5 * 16
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high


def test_kernels_take_the_chunks_they_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_forms, "rule_backend", lambda device_type: chunk_forms.TRITON)
    forms = chunk_forms.forms_on(torch.device("cpu"), 2, 16, 40, CHUNKS)
    assert list(forms["torch, float32"]) == list(CHUNKS)
    assert list(forms["triton, bfloat16"]) == [16, 32, 64]


def test_a_stalled_round_moves_no_quartile() -> None:
    assert _quartiles([5.0, 1.0, 2.0, 900.0, 3.0]) == (2.0, 5.0)
    assert _quartiles([1.0]) == (1.0, 1.0)


def test_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    study_chunk_size(2, 16, 256, 2, "cpu", out, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / f"{NAME}.json").read_text())
    assert list(printed["fastest_chunk"]) == ["torch, float32"]
    assert printed["fastest_chunk"]["torch, float32"] in CHUNKS
    assert (out / f"{NAME}.png").read_bytes().startswith(b"\x89PNG")


def test_table_has_a_row_for_each_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_chunk_size(1, 16, 256, 1, "cpu", tmp_path, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines if line.split()[:1] and line.split()[0].isdecimal()] == [
        *CHUNKS
    ]


@pytest.mark.parametrize("name", ["heads", "dim", "tokens", "rounds"])
def test_numbers_below_one_are_refused(name: str, tmp_path: Path) -> None:
    values = {"heads": 1, "dim": 1, "tokens": 1, "rounds": 1} | {name: 0}
    with pytest.raises(ConfigError, match=f"--{name} is 0"):
        study_chunk_size(**values, device="cpu", out=tmp_path, as_json=True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(ConfigError, match="--out"):
        study_chunk_size(1, 1, 1, 1, "cpu", place, as_json=True)
