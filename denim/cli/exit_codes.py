"""What a command ends with: 0, or a number that says which kind of error it was.

Owns the numbers. Knows Denim's errors.
"""

from __future__ import annotations

from denim.errors import CapacityError, ConfigError, DenimError, RequestError

BAD_INPUT, TOO_LARGE, OTHER_ERROR, INTERRUPTED = 2, 3, 1, 130


def exit_code(error: DenimError) -> int:
    if isinstance(error, ConfigError | RequestError):
        return BAD_INPUT
    return TOO_LARGE if isinstance(error, CapacityError) else OTHER_ERROR
