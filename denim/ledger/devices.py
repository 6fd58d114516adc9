"""Devices that a plan can be made for: their memory, bandwidth and arithmetic, each number with its source.

Owns the table. Knows nothing of models. Vendors' rates are upper bounds; where a rate was measured, floors
use it, because no kernel has been seen to beat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.errors import ConfigError

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """`memory_bytes`: what the driver reports. Rates per second; FLOPs of dense bf16 products with fp32 sums.

    `copy_bandwidth` and `product_flops` are measured ceilings, None where nobody measured. `fp8_blocks`:
    torch multiplies FP8 blocks with a scale each (compute capability 9.0).
    """

    name: str
    kind: str  # "cuda" or "cpu": which of the engine's defaults hold
    memory_bytes: int
    vendor_bandwidth: float
    vendor_flops: float
    sources: tuple[str, ...]
    copy_bandwidth: float | None = None
    product_flops: float | None = None
    fp8_blocks: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a floor may assume."""
        return self.copy_bandwidth or self.vendor_bandwidth

    @property
    def flops(self) -> float:
        """FLOPs per second that a floor may assume."""
        return self.product_flops or self.vendor_flops

    def seconds(self, moved_bytes: float, flops: float) -> float:
        """Least time for so many bytes and FLOPs, were they to overlap perfectly (the roofline)."""
        return max(moved_bytes / self.bandwidth, flops / self.flops)


DEVICES = (
    Device(
        "H200",
        "cuda",
        143771 * MIB,
        4.8e12,
        989e12,
        (
            "NVIDIA H200 data sheet (SXM): 141 GB HBM3e, 4.8 TB/s, bf16 1,979 TFLOP/s sparse, half dense",
            "memory as nvidia-smi shows it",
            "measured: device copy 4,275 GB/s (read + written), bf16 product of 8192³ 784 TFLOP/s",
        ),
        copy_bandwidth=4.275e12,
        product_flops=784e12,
        fp8_blocks=True,
    ),
    Device(
        "H100",
        "cuda",
        81559 * MIB,
        3.35e12,
        989e12,
        (
            "NVIDIA H100 data sheet (SXM): 80 GB HBM3, 3.35 TB/s, bf16 1,979 TFLOP/s sparse, half dense",
            "memory as nvidia-smi shows it",
        ),
        fp8_blocks=True,
    ),
    Device(
        "L40S",
        "cuda",
        46068 * MIB,
        864e9,
        362e12,
        (
            "NVIDIA L40S data sheet: 48 GB GDDR6, 864 GB/s, bf16 362 TFLOP/s dense",
            "memory as nvidia-smi shows it, ECC on",
        ),
    ),
    Device(
        "RTX4090",
        "cuda",
        24564 * MIB,
        1008e9,
        165.2e12,
        (
            "NVIDIA Ada architecture white paper: 24 GB GDDR6X, 1,008 GB/s, bf16 165.2 TFLOP/s dense",
            "memory as nvidia-smi shows it",
        ),
    ),
    Device(
        "CPU",
        "cpu",
        256 * GIB,
        307.2e9,
        114.7e12,
        (
            "Intel Xeon Platinum 8480+, one socket: 8 channels of DDR5-4800 = 307.2 GB/s; "
            "56 cores × 2.0 GHz × 1,024 bf16 operations a cycle (AMX) = 114.7 TFLOP/s",
            "memory: 256 GiB, 32 GiB in each of 8 channels; an example",
        ),
    ),
)


def find_device(name: str, option: str = "--device") -> Device:
    """The device of this name, in either case. Raises ConfigError listing the known ones; `option` is where
    the name was given."""
    for device in DEVICES:
        if device.name.lower() == name.lower().replace(" ", ""):
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise ConfigError(f"{option} is {name!r}; known: {known}")
