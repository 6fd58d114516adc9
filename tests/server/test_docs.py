"""docs/server.md lists every option, endpoint and metric that there is, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import httpx

from denim import cli
from denim.engine.options import EngineOptions
from denim.server.options import ServerOptions

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_option_of_the_command() -> None:
    listed = set(re.findall(r"--[a-z-]+", "\n".join(re.findall(r"^\| `--.*?\|", section("Options"), re.M))))
    real = {
        f"--{name.replace('_', '-')}" for name in inspect.signature(cli.serve).parameters if name != "model"
    }
    assert listed - {"--no-log-requests"} == real


def test_defaults_are_those_of_the_options() -> None:
    """The command's defaults do not differ from what Python code gets."""
    plural = {"api_key": "api_keys", "cors_origin": "cors_origins"}
    spelled = {"deferred_writes": "auto", "host_memory": 0}
    for name, parameter in inspect.signature(cli.serve).parameters.items():
        default: Any = parameter.default
        for options in (ServerOptions, EngineOptions):
            if hasattr(options, plural.get(name, name)):
                expected = getattr(options, plural.get(name, name))
                if name == "max_body":
                    assert default == expected
                elif name in spelled:
                    assert (str(expected), default) == (str(spelled[name]), str(spelled[name]))
                else:
                    assert (default or None) == (expected or None), name
        assert get_args(parameter.annotation) or parameter.annotation, name


def test_every_endpoint(http: httpx.Client) -> None:
    paths = {path.replace("{model}", "NAME") for path in http.get("/openapi.json").json()["paths"]}
    told = set(re.findall(r"(/[\w/]+)", section("Endpoints").replace("`/v1/models/NAME`", "/v1/models/NAME")))
    assert paths - told <= {"/api/live"}
    assert told - paths <= {"/docs"}


def test_every_metric(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    families = re.findall(r"^# TYPE (denim_\w+) (\w+)", http.get("/metrics").text, re.M)
    names = {name for name, kind in families if not name.endswith("_created")}
    listed = set(re.findall(r"`(denim_\w+)", section("Metrics")))
    families_of_names = ("denim_prefix_", "denim_tier_")  # told as a whole
    missing = {name for name in names - listed if not name.startswith(families_of_names)}
    assert missing == set()
    assert listed - names <= set(families_of_names)
