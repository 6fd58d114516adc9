"""Prefill of the gated delta rule in other libraries, in the form of Denim's own kernel.

Each file is one library and imports it when it is asked to run; `packed` is what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from denim.recurrence.backend import FLA, FLASHINFER, FLASHQLA, TRITON

MODULES = {
    TRITON: "denim.recurrence.kernels.gated_delta_chunks",
    FLASHINFER: "denim.recurrence.backends.flashinfer",
    FLASHQLA: "denim.recurrence.backends.flashqla",
    FLA: "denim.recurrence.backends.fla",
}


def gated_delta_chunks_of(backend: str) -> Callable[..., Tensor]:
    """`gated_delta_chunks` of Denim's kernels or of a peer; arguments and results are the same."""
    return import_module(MODULES[backend]).gated_delta_chunks
