"""The controls of the explorer: which settings there are for this model, and what each can be set to.

Owns their order, labels and texts. Knows settings and dials; computes no cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from denim.ledger.devices import DEVICES
from denim.memory.fewest_devices import NUMBERS
from denim.spec.dials import FULL_SHARE, Dial
from denim.web.settings import Settings

DTYPE_TEXTS = {
    "auto": "as the model says",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float8_e4m3fn": "float8 (e4m3)",
}
TOKENS = (*(n << k for k in range(4, 19) for n in (2, 3)), 1 << 20)
SIGMAS = tuple(n / 10 for n in range(21))
PAGES, CHUNKS = (1, 8, 16, 32, 64, 128, 256), (16, 32, 64, 128, 256)


def controls_of(
    settings: Settings, groups: dict[str, list[str]], dials: tuple[Dial, ...], trace: str | None, fewest: int
) -> list[dict[str, Any]]:
    """Groups of controls: {title, controls: [{name, label, kind, value, own, options: [{value, text}]}]}.

    `groups`: names of models by heading. Setting a control to its `own` value takes it out of the link.
    `trace`: the name of a trace whose lengths may be chosen. `fewest`: devices that hold the model.
    """
    return [
        {"title": "Model", "controls": [_models(settings, groups)]},
        {
            "title": "Device",
            "controls": [
                _select("device", "device", settings, [(device.name, device.name) for device in DEVICES]),
                _gpus(settings, fewest),
            ],
        },
        {"title": "Requests", "controls": _requests(settings, trace)},
        {"title": "Dims of the model", "controls": [_dial(dial, settings) for dial in dials]},
        {
            "title": "Numbers",
            "controls": [
                _dtype("state_dtype", "states in", settings, ("auto", "float32", "bfloat16", "float16")),
                _dtype("kv_dtype", "KV in", settings, ("auto", "bfloat16", "float8_e4m3fn", "float32")),
                _dtype("dtype", "weights in", settings, ("auto", "bfloat16", "float32")),
                _slider("page", "page", settings, PAGES, "{:,} tokens"),
                _slider("chunk", "chunk", settings, CHUNKS, "{:,} tokens"),
            ],
        },
    ]


def _requests(settings: Settings, trace: str | None) -> list[dict[str, Any]]:
    kinds = [("fixed", "all of one length"), ("lognormal", "lognormal")]
    if trace is not None:
        kinds.append(("trace", trace))
    found = [_select("lengths", "lengths", settings, kinds)]
    if settings.lengths != "trace":
        label = "tokens" if settings.lengths == "fixed" else "tokens, on average"
        found.append(_slider("tokens", label, settings, TOKENS, "{:,}"))
    if settings.lengths == "lognormal":
        found.append(_slider("sigma", "σ of the logarithm", settings, SIGMAS, "{:g}"))
    return found


def _models(settings: Settings, groups: dict[str, list[str]]) -> dict[str, Any]:
    options = [
        {"value": name, "text": name, "group": group} for group, names in groups.items() for name in names
    ]
    own = Settings.model_fields["model"].default
    return _control("model", "start from", "select", settings.model, own, options)


def _gpus(settings: Settings, fewest: int) -> dict[str, Any]:
    value = settings.gpus or fewest
    options = [{"value": str(n), "text": f"{n:,}"} for n in sorted({*NUMBERS, value})]
    return _control("gpus", "devices that share the model", "slider", str(value), str(fewest), options)


def _dial(dial: Dial, settings: Settings) -> dict[str, Any]:
    """`dial` is the model's own; what the settings make of it is the value."""
    turned = getattr(settings, dial.name)
    value = dial.value if turned is None else turned
    options = [
        {"value": _plain(v), "text": f"{v:.3g}%" if dial.name == FULL_SHARE else f"{v:,}"}
        for v in dial.values
    ]
    return _control(dial.name, dial.label, "slider", _plain(value), _plain(dial.value), options)


def _dtype(name: str, label: str, settings: Settings, known: Iterable[str]) -> dict[str, Any]:
    value = getattr(settings, name)
    names = dict.fromkeys([*known, value])
    return _select(name, label, settings, [(dtype, DTYPE_TEXTS[dtype]) for dtype in names])


def _select(name: str, label: str, settings: Settings, options: list[tuple[str, str]]) -> dict[str, Any]:
    own = Settings.model_fields[name].default
    shown = [{"value": value, "text": text} for value, text in options]
    return _control(name, label, "select", getattr(settings, name), own, shown)


def _slider(name: str, label: str, settings: Settings, values: Iterable[float], text: str) -> dict[str, Any]:
    """The link's own value is among the values, wherever it comes from."""
    value, own = getattr(settings, name), Settings.model_fields[name].default
    options = [{"value": _plain(v), "text": text.format(v)} for v in sorted({*values, value})]
    return _control(name, label, "slider", _plain(value), _plain(own), options)


def _control(
    name: str, label: str, kind: str, value: str, own: str, options: list[dict[str, str]]
) -> dict[str, Any]:
    return {"name": name, "label": label, "kind": kind, "value": value, "own": own, "options": options}


def _plain(value: float) -> str:
    """As it stands in a link: 24, 12.5."""
    return repr(int(value)) if value == int(value) else repr(float(value))
