"""One choice of settings, and all that the explorer shows of it, as plain JSON values.

Owns the composition and the sentences. Knows ledger, plan and the page's parts; nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from denim.errors import ConfigError, DenimError
from denim.ledger.cost import Ledger, ledger_of
from denim.ledger.devices import Device, find_device
from denim.ledger.lengths import Lengths
from denim.ledger.parameters import count_parameters
from denim.ledger.step_floor import decode_floor, prefill_floor
from denim.ledger.tensor_parallel import share_of
from denim.ledger.units import count_text, pattern_text, seconds_text, size_text
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.fewest_devices import fewest_devices
from denim.spec import read_spec
from denim.spec.config_file import Source
from denim.spec.dials import dials_of, turned
from denim.spec.illustrative import illustrative
from denim.spec.model import ModelSpec
from denim.spec.published import GROUPS, published_configs
from denim.web.controls import controls_of
from denim.web.curves import interval_curve, memory_curve
from denim.web.holdings import Rules, device_rows, engine_names, filling_steps
from denim.web.settings import Settings

ILLUSTRATIVE = "48 layers, one in four full"
DECODE_BATCH = 32
UNIT = re.compile(r"(\d) (?=(?:[KMGTP]iB|B|ms|µs|s)\b)")


@dataclass(frozen=True)
class Offer:
    """What can be chosen beside the published models: `own` models by name, and the lengths of a trace."""

    own: Mapping[str, Source]
    trace: Lengths | None = None

    def groups(self) -> dict[str, list[str]]:
        """Names of all models, by heading."""
        own = {"Yours": list(self.own)} if self.own else {}
        published = {group: list(names) for group, names in GROUPS.items()}
        return own | {"Made up": [ILLUSTRATIVE]} | published

    def spec(self, settings: Settings) -> ModelSpec:
        """The chosen model, nothing turned. Raises ConfigError for a name that is not offered."""
        if settings.model == ILLUSTRATIVE:
            auto = {"dtype": settings.dtype, "state_dtype": settings.state_dtype}
            return illustrative(**{name: dtype for name, dtype in auto.items() if dtype != "auto"})
        sources = published_configs() | dict(self.own)
        if settings.model not in sources:
            raise ConfigError(f"model={settings.model!r} is not offered; known: {', '.join(sources)}")
        return read_spec(sources[settings.model], dtype=settings.dtype, state_dtype=settings.state_dtype)

    def lengths(self, settings: Settings) -> Lengths:
        """The chosen workload. Raises ConfigError for a trace where none was given."""
        if settings.lengths == "fixed":
            return Lengths.fixed(settings.tokens)
        if settings.lengths == "lognormal":
            return Lengths.lognormal(settings.tokens, settings.sigma)
        if self.trace is None:
            raise ConfigError("lengths='trace': this explorer was started without --trace")
        return self.trace


def explored(settings: Settings, offer: Offer) -> dict[str, Any]:
    """Everything on the page. Raises ConfigError for settings that do not go together.

    Where the model does not fit on the device, `misfit` says why and `filling` is None; what does not depend
    on a device is there all the same.
    """
    own = offer.spec(settings)
    spec, dials = turned(own, settings.changes), dials_of(own)
    device, lengths = find_device(settings.device, "device"), offer.lengths(settings)

    def plan_for(chosen: Device, gpus: int | None) -> tuple[int, CapacityPlan]:
        kv_dtype, page, chunk = settings.kv_dtype, settings.page, settings.chunk
        of = partial(CapacityPlan.of, spec, chosen, kv_dtype=kv_dtype, page_size=page, chunk=chunk)
        return fewest_devices(of) if gpus is None else (gpus, of(devices=gpus))

    plan = rules = misfit = None
    gpus = settings.gpus or 1
    try:
        gpus, plan = plan_for(device, settings.gpus)
        rules = Rules(plan, lengths)
    except DenimError as error:
        misfit = str(error)
    fewest = gpus
    if settings.gpus is not None:
        with suppress(DenimError):  # no number of devices holds it
            fewest = plan_for(device, None)[0]
    share = share_of(spec, gpus)
    ledger = ledger_of(share, settings.kv_dtype)
    names = engine_names(spec.family, bool(ledger.bytes_per_request))
    mean = max(1, round(lengths.mean_tokens))
    trace = None if offer.trace is None else offer.trace.name
    return {
        "settings": settings.model_dump(),
        "controls": controls_of(settings, offer.groups(), dials, trace, fewest),
        "dials": [dial.name for dial in dials],
        "model": {
            "name": settings.model,
            "turned": bool(settings.changes),
            "layers": spec.pattern,
            "text": f"{pattern_text(spec.pattern)} · {count_text(count_parameters(spec).total)} parameters"
            + (" · dims turned" if settings.changes else ""),
        },
        "headline": _headline(rules, lengths, device, gpus) if rules else misfit,
        "misfit": misfit,
        "facts": _facts(ledger, gpus) + (_plan_facts(plan, rules, lengths) if plan and rules else []),
        "memory": memory_curve(share, ledger, settings.kv_dtype, mean),
        "filling": None if rules is None else filling_steps(rules, names),
        "step": settings.step,
        "intervals": interval_curve(ledger, mean),
        "devices": device_rows(lambda one: plan_for(one, settings.gpus), lengths, names, device.name),
        "engines": names,
        "device_note": _device_note(lengths, settings.gpus),
        "lengths": _of(lengths),
        "starred": any(name.endswith("*") for name in names.values()),
    }


def _headline(rules: Rules, lengths: Lengths, device: Device, gpus: int) -> str:
    held = rules.requests
    place = f"One {device.name} holds" if gpus == 1 else f"{gpus} × {device.name} hold"
    return (
        f"{place} {held['denim']:,} requests of {_of(lengths)} at once. The same memory under vLLM's rule: "
        f"{held['vllm']:,}; under SGLang's: {held['sglang']:,}."
    )


def _device_note(lengths: Lengths, gpus: int | None) -> str:
    share = {None: "each of the fewest devices that hold the model", 1: "one device"}
    place = share.get(gpus, f"each of {gpus} devices that share the model")
    return f"Requests of {_of(lengths)} whose states and KV are in memory together, for {place}."


def _of(lengths: Lengths) -> str:
    """As it stands behind "requests of"."""
    if len(lengths.totals) == 1:
        return lengths.name
    return f"{lengths.mean_tokens:,.0f} tokens on average ({lengths.name})"


def _facts(ledger: Ledger, gpus: int) -> list[dict[str, Any]]:
    """What follows from the model alone."""
    crossover, full = ledger.crossover_tokens, ledger.all_full_kv_bytes_per_token
    kv, state = ledger.kv_bytes_per_token, ledger.bytes_per_request
    each = "" if gpus == 1 else ", on each device"
    equal = ledger.checkpoint_equals_kv_of_tokens
    worth = f"as much as the KV of {equal:,} tokens" if equal else "a checkpoint is a copy of it"
    return [
        _fact(
            "crossover",
            "crossover",
            crossover,
            "none" if crossover is None else f"{crossover:,} tokens",
            f"from here on the hybrid is the smaller{each}"
            if crossover
            else "states and KV never trade places",
        ),
        _fact(
            "kv",
            "a token",
            kv,
            size_text(kv),
            f"of KV{each}; {size_text(full)} if all were full" if full else "of KV",
        ),
        _fact(
            "state", "a request", state, size_text(state), f"of state{each}: {worth}" if state else "no state"
        ),
    ]


def _plan_facts(plan: CapacityPlan, rules: Rules, lengths: Lengths) -> list[dict[str, Any]]:
    """What follows from the device too."""
    requests = rules.requests["denim"]
    batch = max(1, min(DECODE_BATCH, requests))
    prompt = max(1, round(rules.lengths.mean_prompt))
    decode = decode_floor(plan.spec, plan.ledger, plan.device, rules.lengths.mean_tokens, batch)
    prefill = prefill_floor(plan.spec, plan.ledger, plan.device, prompt, plan.chunk)
    left_out = len(lengths.totals) - len(rules.lengths.totals)
    return [
        _fact(
            "requests",
            "requests at once",
            requests,
            f"{requests:,}",
            f"{left_out:,} of {len(lengths.totals):,} lengths left out, too long"
            if left_out
            else "slots and pages, nothing reserved",
        ),
        _fact(
            "arena",
            "arena",
            plan.arena_bytes,
            size_text(plan.arena_bytes),
            f"beside {size_text(plan.weight_bytes)} of weights, {size_text(plan.working_bytes)} to work in; "
            f"{plan.num_slabs:,} slabs of {size_text(plan.layout.slab_bytes)}",
        ),
        _fact(
            "floor",
            "a step, at best",
            decode.seconds,
            seconds_text(decode.seconds),
            f"to decode {batch:,} tokens; {seconds_text(prefill.seconds)} to the first token "
            f"after a prompt of {prompt:,}",
        ),
    ]


def _fact(key: str, label: str, value: float | None, text: str, note: str) -> dict[str, Any]:
    kept = UNIT.sub("\\1\u00a0", note)  # a number and its unit stay on one line
    return {"key": key, "label": label, "value": value, "text": text, "note": kept}
