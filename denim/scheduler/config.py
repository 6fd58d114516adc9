"""The scheduler's limits, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from denim.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request. Raises ConfigError when one is below 1.

    `chunk_size` is C, the chunk of the linear layers' chunked form: segments end on its grid.
    `max_prefill_spans`: prompts that are worked on in one step; None: as many as its tokens allow.
    """

    chunk_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_prefill_spans: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value < 1:
                raise ConfigError(f"{limit.name} is {value}; it must be at least 1")

    @property
    def max_running(self) -> int:
        """Requests that run at once: no more than a step has tokens, so that every decode row fits in it."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
