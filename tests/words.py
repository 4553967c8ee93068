"""Plain English: the word to prefer, short sentences in pages, no question for a remedy.

``python -m tests.words``, a part of ``make lint``, searches the package (names, comments,
docstrings, messages), the manifests and the English pages; with names of files, only those.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

MOST_WORDS = 25
"""In a sentence of a page."""


PREFER = {
    "with, alongside, next to, in addition to, during": r"besides?",
    "no Pod, no process, no client": r"nobody( else)?('s)?",
    "a user, another Pod, a process": r"(some|any)body( else)?('s)?",
    "the Pod that, any client that, who": r"whoever('s)?|who does(?: not)?",
    "anything that, any, even if": r"whatever",
    "during, within": r"amid(st)?",
    "rejected, without effect": r"in vain",
    "repeatedly, back and forth": r"to and fro|over and over( again)?",
    "also; or repeat what is the same": r"likewise|as it says",
    "anyway, still": r"all the same",
    "created with": r"born with",
    "treats X as": r"(takes?|took|taken) (a|an|the|it|them|this|that|its|their)( \w+)? for",
    "is not a, does not count as": r"(?<!there\s)(is|are) no (?!(longer|more|less|later)\b)(?=\w)",
    "unhealthy, failed": r"sick(ness)?|illness(es)?|ails?",
    "publish, report, log, or say it directly": r"told|tells? (of|about)|untold",
    "fix, repair, recover": r"mend(s|ed|ing)?",
    "again, new": r"anew",
    "release, drop, close": r"lets? go of|letting go of",
    "use, follow, compare": r"goes by|going by",
    "block, delay": r"h[eo]lds? up|holding up",
    "our, their, current, previous": r"of ours|of theirs|of now|of before",
    "remove": r"tak(es?|ing) away|took away|taken away",
    "say who does what": r"is had|has it what|(be|been|was|were) had",
    "say what happens": r"puts? up with|gone from under",
}
"""What to write, and a regular expression for the whole words of which one stands there instead."""

IN_CODE = {
    "probe, poll, read, check, search, inspect": r"look(s|ed|ing)? (at|for|on|again)",
    "immediately, at the same time": r"at once",
}
"""The same for the package, where each of these has a word of its own; pages may say "look at"."""

_PAGES = (
    *("docs/*.md", "docs/dev/*.md", "k8s/components/*.md", "k8s/chart/*.md", "k8s/examples/*.md"),
    *("docs/examples/**/*.md", "tests/*/README.md", "bench/*.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
_TRANSLATED = ("docs/ko/*.md", "docs/ja/*.md", "README.ko.md", "README.ja.md")
_CODE = ("npu_agent/**/*.py",)
_OTHERS = (
    *("npu_agent/**/*.js", "Makefile", "k8s/*.yaml", "k8s/components/**/*.yaml"),
    *("k8s/chart/**/*.yaml", "k8s/chart/templates/*.txt", "k8s/examples/**/*.yaml"),
)

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_UNSEEN = re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL)
_ITEM = re.compile(r"^\s*(?:>\s*)?(?:[-*+] |\d+[.)] |> ?|#+ )")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SHORT = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|no)\.", re.IGNORECASE)
_END = re.compile(r"[.!?][)*\"”]*(?=\s|$)")
_QUESTION = re.compile(r"(?i)(^|[:;,.] )(is|are|has|have|does|do|may|can|should|was)\b[^?\n]*\?")
_BY_NAME = re.compile(r"\b(?:pipx?|uvx?)\s+(?:\w+\s+)*(?:-\S+\s+)*[\"']?npu-agent\b")
_DO = re.compile(r"\b(do|fix|remedy)\b", re.IGNORECASE)


def found(text: str, *, code: bool = False) -> list[tuple[int, str]]:
    """For each word to avoid in `text` its line, and what to write."""
    return [
        (_line(text, match.start()), f"{' '.join(match[0].split())!r}: prefer {prefer}")
        for prefer, words in (PREFER | (IN_CODE if code else {})).items()
        for match in re.finditer(rf"\b(?:{_spaced(words)})\b", text, re.IGNORECASE)
    ]


def by_name(text: str) -> list[tuple[int, str]]:
    """For each command that installs a package by our name its line: any user may register it."""
    return [
        (_line(text, match.start()), "npu-agent is not registered on PyPI: `pipx install .`")
        for match in _BY_NAME.finditer(text)
    ]


def long_sentences(page: str) -> list[tuple[int, str]]:
    """For each sentence of a page that is too long its line, and what to do."""
    return [
        (line, f"a sentence of {count} words, at most {MOST_WORDS}: {' '.join(words[:6])} ...")
        for line, text in _blocks(page)
        for start, sentence in _sentences(text)
        if (count := len(words := re.findall(r"\S*\w\S*", sentence))) > MOST_WORDS
        for line in [line + text.count("\n", 0, start)]
    ]


def questions_in_tables(page: str) -> list[tuple[int, str]]:
    """For each question in a table's column of what to do its line."""
    places: list[tuple[int, str]] = []
    header: list[str] = []
    columns: list[int] = []
    for number, line in enumerate(_plain(page).splitlines(), 1):
        cells = _cells(line)
        if not cells:
            columns = []
        elif not columns and set("".join(cells)) <= set("-: "):
            columns = [place for place, name in enumerate(header) if _DO.search(name)]
        elif any("?" in cells[place] for place in columns if place < len(cells)):
            places.append((number, "a question: write what to do"))
        header = cells
    return places


