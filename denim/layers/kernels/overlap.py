"""Whether kernels may begin before the end of the one before them in their stream.

A kernel that does (programmatic dependent launch) may fetch what no kernel writes, weights above all, and
must then wait for its predecessor: `gdc_wait` before anything else is read or written.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def overlaps(device: torch.device) -> bool:
    """Whether `device` can: compute capability 9.0 (Hopper) and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
