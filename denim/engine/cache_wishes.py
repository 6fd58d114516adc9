"""What a request asks of the prefix cache, checked at the border.

Owns the three wishes and their validation. Knows the length of the prompt; nothing of the cache itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from denim.errors import RequestError


@dataclass(frozen=True)
class CacheWishes:
    """cache_salt: requests with different salts share nothing. cache_control: positions in the prompt, in
    tokens from its beginning, at which a checkpoint is wanted. no_store: the request may use what others
    left, and leaves nothing itself.
    """

    cache_salt: str | None = None
    cache_control: Sequence[int] = ()
    no_store: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError."""
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise RequestError(
                f"cache_salt={self.cache_salt!r} must be a string that is not empty, or None", "cache_salt"
            )
        if not isinstance(self.no_store, bool):
            raise RequestError(f"no_store={self.no_store!r} must be True or False", "no_store")
        control: Any = self.cache_control
        if isinstance(control, str | bytes) or not isinstance(control, Sequence):
            raise RequestError(
                f"cache_control={control!r} must be a list of positions in the prompt", "cache_control"
            )
        for position in control:
            if isinstance(position, bool) or not isinstance(position, Integral) or position < 1:
                raise RequestError(
                    f"cache_control has {position!r}; a position is a number of tokens from the prompt's"
                    " beginning, at least 1",
                    "cache_control",
                )

    def check_prompt(self, tokens: int) -> None:
        """Raises RequestError for a position behind the end of a prompt of `tokens` tokens."""
        behind = [position for position in self.cache_control if position > tokens]
        if behind:
            raise RequestError(
                f"cache_control has {behind[0]}, but the prompt has {tokens} tokens; positions count tokens"
                " from its beginning; leave out what is behind its end",
                "cache_control",
            )


NO_WISHES = CacheWishes()
