from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from denim import AsyncEngine
from tests.server.live import Live, live
from tests.server.scripted import HERMES_TEMPLATE, ScriptedEngine


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncEngine]:
    """denim-tiny: it can write, and its template thinks. Every step is checked."""
    engine = AsyncEngine(memory="64MiB", max_num_seqs=16)
    yield engine
    asyncio.run(engine.check())
    asyncio.run(engine.close())


@pytest.fixture(scope="session")
def server(engine: AsyncEngine) -> Iterator[Live]:
    with live(engine) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    """It says what it is told to, by a template that has tool calls."""
    return ScriptedEngine(tmp_path_factory.mktemp("hermes"), template=HERMES_TEMPLATE)


@pytest.fixture(scope="module")
def caller(script: ScriptedEngine) -> Iterator[openai.OpenAI]:
    """A client of `script`."""
    with (
        live(script) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client
