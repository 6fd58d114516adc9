"""What training reads: token streams by source, and the facts that chat turns are made from.

Owns the files of the data folder. Run as a script it makes them, and the tokenizer, from the fetched
packages; `training.train` and `training.evaluate` load them. Depends on the packages and the seed alone.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training import tokenizer as bpe
from training.corpus import Documents, documents
from training.sources import SOURCES, folder
from training.wordnet import first_senses

SEED = 20
TOKENIZER_SHARE = 0.3  # of the documents, to merge the vocabulary from
LONGEST_MEANING = 110  # characters of a gloss that a chat answer gives
LONGEST_FACT = 60

Ids = NDArray[np.uint16]


class Facts(NamedTuple):
    """meanings: [word, part of speech, gloss]; countries: name -> {"capital", "region", "language"}."""

    meanings: list[list[str]]
    countries: dict[str, dict[str, str]]


class Data(NamedTuple):
    """Token streams by source name (documents end with the end-of-text token), and the facts."""

    train: dict[str, Ids]
    held_out: dict[str, Ids]
    held_out_bytes: dict[str, int]
    facts: Facts


def _text(node: dict, *path: str) -> str:
    """The text at a path of a country profile, "" where there is none."""
    for key in (*path, "text"):
        node = node.get(key, {}) if isinstance(node, dict) else {}
    return node if isinstance(node, str) else ""


def _country_facts(scratch: Path) -> dict[str, dict[str, str]]:
    source = next(source for source in SOURCES if source.kind == "factbook")
    found = {}
    for path in sorted(folder(source, scratch).glob(source.patterns[0])):
        country = json.loads(path.read_text(encoding="utf-8"))
        government = country.get("Government", {})
        name = _text(government, "Country name", "conventional short form")
        facts = {
            "capital": _text(government, "Capital", "name"),
            "region": _text(country, "Geography", "Map references"),
            "language": _text(country, "People and Society", "Languages"),
        }
        facts = {key: re.split(r"[;(,]|[\d.]+%", value)[0].strip() for key, value in facts.items()}
        if not name or name == "none" or not name.isascii():
            continue
        usable = {
            k: v for k, v in facts.items() if v and v != "none" and len(v) < LONGEST_FACT and v.isascii()
        }
        if usable:
            found[name] = usable
    return found


def _facts(scratch: Path) -> Facts:
    wordnet = next(source for source in SOURCES if source.kind == "wordnet")
    meanings = []
    for sense in first_senses(folder(wordnet, scratch) / "usr/share/wordnet"):
        gloss = re.sub(r"^\([^)]*\) *", "", sense.gloss).split(";")[0].strip()
        if 8 <= len(gloss) <= LONGEST_MEANING and gloss.isascii() and len(sense.words[0]) > 2:
            meanings.append([sense.words[0], sense.part, gloss])
    return Facts(meanings, _country_facts(scratch))


def _stream(tokenizer: Tokenizer, texts: list[str]) -> Ids:
    end = tokenizer.token_to_id(bpe.END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast(texts)
    return np.fromiter((i for text in encoded for i in (*text.ids, end)), np.uint16)


def build(scratch: Path, out: Path, model: Path) -> None:
    """Writes the data folder `out` and the tokenizer's files into `model`."""
    seen: set[bytes] = set()
    texts: dict[str, Documents] = {s.name: documents(s, scratch, SEED, seen) for s in SOURCES}
    rng = random.Random(SEED)
    sample = [text for d in texts.values() for text in d.train if rng.random() < TOKENIZER_SHARE]
    tokenizer = bpe.train(sample)
    bpe.save(tokenizer, model)
    out.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for source in SOURCES:
        train, held_out = texts[source.name]
        arrays[f"train/{source.name}"] = _stream(tokenizer, train)
        arrays[f"held_out/{source.name}"] = _stream(tokenizer, held_out)
        arrays[f"bytes/{source.name}"] = np.array(sum(len(text.encode()) for text in held_out))
        characters, tokens = sum(map(len, train)), len(arrays[f"train/{source.name}"])
        print(
            f"{source.name:30} {characters:>10} characters {tokens:>9} tokens {source.repeats} times",
            flush=True,
        )
    np.savez_compressed(out / "tokens.npz", **arrays)
    (out / "facts.json").write_text(json.dumps(_facts(scratch)._asdict(), indent=0))


def load(out: Path) -> Data:
    """Reads what `build` wrote."""
    arrays = np.load(out / "tokens.npz")
    parts = {part: {s.name: arrays[f"{part}/{s.name}"] for s in SOURCES} for part in ("train", "held_out")}
    sizes = {s.name: int(arrays[f"bytes/{s.name}"]) for s in SOURCES}
    return Data(
        parts["train"], parts["held_out"], sizes, Facts(**json.loads((out / "facts.json").read_text()))
    )


def main(
    scratch: Annotated[Path, typer.Argument(help="where training.sources unpacked the packages")],
    out: Annotated[Path, typer.Argument(help="the data folder to write")],
    model: Annotated[Path, typer.Argument(help="the model folder, for the tokenizer")],
) -> None:
    build(scratch, out, model)


if __name__ == "__main__":
    typer.run(main)
