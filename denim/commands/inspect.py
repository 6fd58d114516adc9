"""`denim inspect`: what a model folder holds and how Denim will lay it out.

Owns the report. Reads configs and the headers of safetensors files, never a weight; imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from denim.commands.configs import Config, find_config
from denim.commands.facts import print_facts
from denim.errors import ConfigError
from denim.ledger import count_parameters, weight_bytes
from denim.ledger.units import count_text, pattern_text, plural, size_text
from denim.memory.capacity_plan import PAGE_SIZE
from denim.memory.layout import ArenaLayout
from denim.spec import ModelSpec, read_generation_defaults, read_spec


def show_model(model: Path | None, as_json: bool) -> None:
    """Print what is known of a config, a model folder or a published model (None: the embedded model).

    Raises ConfigError for a config or a safetensors header that cannot be read.
    """
    report = describe(find_config(model))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print_facts(rows(report))


def describe(config: Config) -> dict[str, Any]:
    """The report as plain JSON values. Of a published model there is the config alone: `files` and
    `tokenizer` are None."""
    place = config.place
    spec = read_spec(place)
    layout = ArenaLayout.of(spec, PAGE_SIZE)
    counts = count_parameters(spec)
    folder = place if place.is_dir() else place.parent
    return {
        "name": config.name,
        "family": spec.family,
        "layers": spec.pattern,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position": spec.max_position,
        "mixers": _kinds(spec, "mixer"),
        "ffns": _kinds(spec, "ffn"),
        "rope": None if spec.rope is None else asdict(spec.rope),
        "tie_embeddings": spec.tie_embeddings,
        "mtp_layers": len(spec.mtp_layers),
        "dtype": spec.dtype,
        "state_dtype": spec.state_dtype,
        "weight_blocks": spec.weight_blocks,
        "parameters": counts._asdict() | {"total": counts.total},
        "weight_bytes": weight_bytes(spec),
        "weight_bytes_with_fp8_blocks": weight_bytes(spec, fp8_blocks=True),
        "page_size": PAGE_SIZE,
        "entries": {
            entry.name: {"bytes": entry.entry_bytes, "stride": entry.stride, "per_slab": entry.count}
            for entry in layout.classes
        },
        "slab_bytes": layout.slab_bytes,
        "files": None if config.published else _files(folder),
        "tokenizer": None if config.published else (folder / "tokenizer.json").is_file(),
        "generation": asdict(read_generation_defaults(place)),
    }


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, text) of each line that a person reads."""
    counts = {key: count_text(value) for key, value in report["parameters"].items()}
    tied = ", also the head" if report["tie_embeddings"] else f", head {counts['head']}"
    mtp = f", MTP head {counts['mtp']}" if report["mtp_layers"] else ""
    lines = [
        ("model", f"{report['name']} ({report['family']})"),
        ("layers", f"{pattern_text(report['layers'])} = {len(report['layers'])}"),
    ]
    lines += [(f"  {letter}", _fields_text(mixer)) for letter, mixer in report["mixers"].items()]
    lines += [("  FFN", _fields_text(ffn)) for ffn in report["ffns"].values() if ffn["kind"] != "NoFFN"]
    rope = report["rope"]
    turned = "no RoPE" if rope is None else f"RoPE theta {rope['theta']:,.0f}"
    if rope is not None and rope["kind"] == "yarn":
        turned += f", YaRN × {rope['factor']:g}"
    lines += [
        ("hidden size", f"{report['hidden_size']:,}"),
        ("vocabulary", f"{report['vocab_size']:,}"),
        ("context", f"{report['max_position']:,} tokens, {turned}"),
        ("dtypes", f"{report['dtype']}, states {report['state_dtype']}{_quantised_text(report)}"),
        (
            "parameters",
            f"{counts['total']}: layers {counts['layers']}, embedding {counts['embedding']}{tied}{mtp}; "
            f"{size_text(report['weight_bytes'])}",
        ),
        ("in memory", _memory_text(report)),
    ]
    if report["files"] is None:
        return [*lines, ("files", "none: a published model's config alone comes with Denim")]
    lines += [
        ("files", _files_text(report["files"])),
        ("MTP head", _mtp_text(report)),
        ("tokenizer", "there" if report["tokenizer"] else "none: it serves token ids, not text"),
    ]
    generation = report["generation"]
    stated = {k: v for k, v in generation.items() if v is not None and k != "end_token_ids"}
    lines += [
        ("end tokens", ", ".join(map(str, generation["end_token_ids"])) or "none"),
        ("sampling", _fields_text(stated) or "no recommendation"),
    ]
    return lines


