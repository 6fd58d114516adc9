"""How long work takes on a GPU, in a captured graph over inputs that the cache cannot hold.

Owns the way of timing and the device's own limits, which every other figure is set against. Knows nothing of
what is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Inputs rotate among so many bytes at least, several times the 60 MB of an H200's second-level cache.
ROTATED_BYTES = 200 * 2**20
MOST_SETS = 160
GRAPH_MICROSECONDS = 1500.0  # a replay is long against the launch of a graph
MOST_CALLS = 400
REPLAYS = 9
COPIED_BYTES = 2 * 2**30
PRODUCT_SIZE = 8192


class Floors(NamedTuple):
    """bytes_per_second: of a copy, read and written counted; flops_per_second: of a bf16 product."""

    bytes_per_second: float
    flops_per_second: float

    def microseconds(self, bytes_moved: float = 0.0, flops: float = 0.0) -> float:
        """The larger of the two times: what nothing on this device can go below."""
        return max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second) * 1e6


def sets_of(bytes_of_one: float) -> int:
    """How many sets of inputs work has to rotate among."""
    return max(2, min(MOST_SETS, int(ROTATED_BYTES / max(bytes_of_one, 1)) + 1))


def microseconds(work: Callable[[int], object], sets: int) -> float:
    """Median time of one work(i), i counting through `sets` sets of inputs over and over.

    work must launch the same kernels in every call, and may not wait for the device.
    """
    for i in range(min(sets, 3)):
        work(i)
    once = _elapsed(lambda: work(0), 3)
    calls = max(sets, min(MOST_CALLS, int(GRAPH_MICROSECONDS / once) + 1))
    calls = -(-calls // sets) * sets if calls < MOST_CALLS else calls
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i % sets)
    graph.replay()
    taken = statistics.median(_elapsed(graph.replay, 1) for _ in range(REPLAYS))
    del graph
    return taken / calls


def _elapsed(work: Callable[[], object], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def need_gpu() -> None:
    """Ends the program with one line where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "this measures a CUDA device, and torch finds none; run it where `nvidia-smi` shows one"
        )


def floors() -> Floors:
    """The device's limits, measured: a copy of 2 GiB, and a bf16 product of 8192 x 8192 on random values."""
    need_gpu()
    return Floors(2 * COPIED_BYTES / _copy() * 1e6, 2 * PRODUCT_SIZE**3 / _product() * 1e6)


def _copy() -> float:
    """Not in a graph: there a copy becomes a node for the copy engines, which are slower."""
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return statistics.median(_elapsed(lambda: target.copy_(source), 1) for _ in range(REPLAYS + 2))


def _product() -> float:
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda")
    return microseconds(lambda i: torch.mm(a, b), 1)


def in_place_multiply(states: Tensor, rows: int, sets: int) -> float:
    """Microseconds of multiplying `rows` states [rows, ...] where they lie: the practical floor of a step.

    states: [sets * rows, ...] dense; one pass reads and writes each state once.
    """
    views = states.view(sets, rows, -1)
    return microseconds(lambda i: views[i].mul_(1.0), sets)
