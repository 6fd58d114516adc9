"""Which form of a rule runs where.

Owns the choice alone: the plain torch forms run everywhere, Triton kernels on CUDA devices where Triton is
installed.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

TORCH = "torch"
TRITON = "triton"


@cache
def decode_backend(device_type: str) -> str:
    """What takes the decode rows of a Gated DeltaNet layer on a device of this type ("cpu", "cuda")."""
    return TRITON if device_type == "cuda" and find_spec("triton") is not None else TORCH
