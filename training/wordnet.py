"""WordNet's database files as words with their meaning.

Owns the reading of `index.*`, `data.*` and `cntlist.rev` (format: wndb(5WN)). Knows nothing of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PARTS_OF_SPEECH = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
LEAST_COUNT = 3
SPOKEN = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


class Meaning(NamedTuple):
    """One sense: words that share it, part of speech ("noun", …), gloss without examples, examples,
    and how often the first word was tagged with it in WordNet's texts."""

    words: tuple[str, ...]
    part: str
    gloss: str
    examples: tuple[str, ...]
    count: int


def _synsets(folder: Path, part: str) -> dict[str, Meaning]:
    """Every synset of one part of speech by its offset."""
    found = {}
    for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
        if line.startswith("  "):  # the licence
            continue
        record, _, tail = line.partition(" | ")
        fields = record.split()
        number = int(fields[3], 16)
        words = tuple(w.split("(")[0].replace("_", " ") for w in fields[4 : 4 + 2 * number : 2])
        pieces = [piece.strip() for piece in tail.split("; ")]
        gloss = "; ".join(piece for piece in pieces if not piece.startswith('"'))
        examples = tuple(piece.strip('"') for piece in pieces if piece.startswith('"'))
        found[fields[0]] = Meaning(words, SPOKEN[part], gloss, examples, 0)
    return found


def meanings(folder: Path) -> list[Meaning]:
    """All senses, in the order of the files. `folder` holds data.noun and its kin."""
    return [meaning for part in PARTS_OF_SPEECH for meaning in _synsets(folder, part).values()]


def first_senses(folder: Path) -> list[Meaning]:
    """The most frequent sense of every common single word, by word.

    Common: tagged at least `LEAST_COUNT` times in the texts that WordNet counts.
    """
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        key, _, count = line.split()
        lemma, _, sense = key.partition("%")
        part = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}[sense[0]]
        counts[lemma, part] = counts.get((lemma, part), 0) + int(count)
    best: dict[str, Meaning] = {}
    for part in PARTS_OF_SPEECH:
        synsets = _synsets(folder, part)
        for line in (folder / f"index.{part}").read_text(encoding="latin-1").splitlines():
            fields = line.split()
            if line.startswith("  ") or not fields[0].isalpha() or not fields[0].islower():
                continue
            count = counts.get((fields[0], part), 0)
            sense = synsets[fields[-int(fields[2])]]
            if fields[0] not in sense.words:  # a name, which the index gives in lower case
                continue
            if count > (best[fields[0]].count if fields[0] in best else LEAST_COUNT - 1):
                best[fields[0]] = sense._replace(words=(fields[0],), count=count)
    return [best[word] for word in sorted(best)]
