"""How many requests an arena holds at once, exactly, by slabs.

Owns that one search; the engine's start-up line and `denim plan` both ask here. Knows the layout only.
"""

from __future__ import annotations

from fractions import Fraction

from denim.memory.layout import PAGE, SLOT, ArenaLayout


def requests_that_fit(layout: ArenaLayout, num_slabs: int, tokens: int) -> int:
    """The largest number of requests of `tokens` tokens each that are in the arena at once."""
    return mixture_that_fits(layout, num_slabs, Fraction(-(-tokens // layout.page_size)))


def mixture_that_fits(layout: ArenaLayout, num_slabs: int, mean_pages: Fraction) -> int:
    """The largest number of requests with `mean_pages` pages each on average in the arena at once."""
    low, high = 0, num_slabs * max(size.count for size in layout.classes) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = layout.slabs_for(mixture_need(layout, middle, mean_pages)) <= num_slabs
        low, high = (middle, high) if fits else (low, middle)
    return low


def mixture_need(layout: ArenaLayout, requests: int, mean_pages: Fraction) -> dict[str, int]:
    """Entries of each class that so many requests hold together."""
    counts = {PAGE: -(-requests * mean_pages.numerator // mean_pages.denominator), SLOT: requests}
    return {size.name: counts[size.name] for size in layout.classes}
