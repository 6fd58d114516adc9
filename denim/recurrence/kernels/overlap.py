"""Whether kernels may begin before the end of the one before them in their stream.

A kernel that does (programmatic dependent launch) may fetch what no kernel writes, weights above all, and
must then wait for its predecessor: `gdc_wait` before anything else is read or written, in every program. The
next kernel begins once all programs of this one have called `gdc_launch_dependents`; where that call stands
behind `gdc_wait`, the next may from its start read everything but what this one writes.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def overlaps(device: torch.device) -> bool:
    """Whether `device` can: compute capability 9.0 (Hopper) and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a launch adds for a kernel that waits for its predecessor itself."""
    return {"launch_pdl": True} if overlap else {}
