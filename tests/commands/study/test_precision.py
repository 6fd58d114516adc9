"""`denim study precision` with denim-tiny, at small sizes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from denim.commands.study.inputs import real_inputs, texts_of
from denim.commands.study.perplexity import checkpoint_of, score, stretches
from denim.commands.study.precision import NAME, study_precision
from denim.commands.study.storage import STORAGES
from denim.engine import LLM
from denim.errors import CapacityError, ConfigError, RequestError
from denim.recurrence.gated_delta import gated_delta_chunked
from denim.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(device="cpu", memory="16MiB", max_num_seqs=2, checkpoint_policy="none")


def test_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("denim").level
    study_precision(64, 80, 1, None, "cpu", tmp_path, as_json=True)
    assert logging.getLogger("denim").level == level, "engines speak again"
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / f"{NAME}.json").read_text())
    assert (tmp_path / f"{NAME}.png").read_bytes().startswith(b"\x89PNG")
    assert set(result["drift"]) == {"random", "real"}
    for run in result["drift"].values():
        assert list(run["storages"]) == [storage.name for storage in STORAGES]
        ends = {name: curve["state"][-1] for name, curve in run["storages"].items()}
        assert 0 < ends["fp32"] < ends["bf16"] < ends["fp8"]
        assert ends["fp8 once"] < ends["fp8"]
        assert all(len(curve["output"]) == len(run["points"]) for curve in run["storages"].values())
    runs = result["perplexity"]["runs"]
    assert result["perplexity"]["edges"] == [0, 64, 80]
    assert runs["all fp32"]["whole_difference"] == 0
    assert list(runs) == ["all fp32", "KV bf16", *(f"state {s.name}" for s in STORAGES[1:])]
    assert all(0 < run["whole_difference"] < 0.5 for name, run in runs.items() if name != "all fp32")
    assert runs["state bf16"]["whole_difference"] < runs["state fp8"]["whole_difference"]
    assert all(len(run["perplexity"]) == 2 for run in runs.values())


def test_captured_inputs_give_the_states_of_the_engine(tiny: LLM) -> None:
    """The rule over what was captured ends in the states that the engine's own prefill wrote."""
    text = texts_of(tiny, None, 40, 1)[0]
    inputs = real_inputs(tiny, [text], 40)
    assert inputs.q.shape == (40, 12, 64)
    assert inputs.v.shape == (40, 24, 64)
    _, states = gated_delta_chunked(*inputs, cu_seqlens=[0, 40])
    storage = tiny.core.runner.storage
    spec = tiny.core.spec
    layers = [i for i, layer in enumerate(spec.layers) if layer.mixer.letter == "L"]
    slots = torch.cat([storage.state(i, "recurrent") for i in layers], 1)  # [slots, heads of all layers, …]
    distance = (slots - states).abs().nan_to_num(nan=torch.inf)  # slots that nobody wrote hold anything
    closest = distance.amax((1, 2, 3)).min()
    assert closest < 1e-5 * states.abs().max()


def test_windows_follow_one_another_from_the_first_again(tiny: LLM) -> None:
    texts = texts_of(tiny, None, 16, 2)
    assert [len(text) for text in texts] == [16, 16]
    assert texts[0] != texts[1]
    inputs = real_inputs(tiny, texts, 40)
    assert torch.equal(inputs.v[32:40], inputs.v[:8])
    assert not torch.equal(inputs.v[16:24], inputs.v[:8])


def prompt_scores(text: list[int], **options: str) -> list[float]:
    llm = LLM(
        device="cpu", dtype="float32", memory="16MiB", max_num_seqs=1, max_num_batched_tokens=1, **options
    )
    reports = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    return [r[t].logprob for t, r in zip(text[1:], reports[1:], strict=True)]


def test_scores_are_those_of_the_engine(tiny: LLM) -> None:
    """Two texts and three storages side by side, against an engine that really keeps its states so."""
    texts = texts_of(tiny, None, 40, 2)
    fp32, bf16, *_, once = STORAGES
    scores = score(texts, "cpu", (fp32, bf16, once))
    assert scores.shape == (3, 2, 39)
    for text, of_fp32, of_bf16, of_once in zip(texts, *scores, strict=True):
        assert of_fp32.tolist() == pytest.approx(prompt_scores(text), abs=1e-4)
        # A sum that differs in its last bit may round to another bf16 neighbour.
        assert of_bf16.tolist() == pytest.approx(prompt_scores(text, state_dtype="bfloat16"), abs=0.02)
        apart = (of_once - of_fp32).abs()
        assert apart[: checkpoint_of(40)].max() == 0
        assert apart[checkpoint_of(40) :].max() > 1e-4


def test_stretches_double_up_to_the_length() -> None:
    assert stretches(300) == [0, 64, 128, 256, 300]
    assert stretches(64) == [0, 64]
    assert stretches(2) == [0, 2]


def test_texts_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("denim.commands.study.perplexity.MEMORY", "2MiB")
    with pytest.raises(CapacityError, match="9 texts of 32 tokens do not fit into 2MiB; lower --windows"):
        score([[1] * 32] * 9, "cpu", STORAGES[:1])


def test_a_text_that_is_too_short_or_missing_is_refused(tiny: LLM, tmp_path: Path) -> None:
    place = tmp_path / "short.txt"
    place.write_text("A few words.")
    with pytest.raises(RequestError, match="lower --length"):
        texts_of(tiny, place, 100, 1)
    with pytest.raises(RequestError, match="cannot be read"):
        texts_of(tiny, tmp_path / "none.txt", 100, 1)


def test_a_file_is_cut_into_windows(tiny: LLM, tmp_path: Path) -> None:
    place = tmp_path / "text.txt"
    place.write_text("The people of the United States. " * 20)
    tokens = tiny.tokenizer.encode(place.read_text())
    assert texts_of(tiny, place, 30, 2) == [tokens[:30], tokens[30:60]]


@pytest.mark.parametrize(
    ("tokens", "length", "windows", "name"),
    [(63, 8, 1, "tokens"), (64, 1, 1, "length"), (64, 8, 0, "windows"), (64, 4096, 1, "length")],
)
def test_sizes_that_cannot_serve_are_refused(
    tokens: int, length: int, windows: int, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is"):
        study_precision(tokens, length, windows, None, "cpu", tmp_path, as_json=True)
