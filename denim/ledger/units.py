"""Sizes, counts, times and layer patterns as people read them."""

from __future__ import annotations

import re

from denim.errors import ConfigError

UNITS = {"": 1, "B": 1}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_text(n: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: "18.6 MiB", "12 KiB"."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(n: int) -> str:
    """FLOPs in decimal units: "1.51 GFLOP"."""
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def count_text(n: int) -> str:
    """A count in thousands, millions, billions: "752M"."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T")).replace(" ", "")


def plural(noun: str, n: int) -> str:
    """The noun as it stands behind n: "1 hit", "0 hits", "2 hits"."""
    return noun if n == 1 else f"{noun}s"


def seconds_text(seconds: float) -> str:
    """Three digits in s, ms or µs."""
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _scaled(n: int, base: int, units: tuple[str, ...]) -> str:
    """Three significant digits, and all digits of a whole number below `base`."""
    value, step = float(n), 0
    while value >= base and step < len(units) - 1:
        value, step = value / base, step + 1
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    number = f"{value:.{digits}f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {units[step]}"


def pattern_text(pattern: str) -> str:
    """A layer pattern with its period: "LLLF × 6"; a pattern without one stays as it is."""
    for period in range(1, len(pattern) // 2 + 1):
        if pattern == pattern[:period] * (len(pattern) // period):
            return f"{pattern[:period]} × {len(pattern) // period}"
    return pattern


def parse_bytes(name: str, value: int | str) -> int:
    """A number of bytes from an int or from text such as "8GiB", "512MiB", "2e9" or "1.5GB".

    Raises ConfigError for anything else; a part of a byte, "1.5", is a unit forgotten.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in UNITS:
            unit = UNITS[match[2].upper()]
            try:
                number = float(match[1])
                if unit > 1 or number.is_integer():
                    return int(number * unit)
            except (ValueError, OverflowError):
                pass
    raise ConfigError(
        f"{name}={value!r}: give bytes as a whole number, or with KiB, MiB, GiB or TiB such as '8GiB'"
    )
