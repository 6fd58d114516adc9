"""Sizes, counts and layer patterns as people read them."""

from __future__ import annotations


def size_text(n: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: "18.6 MiB", "12 KiB"."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(n: int) -> str:
    """FLOPs in decimal units: "1.51 GFLOP"."""
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def count_text(n: int) -> str:
    """A count in thousands, millions, billions: "752M"."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T")).replace(" ", "")


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
