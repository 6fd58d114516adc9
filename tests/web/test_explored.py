"""The explorer's answer: all of it for every model, by the ledger, and refusals that name the setting."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from denim.errors import ConfigError
from denim.ledger.cost import ledger_of
from denim.ledger.lengths import Lengths
from denim.ledger.tensor_parallel import share_of
from denim.memory.plan_json import plan_json
from denim.spec import read_spec
from denim.spec.illustrative import illustrative
from denim.spec.published import published_configs
from denim.web.explored import ILLUSTRATIVE, Offer, explored
from denim.web.settings import STEPS, Settings, read_settings
from tests.spec.configs import qwen3_5_0_8b

NOTHING = Offer({})


@pytest.mark.parametrize("name", [*published_configs(), ILLUSTRATIVE])
def test_every_model_has_a_whole_page(name: str) -> None:
    shown = explored(Settings(model=name), NOTHING)
    json.dumps(shown, allow_nan=False)
    facts = {fact["key"]: fact["value"] for fact in shown["facts"]}
    auto = illustrative() if name == ILLUSTRATIVE else read_spec(published_configs()[name])
    gpus = next(c["value"] for g in shown["controls"] for c in g["controls"] if c["name"] == "gpus")
    ledger = ledger_of(share_of(auto, int(gpus)))
    assert facts["crossover"] == ledger.crossover_tokens
    assert facts["state"] == ledger.bytes_per_request
    for series in shown["memory"]["series"]:
        assert len(series["y"]) == len(series["texts"]) == len(shown["memory"]["x"])
    assert (shown["filling"] is None) == (shown["misfit"] is not None)
    if shown["filling"]:
        assert len(shown["filling"]) == STEPS + 1
        last = shown["filling"][-1]
        assert last["requests"] == max(engine["running"] for engine in last["engines"])
    for group in shown["controls"]:
        for control in group["controls"]:
            assert control["value"] in [option["value"] for option in control["options"]]
            assert read_settings({control["name"]: control["value"]} | {"model": name})


def test_the_counts_are_those_that_denim_plan_prints() -> None:
    from denim.ledger.devices import find_device
    from denim.memory.capacity_plan import CapacityPlan

    spec = read_spec(published_configs()["Qwen3.5-0.8B"])
    plan = CapacityPlan.of(spec, find_device("L40S"))
    printed = plan_json(spec, plan, [Lengths.fixed(1024)], compare=True)["workloads"][0]
    shown = explored(Settings(device="L40S", tokens=1024), NOTHING)["devices"]
    row = next(row for row in shown if row["device"] == "L40S")
    peers = {peer["name"]: peer["requests"] for peer in reversed(printed["peers"])}
    assert row["chosen"] and row["requests"] == {
        "denim": printed["requests"],
        "vllm": peers["vLLM 0.33.0"],
        "sglang": peers["SGLang 0.5.23"],
    }


def test_the_crossover_is_a_point_of_the_curve() -> None:
    memory = explored(Settings(), NOTHING)["memory"]
    at = memory["x"].index(memory["crossover"])
    series = {one["key"]: one["y"] for one in memory["series"]}
    assert series["hybrid"][at] <= series["full"][at]
    assert series["hybrid"][at - 1] > series["full"][at - 1]


def test_a_crossover_of_a_few_tokens_and_one_beyond_the_curve() -> None:
    few = explored(Settings(model="LFM2-350M"), NOTHING)["memory"]
    assert few["x"][0] == 1 and few["crossover"] == 2 and few["x"][few["rows"][1]] == 2
    own = {"key_dim": 512, "value_dim": 512, "linear_heads": 256, "kv_heads": 1, "head_dim": 32}
    many = explored(Settings(**own), NOTHING)["memory"]
    assert many["crossover"] > many["x"][-1] == 1 << 20


def test_ones_own_model_and_trace() -> None:
    offer = Offer({"mine": qwen3_5_0_8b()}, Lengths("day.jsonl", (100, 900), (200, 1000)))
    shown = explored(Settings(model="mine", lengths="trace"), offer)
    assert shown["lengths"] == "600 tokens on average (day.jsonl)"
    models = shown["controls"][0]["controls"][0]["options"]
    assert models[0] == {"value": "mine", "text": "mine", "group": "Yours"}
    kinds = next(c for g in shown["controls"] for c in g["controls"] if c["name"] == "lengths")
    assert kinds["options"][-1] == {"value": "trace", "text": "day.jsonl"}


def test_an_unusual_value_of_a_link_stands_on_its_slider() -> None:
    shown = explored(Settings(tokens=100, page=24), NOTHING)
    by_name = {c["name"]: c for g in shown["controls"] for c in g["controls"]}
    assert [by_name[name]["value"] for name in ("tokens", "page")] == ["100", "24"]


@pytest.mark.parametrize(
    ("query", "seen"),
    [
        ({"model": "GPT-2"}, "model='GPT-2' is not offered; known: Qwen3.5-0.8B"),
        ({"lengths": "trace"}, "this explorer was started without --trace"),
        ({"device": "TPU"}, "device is 'TPU'; known: H200"),
        ({"gpus": "3"}, "does not divide this model's 16 linear key heads"),
        ({"tokens": "0"}, "tokens='0': input should be greater than or equal to 1"),
        ({"sigma": "nan"}, "sigma='nan': input should be a finite number"),
        ({"state_dtype": "int8"}, "state_dtype='int8': input should be 'auto'"),
        ({"colour": "red"}, "colour='red': extra inputs are not permitted"),
    ],
)
def test_refusals(query: dict[str, str], seen: str) -> None:
    with pytest.raises(ConfigError) as refused:
        explored(read_settings(query), NOTHING)
    assert seen in str(refused.value) and "--device" not in str(refused.value)


def test_the_explorer_needs_no_torch() -> None:
    code = (
        "import sys, denim.web.explorer, denim.commands.explorer\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