def questions_in_code(source: str) -> list[tuple[int, str]]:
    """For each text of a module that asks in place of a remedy its line."""
    return [
        (text.lineno, "a question: write what to do")
        for text in ast.walk(ast.parse(source))
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        if _QUESTION.search(text.value)
    ]


def _blocks(page: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells without markup, each with its first line."""
    lines: list[str] = []
    begins = 1
    for number, line in enumerate([*_plain(page).splitlines(), ""], 1):
        cells = _cells(line)
        if lines and (cells or not line.strip() or _ITEM.match(line)):
            yield begins, "\n".join(lines)
            lines = []
        if cells:
            yield from ((number, cell) for cell in cells)
        elif line.strip():
            begins = begins if lines else number
            lines.append(_ITEM.sub("", line, count=1))


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """With the place in `text` where each begins."""
    start = 0
    for match in (*_END.finditer(text), None):
        end = match.end() if match else len(text)
        space = len(text[start:end]) - len(text[start:end].lstrip())
        yield start + space, text[start + space : end]
        start = end


def _plain(page: str) -> str:
    """The same lines; code is one word, a link its text."""
    page = _without(_UNSEEN, _without(_FENCE, page))
    page = re.sub(r"(`+)(?!`).+?\1", lambda code: "X" + "\n" * code[0].count("\n"), page)
    return _SHORT.sub(r"\1", _LINK.sub(r"\1", page))


def _without(pattern: re.Pattern[str], text: str) -> str:
    """The text with as many lines."""
    return pattern.sub(lambda match: "\n" * match[0].count("\n"), text)


def _cells(line: str) -> list[str]:
    line = line.strip()
    return re.split(r"(?<!\\)\|", line.strip("|")) if line.startswith("|") else []


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _spaced(words: str) -> str:
    """A line may end between two words, and the next one begin with the sign of a comment."""
    return words.replace(" ", r"[\s#]+")


def _wrong(name: str, text: str) -> list[tuple[int, str]]:
    return by_name(text) + ([] if any(map(Path(name).match, _TRANSLATED)) else _english(name, text))


def _english(name: str, text: str) -> list[tuple[int, str]]:
    if name.endswith(".py"):
        return found(text, code=True) + questions_in_code(text)
    if name.endswith(".md"):
        return found(text) + long_sentences(text) + questions_in_tables(text)
    return found(text)


def main(only: list[str]) -> int:
    """Prints every place; returns 1 if there is any."""
    names = only or [
        str(path.relative_to(ROOT))
        for pattern in (*_PAGES, *_TRANSLATED, *_CODE, *_OTHERS)
        for path in sorted(ROOT.glob(pattern))
    ]
    places: list[str] = []
    for name in names:
        wrong = sorted(_wrong(name, (ROOT / name).read_text()))
        places += (f"{name}:{line}: {what}" for line, what in wrong)
    print("\n".join(places) or "words: nothing found")
    return bool(places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
