"""The OpenAPI schema: what it says holds, for calls that schemathesis makes up from it, right and wrong."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from denim import AsyncEngine
from tests.in_use import in_use
from tests.server.live import Live, live
from tests.server.patience import until

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
    "unsupported_method",
)
# They change the server for everybody: 503 is right while the engine sleeps, and is no fault.
LEFT_OUT = "^/(sleep|wake_up)$"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """Contexts are short, so that no call takes long."""
    engine = AsyncEngine(memory="16MiB", max_model_len=96, max_num_seqs=16)
    with live(engine, max_streams=4096, max_queue=4096) as server:
        yield server
    asyncio.run(engine.close())


def fuzz(server: Live, folder: Path, *arguments: str) -> int:
    """Run schemathesis; the number of calls that it made. Fails with its report if it found something, and
    when the server holds anything afterwards."""
    program = Path(sys.executable).with_name("schemathesis")
    command = [program, "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS), *arguments]
    command += ["--exclude-path-regex", LEFT_OUT, "--suppress-health-check", "all", "--warnings", "off"]
    command += ["--request-timeout", "300"]
    hooks = os.environ | {"SCHEMATHESIS_HOOKS": "tests.server.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--continue-on-failure", "--no-color"],
        cwd=folder, env=hooks, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    calls = re.search(r"([\d,]+) generated, \1 passed", done.stdout)
    assert calls is not None, done.stdout[-5000:]
    assert_nothing_is_held(server)
    return int(calls[1].replace(",", ""))


def assert_nothing_is_held(server: Live) -> None:
    until(lambda: in_use(httpx.get(f"{server.url}/stats").json()) + server.serving.gate.open == 0)
    asyncio.run(server.serving.engine.check())


@pytest.mark.timeout(600)
def test_some_calls(small: Live, tmp_path: Path) -> None:
    assert fuzz(small, tmp_path, "--phases", "fuzzing", "--max-examples", "3", "--seed", "8") > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_calls(small: Live, tmp_path: Path) -> None:
    calls = fuzz(
        small, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "150", "--seed", "1"
    )
    assert calls > 3000


def test_every_endpoint_is_in_the_schema(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    for path in (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/models", "/v1/embeddings", "/tokenize", "/detokenize",
        "/health", "/ready", "/metrics", "/version", "/stats", "/prefix_cache", "/reset_prefix_cache",
        "/sleep", "/wake_up", "/is_sleeping",
    ):  # fmt: skip
        assert path in schema["paths"], path
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    ranges = schema["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert ranges["minimum"] == 0
