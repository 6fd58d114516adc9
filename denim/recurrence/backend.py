"""Which form of a rule runs where.

Owns the choice alone: the plain torch forms run everywhere, Triton kernels on CUDA devices where Triton is
installed, and the prefill of a gated delta rule may go to another library that is installed. Knows the names
of the forms and what each can do; must not know how one works.

A wish ("auto", or a form by name) comes from the engine's options; a layer keeps it as its
`recurrence_backend`, which is AUTO until a loaded model is told otherwise.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from denim.errors import ConfigError

AUTO = "auto"
TORCH = "torch"
TRITON = "triton"
FLASHINFER = "flashinfer"
FLASHQLA = "flashqla"
FLA = "fla"

WISHES = (AUTO, TORCH, TRITON, FLASHINFER, FLASHQLA, FLA)

# Import names. FlashInfer's kernels are written in the CuTe DSL, FlashQLA's in TileLang, fla's in Triton.
PACKAGES = {TRITON: "triton", FLASHINFER: "flashinfer", FLASHQLA: "flash_qla", FLA: "fla"}
PEERS = (FLASHINFER, FLASHQLA, FLA)


class DeltaPrefill(NamedTuple):
    """What the choice for one call of the gated delta rule's chunked form depends on; all known on the host.

    dtype: of q, k and v. tokens: of all `sequences` together. saves: whether states inside a sequence are
    wanted. captured: whether the call goes into a graph. capability: of the CUDA device, as torch has it.
    """

    value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    tokens: int
    sequences: int
    saves: bool
    captured: bool
    capability: tuple[int, int]


class Faster(NamedTuple):
    """A peer that was measured to be faster than Denim's own kernel, on devices of this capability, for so
    many sequences or more and from so much work on: tokens of all of them x value heads."""

    peer: str
    capability: tuple[int, int]
    sequences: int
    work: int


# Measured on an H200, 16 key and 16 or 32 value heads, 1 or 16 sequences (docs/kernels.md): with copies of
# the states FlashInfer takes 12% to 21% less than the own kernels for 16 sequences of 2048 tokens, and about
# as much for one of 32768. FlashQLA is as fast, but leaves out what has faded and waits for the device in
# every step. Other devices stay with the own kernel.
MEASURED = (Faster(FLASHINFER, (9, 0), sequences=2, work=32768 * 16),)


@cache
def installed(backend: str) -> bool:
    """Whether the package behind a form is there; it is not imported."""
    return backend == TORCH or find_spec(PACKAGES[backend]) is not None


@cache
def usable(peer: str) -> bool:
    """Whether a peer is there with its kernels; this imports it."""
    if not installed(peer):
        return False
    from denim.recurrence.backends import has_kernels

    return has_kernels(peer)


def check_wish(wish: str, device_type: str) -> None:
    """Raises ConfigError for a form (one of WISHES) that is not installed, or not for this type of device."""
    if wish in (AUTO, TORCH):
        return
    if device_type != "cuda":
        raise ConfigError(
            f"recurrence_backend={wish!r} needs a CUDA device, but the model is on {device_type!r};"
            " use 'auto' or 'torch'"
        )
    if not installed(wish):
        raise ConfigError(
            f"recurrence_backend={wish!r}, but {PACKAGES[wish]!r} is not installed; install it or use 'auto'"
        )
    if wish in PEERS and not usable(wish):
        raise ConfigError(
            f"recurrence_backend={wish!r}, but {PACKAGES[wish]!r} lacks the kernels of this rule, for which"
            " it may need another package (FlashInfer: nvidia-cutlass-dsl); install it or use 'auto'"
        )


def in_kernels(x: Tensor) -> bool:
    """Whether Denim's own kernels run where x is: on a CUDA device, if Triton is installed."""
    return x.is_cuda and installed(TRITON)


def rule_backend(device_type: str, wish: str = AUTO) -> str:
    """TORCH or TRITON: what takes a linear layer on this type of device, decode rows and sequences alike.

    The same for every rule. A wish for a peer concerns prefill of the gated delta rule alone
    (`delta_prefill_backend`): none of them is faster for one token.
    """
    if device_type != "cuda" or wish == TORCH or not installed(TRITON):
        return TORCH
    return TRITON


def faster_on(capability: tuple[int, int]) -> Faster | None:
    """The peer that AUTO takes on a device of this capability, if one is usable."""
    return next((m for m in MEASURED if m.capability == capability and usable(m.peer)), None)


def delta_prefill_backend(wish: str, call: DeltaPrefill) -> str:
    """TRITON or one of PEERS: whose kernels take sequences through the gated delta rule where kernels run.

    A peer that is wished for, or (AUTO) that is in MEASURED, where it can do the call; else Triton.
    """
    if wish == AUTO:
        faster, work = faster_on(call.capability), call.tokens * call.value_heads
        if faster is None or call.sequences < faster.sequences or work < faster.work:
            return TRITON
        return faster.peer if can(faster.peer, call) else TRITON
    return wish if wish in PEERS and can(wish, call) else TRITON


def can(peer: str, call: DeltaPrefill) -> bool:
    """Whether a peer computes what Denim's own kernel would."""
    dims = (call.key_dim, call.value_dim)
    return (
        usable(peer)
        and not call.saves  # none writes a state inside a sequence to a slot
        and not call.captured  # they read the sequences' lengths on the host
        and call.dtype in (torch.bfloat16, torch.float16)  # float32 would be rounded to TF32
        and (max(dims) <= 256 if peer == FLA else dims == (128, 128))
    )
