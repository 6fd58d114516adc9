"""What was drawn, on its way from the device to the host.

Owns the memory on the host in which a step's tokens land, and the wait for them. Knows tokens and reports on
them; must not know how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from denim.runner.largest import NO_TOKEN
from denim.runner.logprobs import LogprobTensors, TokenLogprobs


class SampleResult(NamedTuple):
    """One token a row, and the reports by row where they were asked for.

    `bad_rows` are rows whose logits hold a NaN or have no finite maximum; their token is NO_TOKEN and
    they have no report. Nothing that came of such a row's state may be used again.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    bad_rows: list[int]


class Landing:
    """Pinned memory for what a draw of R rows sends and gets back. It is made once and used again, but not
    before the tokens of the draw that it was used for are there."""

    def __init__(self, tokens: Tensor) -> None:
        """`tokens` [R]: on the device."""
        self.tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        self._numbers = torch.empty(len(tokens), dtype=torch.float64, pin_memory=True)
        self._done = torch.Event(tokens.device)

    def holding(self, numbers: np.ndarray) -> Tensor:
        """float64 [R], to be sent."""
        self._numbers.numpy()[:] = numbers
        return self._numbers

    def begin(self, tokens: Tensor) -> None:
        """Have `tokens` [R] sent here."""
        self.tokens.copy_(tokens, non_blocking=True)
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()


class Draw:
    """What was drawn, still on its way. `tokens` [R] int64 on the device, NO_TOKEN for a bad row."""

    def __init__(
        self,
        tokens: Tensor,
        reports: LogprobTensors | None,
        rows: Sequence[int],
        top: Sequence[int],
        landing: Landing | None,
        give_back: Callable[[Landing], None],
    ) -> None:
        """reports: on these `rows`, shortened to the `top` tokens of each. `landing`: for tokens that are not
        on the host; `give_back` gets it when they were read."""
        self.tokens = tokens
        self._reports, self._rows, self._top = reports, rows, top
        self._landing, self._give_back = landing, give_back
        if landing is not None:
            landing.begin(tokens)

    def result(self) -> SampleResult:
        """Wait for the device. To be asked for once."""
        if self._landing is None:
            values = self.tokens.tolist()
        else:
            self._landing.wait()
            values = self._landing.tokens.tolist()
            self._give_back(self._landing)
            self._landing = None
        bad_rows = []
        if NO_TOKEN in values:
            bad_rows = [row for row, token in enumerate(values) if token == NO_TOKEN]
        logprobs: dict[int, TokenLogprobs] = {}
        if self._reports is not None:
            for row, top, report in zip(self._rows, self._top, self._reports.to_host(), strict=True):
                if values[row] != NO_TOKEN:
                    logprobs[row] = report.shortened(top)
        return SampleResult(values, logprobs, bad_rows)
