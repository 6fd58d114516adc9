"""Mark-up, navigation, repeats and boilerplate leave the text; what a person reads stays."""

from __future__ import annotations

from pathlib import Path

from training.corpus import documents, text_of_html, tidy
from training.sources import Source

PAGE = """<html><head><title>T</title><script>x()</script></head><body>
<div class="sphinxsidebar"><ul><li>Menu<li>More</ul></div>
<h1>Head</h1><p>One &amp; two<br>three <b>bold</b>.<pre>a
  b</pre><div class="related">Next</div><p>End</body></html>"""


def test_html_loses_mark_up_and_navigation() -> None:
    text = tidy(text_of_html(PAGE))
    assert all(part in text for part in ("Head", "One & two", "three bold.", "a\n  b", "End"))
    assert not any(part in text for part in ("Menu", "Next", "x()", "<"))


def test_plain_quotes_and_single_empty_lines() -> None:
    assert tidy("\u201ca\u201d  \n\n\n\nb\u2014c\r\n") == '"a"\n\nb-c'


def test_repeats_and_boilerplate_are_dropped_and_the_seed_decides_all(tmp_path: Path) -> None:
    source = Source("pages", "npm", "public domain", ("*.txt",), "text", 10**6)
    folder = tmp_path / "pages"
    folder.mkdir()
    long = "This paragraph is long enough to be compared and stands in two of the documents as it is. " * 2
    for i in range(130):
        own = f"Document number {i} has a text of its own. " * 8
        (folder / f"{i}.txt").write_text(f"Buy now\n\n{own}" + (f"\n\n{long}" if i < 2 else ""))
    first = documents(source, tmp_path, 1, set())
    again = documents(source, tmp_path, 1, set())
    everything = "\n".join(first.train + first.held_out)
    assert "Buy now" not in everything and everything.count(long.strip()) == 1
    assert first == again and len(first.held_out) == 3 and len(first.train) == 127
    assert documents(source, tmp_path, 2, set()) != first
