"""How long calls take on a device, and the device's own limits.

On CUDA the calls are captured in a graph, as the engine runs them, so that what is measured is the device
and not the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

REPEATS = 9
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


class Limits(NamedTuple):
    """bytes_per_second: of a copy, read and written counted; flops_per_second: of a product in the dtype."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved_bytes: float, flops: float) -> float:
        return max(moved_bytes / self.bytes_per_second, flops / self.flops_per_second)


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measured on `device`, on random values."""
    count, size = COPIED_BYTES[device.type], PRODUCT_SIZE[device.type]
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not from a graph: there a copy becomes a node for the copy engines, which are slower.
    copy = device_seconds(lambda: target.copy_(source), device, captured=False)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return Limits(2 * count / copy, 2 * size**3 / device_seconds(lambda: torch.mm(a, b), device))


def device_seconds(work: Callable[[], object], device: torch.device, captured: bool = True) -> float:
    """Median seconds of `work` on the device; from a graph on CUDA, unless it is not `captured`, when the
    host's launches count as well."""
    work()
    if device.type != "cuda":
        return median(_wall(work) for _ in range(REPEATS))
    if captured:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        work = graph.replay
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return median(times)


def _wall(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
