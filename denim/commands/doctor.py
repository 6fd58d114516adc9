"""`denim doctor`: what this machine has and what Denim would use of it.

Owns the report. Asks torch and the installed packages; runs nothing on a device.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import denim
from denim.commands.facts import print_facts
from denim.ledger.units import size_text
from denim.spec import embedded_model

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
OPTIONAL = ("triton", "flashinfer-python", "flash-qla", "fla-core")


def show_machine(as_json: bool) -> None:
    """Print the report; it has no way to fail but a broken installation, which it shows."""
    report = examine()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print_facts(rows(report))


def examine() -> dict[str, Any]:
    """The report as plain JSON values. Memory in bytes."""
    import psutil
    import torch

    from denim.engine.loading import choose_device
    from denim.layers.fp8_linear import multiplies_blocks
    from denim.layers.linear import can_pack
    from denim.layers.paged_attention import attention_backend
    from denim.recurrence.backend import PEERS, faster_on, installed, rule_backend

    memory = psutil.virtual_memory()
    device = choose_device("auto")
    on_cuda = device.type == "cuda"
    faster = faster_on(torch.cuda.get_device_capability(device)) if on_cuda else None
    return {
        "denim": denim.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": {"total": memory.total, "free": memory.available},
        "packages": {name: _version(name) for name in REQUIRED + OPTIONAL},
        "cuda": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "chosen_device": str(device),
        "decode_backend": rule_backend(device.type),
        "prefill_backend": rule_backend(device.type),
        "recurrence_peers": [name for name in PEERS if on_cuda and installed(name)],
        "long_delta_prefill": faster._asdict() if faster else None,
        "attention_backend": attention_backend("auto", (), dtype=torch.bfloat16, device_type=device.type),
        "fp8_blocks": multiplies_blocks(device, torch.bfloat16),
        "cpu_bf16_packed": can_pack(torch.empty(1, 1, dtype=torch.bfloat16)),
        "embedded_model": (embedded_model() / "config.json").is_file(),
    }


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, text) of each line that a person reads."""
    found = {name: number or "missing" for name, number in report["packages"].items()}
    memory = report["memory"]
    devices = [
        f"{device['name']}, {size_text(device['free'])} of {size_text(device['total'])} free, "
        f"capability {device['capability']}"
        for device in report["devices"]
    ]
    torch_build = f"CUDA {report['cuda']}" if report["cuda"] else "no CUDA"
    bf16 = "bf16 products packed by oneDNN" if report["cpu_bf16_packed"] else "no fast bf16: prefer float32"
    return [
        ("denim", report["denim"]),
        ("python", f"{report['python']} on {report['system']}"),
        ("cpu", f"{report['cores']} cores, {report['threads']} torch threads; {bf16}"),
        ("memory", f"{size_text(memory['free'])} of {size_text(memory['total'])} free"),
        ("torch", f"{found['torch']}, built with {torch_build}"),
        ("cuda devices", "; ".join(devices) or "none"),
        ("needed", ", ".join(f"{name} {found[name]}" for name in REQUIRED[1:])),
        ("optional", ", ".join(f"{name} {found[name]}" for name in OPTIONAL)),
        ("denim-tiny", "there" if report["embedded_model"] else "missing: the installation is not whole"),
        ("Denim runs on", report["chosen_device"]),
        ("FP8 blocks", "multiplied as they are" if report["fp8_blocks"] else "dequantised on loading"),
        ("linear layers", _linear_layers(report)),
        ("attention", report["attention_backend"]),
    ]


def _linear_layers(report: dict[str, Any]) -> str:
    parts = [f"decode {report['decode_backend']}, prefill {report['prefill_backend']}"]
    if long := report["long_delta_prefill"]:
        parts.append(
            f"Gated DeltaNet's on {long['peer']} for {long['sequences']} sequences or more"
            f" from {long['work']:,} tokens x value heads on"
        )
    if peers := report["recurrence_peers"]:
        parts.append(f"recurrence_backend could force {', '.join(peers)}")
    return "; ".join(parts)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": f"{major}.{minor}",
        "free": free,
        "total": total,
    }
