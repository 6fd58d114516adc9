"""Clean text: the files of the packages in `training.sources` without mark-up, duplicates or fragments.

Owns the rules that turn a package into documents and the split into training and held-out documents.
Knows nothing of tokens. The result depends on the packages and the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from training.sources import Source, folder
from training.wordnet import meanings

SKIPPED_TAGS = {"script", "style", "head", "nav", "header", "footer", "svg", "noscript", "button"}
SKIPPED_CLASSES = {
    "sphinxsidebar", "related", "headerlink", "navheader", "navfooter", "toc", "footer", "navbar", "linenos",
    "docs-navigation-links", "docs-top-navigation-container", "docs-sidebar-nav", "mark", "clearer", "menu",
}  # fmt: skip
VOID_TAGS = {"br", "img", "hr", "input", "meta", "link", "col", "area", "source", "wbr"}
OFTEN_LEFT_OPEN = {"p", "li", "dt", "dd", "tr", "td", "th", "option", "colgroup", "tbody", "thead"}
BLOCK_TAGS = {"p", "div", "li", "ul", "ol", "tr", "table", "pre", "section", "dt", "dd", "blockquote"} | {
    f"h{level}" for level in range(1, 7)
}
HELD_OUT_EVERY = 64  # one document in so many is held out
BOILERPLATE_SHARE = 0.05  # a paragraph found in more than this share of a source's documents is dropped
SHORTEST_DOCUMENT = 300  # characters
COMPARED_PARAGRAPH = 80  # paragraphs from this length on are kept once
MEANINGS_A_DOCUMENT = 40
LONGEST_CODE_LINE = 400  # longer lines are generated tables


class Documents(NamedTuple):
    """Documents of one source, in seeded order."""

    train: list[str]
    held_out: list[str]


class _TextOfHtml(HTMLParser):
    """Collects the readable text of a page; navigation and scripts are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0  # open elements at and below the one that is left out
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCK_TAGS or tag == "br":
            self.parts.append("\n")
        if tag in VOID_TAGS or tag in OFTEN_LEFT_OPEN:
            return
        classes = set((dict(attrs).get("class") or "").split())
        if self.skipping or tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES:
            self.skipping += 1
        self.preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCK_TAGS:
            self.parts.append("\n")
        if tag in VOID_TAGS or tag in OFTEN_LEFT_OPEN:
            return
        self.skipping = max(0, self.skipping - 1)
        self.preformatted = max(0, self.preformatted - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """The readable text of an HTML page, one block a line."""
    parser = _TextOfHtml()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts)


def tidy(text: str) -> str:
    """The same text with plain quotes and dashes, no trailing blanks, at most one empty line in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ").replace("\u00b6", "")
    text = text.translate(
        str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "..."})
    )
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n +(?=[A-Z][a-z])", "\n", text)  # what is left of inline mark-up at line starts
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def text_of_country(country: dict) -> str:
    """A country profile of the World Factbook as headings and lines."""
    lines: list[str] = []

    def visit(node: object, title: str) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("text"), str):
                lines.append(f"{title}: {node['text']}" if title else node["text"])
            for key, child in node.items():
                visit(child, key)

    for section, content in country.items():
        lines.append(f"\n{section}")
        visit(content, "")
    return "\n".join(lines)


def _raw_documents(source: Source, scratch: Path, rng: random.Random) -> list[str]:
    root = folder(source, scratch)
    if source.kind == "wordnet":
        senses = [
            f"{', '.join(m.words)} ({m.part}): {m.gloss}."
            + "".join(f' "{example}"' for example in m.examples)
            for m in meanings(root / "usr/share/wordnet")
        ]
        rng.shuffle(senses)
        return [
            "\n".join(senses[start : start + MEANINGS_A_DOCUMENT])
            for start in range(0, len(senses), MEANINGS_A_DOCUMENT)
        ]
    paths = sorted({path for pattern in source.patterns for path in root.glob(pattern) if path.is_file()})
    rng.shuffle(paths)
    documents = []
    size = 0
    for path in paths:
        if size > 2 * source.limit:  # dedup removes some; more than this is never needed
            break
        content = path.read_text(encoding="utf-8", errors="ignore")
        if source.kind == "html":
            content = text_of_html(content)
        elif source.kind == "factbook":
            content = text_of_country(json.loads(content))
        elif source.kind == "code" and (
            "testdata" in path.parts or "DO NOT EDIT" in content or path.stem.endswith("_test")
        ):
            continue
        documents.append(content)
        size += len(content)
    return documents


def documents(source: Source, scratch: Path, seed: int, seen: set[bytes]) -> Documents:
    """The clean documents of one source.

    `scratch` is where `training.sources` unpacked the packages; `seen` holds the digests of paragraphs that
    other sources have given already, and is added to.
    """
    rng = random.Random(f"{seed} {source.name}")
    pages = [tidy(raw).split("\n\n") for raw in _raw_documents(source, scratch, rng)]
    found_in = Counter(paragraph for page in pages for paragraph in set(page))
    common = {p for p, count in found_in.items() if count > max(3, BOILERPLATE_SHARE * len(pages))}
    result = Documents([], [])
    size = 0
    for number, page in enumerate(pages):
        text = "\n\n".join(
            p for p in page if p not in common and _is_new(p, seen) and _is_readable(p, source)
        )
        if len(text) < SHORTEST_DOCUMENT or size + len(text) > source.limit:
            continue
        size += len(text)
        (result.train if number % HELD_OUT_EVERY else result.held_out).append(text)
    return result


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    if len(paragraph) < COMPARED_PARAGRAPH:
        return True
    digest = hashlib.blake2b(paragraph.encode(), digest_size=10).digest()
    new = digest not in seen
    seen.add(digest)
    return new


def _is_readable(paragraph: str, source: Source) -> bool:
    return source.kind != "code" or max(map(len, paragraph.split("\n"))) <= LONGEST_CODE_LINE
