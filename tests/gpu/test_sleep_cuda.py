"""An engine that sleeps gives the memory of its device back; woken, it writes the same."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch

from denim import AsyncEngine, SamplingParams
from tests.tiny import checkpoint

pytestmark = pytest.mark.gpu

ARENA = 4 * 2**30
# What libraries may keep of torch's memory.
KEPT = 64 * 2**20


def held() -> int:
    """Bytes that this process has taken from the device through torch, used or not."""
    return torch.cuda.memory_reserved()


def test_sleep_gives_the_device_s_memory_back(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    prompt, params = list(range(1, 90)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def write(engine: AsyncEngine) -> list[int]:
        return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]

    async def run() -> None:
        gc.collect()
        torch.cuda.empty_cache()  # of tests before this one
        before = held()
        async with AsyncEngine(tmp_path, device="cuda", dtype="float32", memory=ARENA) as engine:
            first = await write(engine)
            assert held() > before + ARENA
            await engine.sleep()
            assert held() < before + KEPT
            await engine.wake()
            assert held() > before + ARENA
            assert await write(engine) == first
            await engine.check()

    asyncio.run(run())
