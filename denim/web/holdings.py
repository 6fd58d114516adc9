"""What is in memory at once, as the explorer draws it: pools filling up, and every device beside the other.

Owns shares, widths and texts. Counts and bytes are the plan's and the peers' rules'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from denim.errors import DenimError
from denim.ledger.devices import DEVICES, Device
from denim.ledger.lengths import Lengths
from denim.ledger.peers import NOT_SERVED, SGLANG, SGLANG_RESERVED, VLLM, SglangLayout, VllmLayout
from denim.ledger.units import size_text
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.filling import Pool, arena_filling, sglang_filling, vllm_filling
from denim.web.settings import STEPS

Filling = Callable[[int], tuple[Pool, ...]]


class Rules:
    """The three rules over one plan: how many requests each holds, and what is in its pools."""

    def __init__(self, plan: CapacityPlan, lengths: Lengths) -> None:
        self.lengths = lengths.within(plan.longest_request)
        vllm = VllmLayout.of(plan.spec, plan.kv_dtype)
        sglang = SglangLayout.of(plan.spec, plan.kv_dtype, 0, SGLANG_RESERVED[0])
        arena = plan.arena_bytes
        self.requests = {
            "denim": plan.holding(lengths).requests,
            "vllm": vllm.requests(arena, self.lengths),
            "sglang": sglang.requests(arena, self.lengths),
        }
        self.fillings: dict[str, Filling] = {
            "denim": lambda n: arena_filling(plan, self.lengths, n),
            "vllm": lambda n: vllm_filling(plan, vllm, self.lengths, n),
            "sglang": lambda n: sglang_filling(plan, sglang, self.lengths, n),
        }


def engine_names(family: str, states: bool) -> dict[str, str]:
    """Key -> name and rule in short. A star: this release has no model of the family."""
    star = {name: "" if family not in families else " *" for name, families in NOT_SERVED.items()}
    slots = f", {SGLANG_RESERVED[0]} slots a request" if states else ""
    return {"denim": "Denim", "vllm": VLLM + star[VLLM], "sglang": SGLANG + slots + star[SGLANG]}


def filling_steps(rules: Rules, names: dict[str, str]) -> list[dict[str, Any]]:
    """`STEPS` + 1 numbers of requests, from none to as many as the best of the rules holds."""
    most = max(rules.requests.values())
    return [_step(rules, names, most * i // STEPS) for i in range(STEPS + 1)]


def _step(rules: Rules, names: dict[str, str], wanted: int) -> dict[str, Any]:
    engines = []
    for key, name in names.items():
        running = min(wanted, rules.requests[key])
        pools = rules.fillings[key](running)
        whole = sum(pool.size for pool in pools)
        engines.append(
            {
                "key": key,
                "name": name,
                "running": running,
                "waiting": wanted - running,
                "text": f"{running:,} in memory",
                "waits": f", {wanted - running:,} wait" if wanted > running else "",
                "pools": [_pool(pool, whole) for pool in pools],
            }
        )
    return {"requests": wanted, "text": f"{wanted:,}", "engines": engines}


def _pool(pool: Pool, whole: float) -> dict[str, Any]:
    used = pool.states + pool.kv + pool.idle
    return {
        "name": pool.name,
        "width": _percent(pool.size, whole),
        "states": _percent(pool.states, pool.size),
        "kv": _percent(pool.kv, pool.size),
        "idle": _percent(pool.idle, pool.size),
        "used": used / pool.size,
        "text": f"{pool.name}: {used / pool.size:.0%} of {size_text(round(pool.size))}",
    }


def device_rows(
    plan_for: Callable[[Device], tuple[int, CapacityPlan]],
    lengths: Lengths,
    names: dict[str, str],
    chosen: str,
) -> list[dict[str, Any]]:
    """Requests at once on each device by each rule, and for each of the devices that share the model; `why`
    where they cannot hold it. `plan_for` gives how many share it, and the plan of one of them."""
    rows: list[dict[str, Any]] = []
    for device in DEVICES:
        row: dict[str, Any] = {
            "device": device.name,
            "memory": size_text(device.memory_bytes),
            "chosen": device.name == chosen,
            "why": None,
            "devices": None,
            "requests": {},
        }
        try:
            devices, plan = plan_for(device)
            row["requests"] = Rules(plan, lengths).requests
            row["devices"] = devices
            row["memory"] = size_text(device.memory_bytes) if devices == 1 else f"{devices} × {row['memory']}"
        except DenimError as error:
            row["why"] = str(error)
        rows.append(row)
    most = max((n / row["devices"] for row in rows for n in row["requests"].values()), default=0)
    for row in rows:
        row["bars"] = [
            {
                "key": key,
                "name": f"{names[key]}: {n:,} in all",
                "requests": n,
                "text": each_text(n / row["devices"]),
                "width": _percent(n / row["devices"], most),
            }
            for key, n in row["requests"].items()
        ]
    return rows


def each_text(requests: float) -> str:
    """Requests for one of several devices: whole, but for the smallest numbers."""
    return f"{requests:,.0f}" if requests >= 10 else f"{requests:.2g}"


def _percent(part: float, whole: float) -> str:
    """As a style sheet takes it."""
    return f"{100 * part / whole:.3f}%" if whole else "0%"
