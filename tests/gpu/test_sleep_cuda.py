"""An engine that sleeps gives the memory of its device back; woken, it writes the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from denim import AsyncEngine, SamplingParams
from tests.tiny import checkpoint

pytestmark = pytest.mark.gpu

ARENA = 4 * 2**30
# What stays: compiled kernels, and what libraries keep for themselves.
KEPT = 512 * 2**20


def test_sleep_gives_the_device_s_memory_back(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    prompt, params = list(range(1, 90)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    async def write(engine: AsyncEngine) -> list[int]:
        return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]

    async def run() -> None:
        torch.zeros(1, device="cuda")  # the context is not the engine's
        before = free()
        async with AsyncEngine(tmp_path, device="cuda", dtype="float32", memory=ARENA) as engine:
            first = await write(engine)
            assert free() < before - ARENA
            await engine.sleep()
            assert free() > before - KEPT
            await engine.wake()
            assert free() < before - ARENA
            assert await write(engine) == first
            await engine.check()

    asyncio.run(run())