def _kinds(spec: ModelSpec, part: str) -> dict[str, dict[str, Any]]:
    """The different mixers by letter, or FFNs by number, each with its fields."""
    kinds = list(dict.fromkeys(getattr(layer, part) for layer in spec.layers))
    return {
        getattr(kind, "letter", str(number)): {"kind": type(kind).__name__, **asdict(kind)}
        for number, kind in enumerate(kinds)
    }


def _files(folder: Path) -> dict[str, Any]:
    """What the safetensors headers say: files, tensors, elements by dtype."""
    paths = sorted(folder.glob("*.safetensors"))
    elements: Counter[str] = Counter()
    tensors = mtp_tensors = 0
    for path in paths:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    header = file.get_slice(name)
                    elements[header.get_dtype()] += prod(header.get_shape())
                    tensors += 1
                    mtp_tensors += name.startswith("mtp.")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}; download it again") from error
    size = sum(path.stat().st_size for path in paths)
    return {
        "count": len(paths),
        "bytes": size,
        "tensors": tensors,
        "mtp_tensors": mtp_tensors,
        "elements": dict(elements),
    }


def _fields_text(fields: dict[str, Any]) -> str:
    parts = []
    for key, value in fields.items():
        name = key.replace("_", " ")
        if isinstance(value, dict):
            parts.append(f"{name} ({_fields_text(value)})")
        elif key != "kind" and value is not False and value is not None:
            parts.append(name if value is True else f"{name} {value}")
    text = ", ".join(parts)
    return ": ".join(part for part in (fields.get("kind", ""), text) if part)


def _quantised_text(report: dict[str, Any]) -> str:
    if report["weight_blocks"] is None:
        return ""
    blocks = "; files: FP8 weights in blocks of {} × {}, ".format(*report["weight_blocks"])
    kept = report["weight_bytes_with_fp8_blocks"]
    if kept == report["weight_bytes"]:
        return blocks + "dequantised on loading"
    return blocks + f"as they are on Hopper ({size_text(kept)} of weights there), dequantised elsewhere"


def _memory_text(report: dict[str, Any]) -> str:
    parts = []
    if "page" in report["entries"]:
        parts.append(
            f"a page of {report['page_size']} tokens {size_text(report['entries']['page']['bytes'])}"
        )
    if "slot" in report["entries"]:
        parts.append(f"a slot {size_text(report['entries']['slot']['bytes'])}")
    share = " or ".join(
        f"{entry['per_slab']} {plural(name, entry['per_slab'])}" for name, entry in report["entries"].items()
    )
    return f"{', '.join(parts)}; a slab {size_text(report['slab_bytes'])} = {share}"


def _mtp_text(report: dict[str, Any]) -> str:
    """Fine-tunes often drop the head and keep the config's key, or the other way round."""
    promised, found = report["mtp_layers"], report["files"]["mtp_tensors"]
    if promised and found:
        return f"there: layers {promised}, tensors {found}"
    if promised:
        return "expected, not in the files" if report["files"]["count"] else "expected"
    return "in the files, not in the config: it is left out" if found else "none"


def _files_text(files: dict[str, Any]) -> str:
    if not files["count"]:
        return "no *.safetensors"
    elements = ", ".join(f"{count_text(count)} in {dtype}" for dtype, count in files["elements"].items())
    return (
        f"{files['count']} safetensors, {size_text(files['bytes'])}, {files['tensors']} tensors ({elements})"
    )
