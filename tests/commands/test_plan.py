"""`denim plan`: fast, without torch, and what it prints is the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from denim.commands.plan import read_workloads, show_plan
from denim.errors import CapacityError, ConfigError
from denim.spec.published import FOLDER as CONFIGS
from tests.spec.configs import qwen3_5_0_8b

# What does not fit one H200 is shared by so many.
DEVICES = {
    "Qwen3.5-0.8B": 1,
    "Qwen3-Next-80B-A3B": 2,
    "Kimi-Linear-48B-A3B": 1,
    "Nemotron-H-8B": 1,
    "Jamba-1.5-mini": 1,
    "MiniMax-Text-01": 8,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "Qwen3.5-0.8B"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(qwen3_5_0_8b()))
    return place


def plan(model: Path, **options: Any) -> None:
    defaults: dict[str, Any] = {
        "device": "H200",
        "memory": None,
        "lengths": None,
        "lognormal": None,
        "trace": None,
        "tensor_parallel": 1,
        "drafts": 0,
        "host_memory": None,
        "checkpoint_dtype": "auto",
        "dtype": "auto",
        "state_dtype": "auto",
        "kv_dtype": "auto",
        "compare": False,
        "as_json": False,
    }
    show_plan(model, **(defaults | options))


def test_host_memory_and_the_form_of_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation there is its state, whole blocks of it, and its pages; int8 is a quarter of a state."""
    counts = {}
    for dtype in ("auto", "bfloat16", "int8"):
        options = {"host_memory": "64GiB", "checkpoint_dtype": dtype, "lengths": "4096"}
        plan(folder, as_json=True, **options)
        values = json.loads(capsys.readouterr().out)
        assert values["host_bytes"] == 64 << 30 and values["checkpoint_dtype"] == dtype
        counts[dtype] = values["workloads"][0]["conversations_on_host"]
        blocks = 256 + -(-values["stored_slot_bytes"] // values["page_bytes"])
        assert counts[dtype] == (64 << 30) // (blocks * values["page_bytes"])
        plan(folder, **options)
        shown = " ".join(capsys.readouterr().out.split())
        assert f" {counts[dtype]:,} " in shown
        assert ("states in int8" in shown) == (dtype == "int8")
    assert counts["auto"] < counts["bfloat16"] < counts["int8"]
    with pytest.raises(ConfigError, match="--checkpoint-dtype is 'int4'; supported: auto, bfloat16, int8"):
        plan(folder, checkpoint_dtype="int4")
    with pytest.raises(ConfigError, match="--host-memory='lots': give bytes"):
        plan(folder, host_memory="lots")


def test_answers_without_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from denim.cli import app\n"
        "app(['plan', sys.argv[1], '--compare'], standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DEVICES)
def test_published_models_and_the_fewest_devices_that_hold_them(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(Path(name.lower()), tensor_parallel=None, compare=True)
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ")
    assert (f"{DEVICES[name]} are the fewest that hold it" in text) == (DEVICES[name] > 1)


def test_devices_that_somebody_chose_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({"tensor_parallel": 1}, {"device": "RTX4090", "tensor_parallel": None}):
        with pytest.raises(CapacityError, match="has no room for states and KV beside 850 GiB of weights"):
            plan(Path("MiniMax-Text-01"), **options)
    with pytest.raises(CapacityError, match="too little for one request"):  # more devices are no answer
        plan(Path("MiniMax-Text-01"), memory="1MiB", tensor_parallel=None)
    with pytest.raises(ConfigError, match="--tensor-parallel is 3, which does not divide"):
        plan(Path("MiniMax-Text-01"), tensor_parallel=3)
    plan(Path("MiniMax-Text-01"), tensor_parallel=16, as_json=True)
    assert json.loads(capsys.readouterr().out)["devices"] == 16
    plan(Path("MiniMax-Text-01"), tensor_parallel=16)
    text = capsys.readouterr().out
    assert "on each of 16" in text and "fewest" not in text


def test_what_a_person_reads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    plan(folder, lengths="100", memory="60GiB", drafts=3, compare=True)
    text = " ".join(capsys.readouterr().out.split())
    assert "Qwen3.5-0.8B: LLLF × 6 layers" in text
    assert "a request 18.6 MiB: 18 MiB of state, 648 KiB of convolution" in text
    assert "checkpoint as much as the KV of 1,590 tokens" in text
    assert "crossover 530 tokens" in text
    assert "3 drafts 1.42 MiB of records a request and 2 KiB of KV a token" in text
    assert "a state for each would be 55.9 MiB" in text
    assert "vLLM 0.33.0" in text
    assert "blocks of 576 tokens, state blocks: 12 (4 a group) 102 MiB" in text
    assert "states : KV = 0.9 : 1, 5 slots a request and 3 for drafts" in text
    assert "*" not in text


@pytest.mark.parametrize(
    ("device", "weights"), [("H200", "FP8 blocks and bfloat16"), ("CPU", "bfloat16")], ids=["H200", "CPU"]
)
def test_fp8_blocks_where_the_device_takes_them(
    capsys: pytest.CaptureFixture[str], device: str, weights: str
) -> None:
    plan(CONFIGS / "qwen3_5_27b_fp8.json", device=device)
    text = " ".join(capsys.readouterr().out.split())
    assert f"weights in {weights}, KV in bfloat16" in text
    assert ("27.9 GiB of weights" in text) == (device == "H200")


def test_a_family_that_a_peer_does_not_serve_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    plan(CONFIGS / "jamba-v0.1.json", compare=True)
    text = capsys.readouterr().out
    assert "* SGLang 0.5.23 has no model of this family" in text
    assert "* vLLM" not in text


@pytest.mark.parametrize(
    ("name", "absent", "rules"),
    [
        ("mamba2-2.7b-hf", "of KV", ("state blocks: 1", "one pool, 4 slots a request")),
        ("granite-4.0-micro", "a request ", ("blocks of 16 tokens", "one pool", "pages of 16 tokens")),
    ],
)
def test_one_kind_of_memory_alone(
    name: str, absent: str, rules: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan(CONFIGS / f"{name}.json", compare=True, drafts=2, lengths="100")
    text = capsys.readouterr().out
    assert absent not in text.partition("requests of")[0]
    for rule in rules:
        assert rule in text


def test_json_has_what_is_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, lengths="100,4096", memory="60GiB", as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert (values["kv_bytes_per_token"], values["bytes_per_request"]) == (12288, 19537920)
    assert (values["crossover_tokens"], values["checkpoint_equals_kv_of_tokens"]) == (530, 1590)
    assert values["device"]["sources"]
    short, long = values["workloads"]
    assert short["requests"] > long["requests"]
    for row in (short, long):
        assert row["slots"] == row["requests"]
        assert row["state_bytes"] + row["kv_bytes"] + row["rest_bytes"] == values["arena_bytes"]
        assert [floor["tokens"] for floor in row["decode"]] == [1, 32, 256, row["requests"]]
        assert "peers" not in row


def test_a_trace_and_a_distribution(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "day.jsonl"
    rows = [{"input_length": 90, "output_length": 10}, {"input_length": 10**7, "output_length": 1}]
    trace.write_text("\n".join(map(json.dumps, rows)))
    plan(folder, trace=trace)
    assert "day.jsonl: 1 of 2 lengths left out: above 262,144 tokens" in capsys.readouterr().out
    plan(folder, lognormal="350,1.1", as_json=True)
    row = json.loads(capsys.readouterr().out)["workloads"][0]
    assert row["mean_tokens"] == pytest.approx(350, rel=1e-3)


def test_shares_of_a_distribution_are_no_requests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, lognormal="1000,1000")
    assert "1 of 1,000 lengths left out: above 262,144 tokens" in capsys.readouterr().out


def test_memory_as_bytes_and_as_a_fraction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arenas = {}
    for memory in ("0.9", None, "0.5", "1.0", "1TiB"):
        plan(folder, memory=memory, as_json=True, lengths="100")
        arenas[memory] = json.loads(capsys.readouterr().out)["arena_bytes"]
    assert arenas["0.9"] == arenas[None], "the engine's own share"
    assert arenas["0.5"] < arenas["0.9"] < arenas["1.0"] < arenas["1TiB"] <= 1 << 40
    for memory in ("0", "0.0", "1.5", "-0.5"):
        with pytest.raises(
            ConfigError, match=rf"^--memory is {memory}; give .*GiB or TiB.* above 0 and at most"
        ):
            plan(folder, memory=memory)
    with pytest.raises(ConfigError, match="--memory='lots': give bytes .*KiB, MiB, GiB or TiB"):
        plan(folder, memory="lots")
    with pytest.raises(CapacityError, match="--memory 0.001 of H200 .* raise it"):
        plan(folder, memory="0.001")
    plan(Path("MiniMax-Text-01"), memory="0.95", tensor_parallel=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["devices"] == 8, "a fraction leaves the number of devices open"


def test_bad_workloads() -> None:
    with pytest.raises(ConfigError, match="--lengths and --trace exclude each other"):
        read_workloads("512", None, Path("x"))
    for text in ("350", "a,b", "1,2,3"):
        with pytest.raises(ConfigError, match=f"--lognormal is '{text}'; give a mean and a sigma"):
            read_workloads(None, text, None)
    assert read_workloads(None, None, None) is None


def test_default_lengths_are_those_that_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, memory="64MiB", as_json=True)
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["workloads"]] == ["512 tokens"]


def test_a_trace_that_names_its_blocks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The curve of reuse by memory: the second request goes on from the first."""
    trace = tmp_path / "day.jsonl"
    lengths = [(600, 50, [1, 2]), (1500, 50, [1, 3, 4])]
    rows = [
        {"timestamp": at, "input_length": prompt, "output_length": answer, "hash_ids": blocks}
        for at, (prompt, answer, blocks) in enumerate(lengths)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    plan(folder, trace=trace)
    assert "prefixes of this trace" in capsys.readouterr().out
    plan(folder, trace=trace, as_json=True)
    curve = json.loads(capsys.readouterr().out)["prefix_curve"]
    assert [point["host_bytes"] for point in curve] == [0, 0, 64 << 30, 256 << 30, 1 << 40, None]
    assert curve[0]["arena_bytes"] < curve[1]["arena_bytes"] == curve[-1]["arena_bytes"]
    assert all(0 < point["p95_seconds"] < 1 for point in curve)
    assert curve[-1]["token_hit_rate"] == pytest.approx(649 / 2100)
