"""What can be set when an engine starts, and how wrong values and folders are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from denim import LLM, ConfigError, SamplingParams
from denim.engine.options import EngineOptions
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
        ({"chunk_size": 1.5}, "chunk_size=1.5 must be"),
        ({"max_model_len": 0}, "max_model_len=0 must be"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1 must be"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True must be"),
        ({"seed": "x"}, "seed='x' must be"),
        ({"memory": 1.5}, "memory=1.5: a fraction of the device must lie above 0 and be at most 1; .*TiB"),
        ({"memory": 0.0}, "memory=0.0: a fraction"),
        ({"page_size": 4097}, "page_size=4097 is too large; at most 4096"),
        ({"chunk_size": 513}, "chunk_size=513 is too large; at most 512"),
        ({"deferred_writes": 1}, "deferred_writes=1 must be 'auto', None or a number of steps from 2 to 33"),
        ({"deferred_writes": 34}, "deferred_writes=34 must be"),
        ({"memory": "8 gigs"}, "memory='8 gigs': give bytes .*KiB, MiB, GiB or TiB"),
        ({"memory": "1.5"}, "memory='1.5': give bytes"),
        ({"memory": -1}, "memory=-1: give bytes"),
        ({"swap_space": "much"}, "swap_space='much': give bytes"),
        ({"host_memory": "all"}, "host_memory='all': give bytes"),
        ({"disk_space": -1}, "disk_space=-1: give bytes"),
        ({"disk_cache": 3, "host_memory": "1MiB"}, "disk_cache=3 must be the path of a directory"),
        ({"disk_cache": "/tmp/x"}, "disk_cache='/tmp/x' needs host_memory"),
        (
            {"disk_cache": "/tmp/x", "host_memory": "1MiB", "checkpoint_policy": "none"},
            'and a checkpoint_policy other than "none"',
        ),
        ({"checkpoint_dtype": "int4"}, "checkpoint_dtype='int4'; supported: auto, bfloat16, int8"),
        ({"dtype": "int8"}, "dtype='int8'; supported: auto"),
        ({"device": "tpu"}, "device='tpu'; supported:"),
        ({"device": "mps"}, "device='mps'; supported:"),
        ({"device": "cuda:99"}, "device='cuda:99', but torch"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 is not supported in this version.*leave it at 1",
        ),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True is not supported"),
        ({"speculative": {"method": "ngram"}}, "there is no speculation"),
        ({"checkpoint_policy": "some"}, "checkpoint_policy='some'; supported: none, align, all, ends, auto"),
        ({"deterministic": True}, "not bit-equal across batches"),
        ({"max_len": 5}, "unknown option 'max_len'; known: model, device"),
    ],
)
def test_wrong_values(mute: tuple[Path, Judge], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(mute[0], **{"memory": "1MiB", **given})


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineOptions().seed = 1  # type: ignore[misc]


@pytest.fixture
def folder(mute: tuple[Path, Judge], tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(mute[0], tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    file.write_text(json.dumps(values))
    return folder


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere' is not a folder; give the path.*downloads nothing"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(folder)


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        LLM(folder)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        LLM(folder)


def test_unsupported_family(folder: Path) -> None:
    edit(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match="gpt2"):
        LLM(folder)


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(folder)


def test_a_good_engine_after_bad_ones(folder: Path, mute: tuple[Path, Judge]) -> None:
    """Nothing that was refused is in the way of what follows."""
    for _ in range(3):
        with pytest.raises(ConfigError):
            LLM(edit(folder, model_type="gpt2"))
    prompt = tokens_of(20, 0, VOCAB)
    output = LLM(mute[0], memory="1MiB").generate(prompt, SamplingParams(temperature=0, max_tokens=5))[0]
    mute[1].greedy(prompt, output.outputs[0].token_ids)


def test_layer_types_and_interval(folder: Path, mute: tuple[Path, Judge]) -> None:
    """LD-13: types, an interval, or both when they agree, are one layout; a contradiction is an error."""
    types = ["linear_attention"] * 3 + ["full_attention"]
    prompt = tokens_of(30, 0, VOCAB)
    for changes in (
        {"layer_types": types, "full_attention_interval": None},
        {"layer_types": None, "full_attention_interval": 4},
        {"layer_types": types, "full_attention_interval": 4},
        {"layer_types": None, "full_attention_interval": None},  # transformers' own default
    ):
        llm = LLM(edit(folder, **changes), memory="1MiB")
        assert [layer.mixer.letter for layer in llm.core.spec.layers] == list("LLLF")
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=2))[0].outputs[0]
        mute[1].greedy(prompt, output.token_ids)
        mute[1].logprobs(prompt, output.token_ids, output.logprobs)
    with pytest.raises(ConfigError, match="full_attention_interval"):
        LLM(edit(folder, layer_types=types, full_attention_interval=2))


def test_state_dtype_of_the_config(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NP-01: missing is float32, the one in force is printed, an unknown one is an error."""
    for stated, option, expected in (
        (None, "auto", "float32"),
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        (None, "float16", "float16"),
    ):
        edit(folder, mamba_ssm_dtype=stated)
        caplog.clear()
        with caplog.at_level("INFO", logger="denim"):
            llm = LLM(folder, memory="1MiB", state_dtype=option)
        assert f"{expected} states" in caplog.text
        assert llm.core.runner.storage.state(0, "recurrent").dtype == getattr(torch, expected)
    edit(folder, mamba_ssm_dtype="float8")
    with pytest.raises(ConfigError, match="mamba_ssm_dtype.*float8"):
        LLM(folder)
