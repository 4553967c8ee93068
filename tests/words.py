"""Phrases to avoid, and what to write instead.

``python -m tests.words``, a part of ``make lint``, searches the package (names, comments,
docstrings, messages), the manifests and the English pages. The terms
that each mean one thing everywhere are in docs/dev/architecture.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

INSTEAD = {
    r"told|tells? (of|about)|untold": "publish, report, log, or say it directly",
    r"mend(s|ed|ing)?": "fix, repair, recover",
    r"anew": "again, new",
    r"lets? go of|letting go of": "release, drop, close",
    r"goes by|going by": "use, follow, compare",
    r"h[eo]lds? up|holding up": "block, delay",
    r"of ours|of theirs|of now|of before": "our, their, current, previous",
    r"tak(es?|ing) away|took away|taken away": "remove",
    r"is had|has it what": "say who does what",
    r"puts? up with|gone from under": "say what happens",
}
"""A regular expression for whole words: what the sentence probably wants."""

IN_CODE = {
    r"look(s|ed|ing)? (at|for|on|again)": "probe, poll, read, check, search, inspect",
    r"at once": "immediately, at the same time",
}
"""The same for the package, where each of these has a word of its own; pages may say "look at"."""

_SEARCHED = (
    "npu_agent/**/*.py",
    "npu_agent/**/*.js",
    "docs/*.md",
    "docs/dev/*.md",
    "k8s/*.yaml",
    "k8s/components/**/*.yaml",
    "k8s/components/*.md",
    "k8s/chart/**/*.yaml",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
_GENERATED = ("npu_agent/kubelet/wire/",)


def found(text: str, *, code: bool = False) -> list[tuple[int, str, str]]:
    """The line, the words and what to say instead, for each place in `text`."""
    return [
        (text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead)
        for words, instead in (INSTEAD | (IN_CODE if code else {})).items()
        for match in re.finditer(r"\b(" + _spaced(words) + r")\b", text, re.IGNORECASE)
    ]


def _spaced(words: str) -> str:
    """A line may end between two words, and the next one begin with the sign of a comment."""
    return words.replace(" ", r"[\s#]+")


def main() -> int:
    """Prints every place; returns 1 if there is any."""
    places = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}: {instead}"
        for pattern in _SEARCHED
        for path in sorted(ROOT.glob(pattern))
        if not str(path.relative_to(ROOT)).startswith(_GENERATED)
        for line, words, instead in sorted(found(path.read_text(), code=path.suffix == ".py"))
    ]
    print("\n".join(places) or "words: nothing found")
    return bool(places)


if __name__ == "__main__":
    sys.exit(main())
