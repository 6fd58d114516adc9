"""Whether a checkpoint should be brought up from host memory or a file, or computed again.

Owns the two times and their comparison, as `denim.ledger.preemption` does for whole requests: both are
estimates, and a wrong choice costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable

from denim.ledger.preemption import RATES

HOST = "host"
DISK = "disk"

DISK_BYTES_PER_SECOND = 2e9
"""Reading a file of some 10 MB: what one NVMe drive of a server gives at least."""


def reload_rule(flops: Callable[[int], float], device_type: str) -> Callable[[int, int, int, str], bool]:
    """pays(start, end, bytes, tier): whether bringing so many bytes up from `tier` beats a prefill of tokens
    start .. end. `flops(tokens)`: of a prefill from nothing."""
    rates = RATES[device_type]
    link = 1 / rates.link_bytes_per_second
    seconds_per_byte = {HOST: link, DISK: link + 1 / DISK_BYTES_PER_SECOND}

    def pays(start: int, end: int, nbytes: int, tier: str) -> bool:
        return nbytes * seconds_per_byte[tier] < (flops(end) - flops(start)) / rates.flops_per_second

    return pays
