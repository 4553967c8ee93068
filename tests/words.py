"""Plain English: short sentences on pages, the word to prefer, no install by an unregistered name.

``python -m tests.words [FILE ...]``, a part of ``make lint``; the rest is habit: CONTRIBUTING.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25  # in a sentence of a page
PREFER = {
    "with, alongside, in addition to": r"besides?",
    "no Pod, a user, another process, the Pod that": r"(no|some|any)body( else)?|whoever",
    "during, within": r"amid(st)?",
    "unhealthy, failed; recover, repair": r"sick(ness)?|mend(s|ed|ing)?",
    "publish, report, log, or say it directly": r"told|tells? (of|about)",
    "release, drop, block, delay": r"lets? go of|letting go of|h[eo]lds? up|holding up",
}
"""What to write, and a regular expression for the whole words of which one is there instead."""
INSTALL = {"`pipx install .`": r"(?:pipx?|uvx?)\s+(?:\w+\s+)*(?:-\S+\s+)*[\"']?npu-agent"}
"""The same, in translations too: any user may register our name on PyPI."""
PAGES = (
    "docs/*.md docs/dev/*.md docs/examples/*/*.md k8s/*/*.md bench/*.md tests/c*/*.md *[!T].md "
    "npu_agent/**/*.[jp][sy] npu_agent/wording/en.json Make* k8s/**/*.[yt]*"
)
TRANSLATED = "docs/ko/*.md docs/ja/*.md README.ko.md README.ja.md"
_UNREAD = re.compile(r"(?ms)^( *)(```|~~~).*?^\1\2|<!--.*?-->|<[^>\n]+>")
_BREAK = re.compile(r"(?m)^[ \t]*(?:>[ \t]*)?(?:[-*+] |\d+[.)] |> ?|#+ )|\||(?<=\n)[ \t]*(?=\n)")


def found(text: str, instead: dict[str, str] = PREFER) -> list[tuple[int, str]]:
    """For each word to avoid its line, and what to write."""
    return [
        (text.count("\n", 0, match.start()) + 1, f"{' '.join(match[0].split())!r}: prefer {prefer}")
        for prefer, words in instead.items()
        for spaced in [words.replace(" ", r"[\s#]+")]  # a comment may go on in the next line
        for match in re.finditer(rf"\b(?:{spaced})\b", text, re.IGNORECASE)
    ]


def long_sentences(page: str) -> list[tuple[int, str]]:
    """For each sentence of a page that is too long its line, and what to do."""
    text = _UNREAD.sub(lambda code: "\n" * code[0].count("\n"), page)
    text = re.sub(r"(`+)(?!`).+?\1", lambda code: "X" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|no)\.", r"\1", text, flags=re.IGNORECASE)
    text = _BREAK.sub(" . ", text)  # items, cells and paragraphs end a sentence
    return [
        (text.count("\n", 0, match.start(1)) + 1, f"{count} words, at most {MOST_WORDS}: {start}")
        for match in re.finditer(r"(\S.*?)(?:[.!?][)*\"”]*(?=\s|$)|\Z)", text, re.DOTALL)
        if (count := len(words := re.findall(r"\S*\w\S*", match[1]))) > MOST_WORDS
        for start in [f"{' '.join(words[:6])} ..."]
    ]


def main(only: list[str]) -> int:
    """Prints every place; returns 1 if there is any."""
    paths = [path for glob in f"{PAGES} {TRANSLATED}".split() for path in sorted(ROOT.glob(glob))]
    places: list[str] = []
    for name in only or dict.fromkeys(str(path.relative_to(ROOT)) for path in paths):
        text, wrong = (ROOT / name).read_text(encoding="utf-8"), []
        if not any(map(Path(name).match, TRANSLATED.split())):
            wrong = found(text) + (long_sentences(text) if name.endswith(".md") else [])
        places += (f"{name}:{line}: {what}" for line, what in sorted(wrong + found(text, INSTALL)))
    print("\n".join(places) or "words: nothing found")
    return bool(places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
