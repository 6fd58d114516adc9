"""Whether a device is a Hopper, for which some kernels are written a second time, with TMA and wgmma."""

from __future__ import annotations

from functools import cache

import torch


@cache
def on_hopper(device: torch.device) -> bool:
    """Compute capability 9.0; wgmma is there alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
