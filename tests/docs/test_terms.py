"""docs/terms.md: each term in three languages, each once, and none that nobody uses."""

from __future__ import annotations

import re

from .pages import ROOT, page, pages

PAGE = page("docs/terms.md")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.text.splitlines()
    if re.match(r"\| (?!term |-)", line) and not line.startswith("|---")
]
TERMS = [term for row in ROWS for term in re.split(r", |; ", row[0])]


def test_each_term_is_there_once_in_three_languages_with_what_it_means() -> None:
    assert len(ROWS) > 40
    assert all(len(row) == 4 and all(row) for row in ROWS), "term, Korean, Japanese, meaning"
    assert len(TERMS) == len({term.lower() for term in TERMS})


def test_each_term_is_used() -> None:
    """In a page, or in what the agent shows: names of the code do not count."""
    prose = [each.prose for each in pages() if each.name != PAGE.name]
    shown = [path.read_text() for path in (ROOT / "npu_agent/outputs/web").glob("*.py")]
    text = "\n".join([*prose, *shown])
    unused = [term for term in TERMS if not re.search(rf"\b{term}", text, re.IGNORECASE)]
    assert not unused


def test_words_of_the_code_alone_are_no_terms() -> None:
    text = page("docs/architecture.md").text
    table = text[text.index("| word | meaning |") :].split("\n\n", maxsplit=1)[0]
    words = re.findall(r"^\| (?!word|-)([^|]+) \|", table, re.MULTILINE)
    assert words
    both = {word for row in words for word in re.split(r"[,;] ", row)} & set(TERMS)
    assert not both, "one fact is in one place"
