"""The small models of all rows without transformers, which may not know a family where the GPU is.

`small_configs.json` has the config of every row as transformers saves it; `python -m tests.families.small`
writes it again, and a test compares the two. Weights are drawn here, of sizes that keep logits of order one.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from denim.layers.norm import RMSNorm
from denim.models.registry import family_of
from denim.spec.reader import read_spec
from tests import families
from tests.families.row import Row

FILE = Path(__file__).parent / "small_configs.json"
MATRIX, VECTOR = 0.2, 0.3


def rows() -> dict[str, Row]:
    """Every row of the package, by name."""
    found: list[Row] = []
    for module in pkgutil.iter_modules(families.__path__):
        found += getattr(importlib.import_module(f"tests.families.{module.name}"), "ROWS", [])
    return {row.name: row for row in found}


def configs() -> dict[str, dict]:
    return json.loads(FILE.read_text())


def save(name: str, folder: Path, seed: int = 0) -> None:
    """Write the row's config and random weights in fp32, under the names that the model asks for."""
    (folder / "config.json").write_text(json.dumps(configs()[name]))
    spec = read_spec(folder)
    model = family_of(spec).build(spec, chunk_size=64, device="cpu")
    ones = {
        module.weight.data_ptr()
        for module in model.modules()
        if isinstance(module, RMSNorm) and not module.zero_centred
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for key, target in sorted(model.targets().items()):
        noise = torch.randn(target.shape, generator=generator)
        if target.data_ptr() in ones or key.endswith((".norm.weight", ".D")):
            noise = 1 + VECTOR * noise
        else:
            noise *= MATRIX if target.ndim >= 2 and "A_log" not in key else VECTOR
        tensors[key] = noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    texts = []
    for row in rows().values():
        with tempfile.TemporaryDirectory() as made:
            row.save(Path(made))
            config = json.loads((Path(made) / "config.json").read_text())
        config.pop("transformers_version", None)
        texts.append(f"{json.dumps(row.name)}: {json.dumps(config, sort_keys=True)}")
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n")
