"""Greedy choice: the first of the largest logits of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from denim.recurrence.backend import in_kernels

NO_TOKEN = -1  # of a row whose logits are not finite


def largest(logits: Tensor) -> Tensor:
    """Tokens int64 [R] of `logits` [R, V]: of equals the first; NO_TOKEN where there is a NaN, or where the
    largest is infinite."""
    if in_kernels(logits):
        from denim.runner.kernels.largest import largest_of_rows

        return largest_of_rows(logits, NO_TOKEN)
    best, tokens = logits.max(-1)  # a NaN is the maximum of its row
    return torch.where(best.isfinite(), tokens, NO_TOKEN)
