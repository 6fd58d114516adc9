"""Small layouts whose numbers can be followed by hand."""

from __future__ import annotations

from denim.memory.layout import PAGE, SLOT, ArenaLayout, SizeClass

PAGE_SIZE = 4


def make_layout(pages: int = 4, slots: int = 1) -> ArenaLayout:
    """So many pages and slots per slab; 0 leaves the class out."""
    slab = 256 * max(pages, 1) * max(slots, 1)
    classes = tuple(
        SizeClass(name, slab // count, slab // count, count)
        for name, count in ((PAGE, pages), (SLOT, slots))
        if count
    )
    return ArenaLayout(PAGE_SIZE, slab, classes, (), ())
