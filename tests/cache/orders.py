"""All orders of eviction by name: the engine's own, and those that benches compare it with."""

from __future__ import annotations

from collections.abc import Callable

from bench.prefix_peers import GreedyDual, LeastRecent
from denim.cache.eviction import Order, Worth
from denim.cache.expected import Expected

ORDERS: dict[str, Callable[[Worth, Callable[[], float]], Order]] = {
    "expected": Expected,
    "greedy dual": lambda worth, now: GreedyDual(worth),
    "lru": lambda worth, now: LeastRecent(),
}
