"""Pages in Korean and Japanese, and whether they say what the English ones say.

docs/ko/install.md begins with a comment that has the English page and the start of its SHA-256 when
the translation was last brought up to date. `make docs` puts a line for readers below it where the
English page has changed since, and takes the line out again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_CODE = re.compile(r"^ *(`{3,}).*?^ *\1$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_COUNTED = {
    "list items": re.compile(r"^ *(?:[-*]|[0-9]+\.) ", re.MULTILINE),
    "table rows": re.compile(r"^ *\|", re.MULTILINE),
}
_FIRST = re.compile(r"<!-- translation of (\S+) at ([0-9a-f]{12}) -->\n")
_BEHIND = {
    "ko": "> 이 페이지보다 [영어 원문]({link})이 더 새롭습니다. 다르면 영어 원문이 맞습니다.\n",
    "ja": "> [英語版]({link})のほうが新しくなっています。違いがあるときは英語版が正です。\n",
}


def pages() -> Iterator[Path]:
    """The translated pages."""
    for language in _BEHIND:
        yield from sorted((ROOT / "docs" / language).glob("*.md"))


def source(page: Path) -> Path:
    """The English page of a translated one.

    Raises:
        ValueError: its first line does not say.
    """
    return ROOT / _named(page)[1]


def current(page: Path) -> str:
    """The page with the line for readers if it lags behind, and without it if it does not.

    Raises:
        ValueError: its first line does not say which page it translates, or there is no such page.
    """
    first, name = _named(page)
    if not (ROOT / name).is_file():
        raise ValueError(f"{page}: there is no {name}")
    language = page.parent.name
    line = _BEHIND[language].format(link=f"../{Path(name).name}")
    rest = page.read_text(encoding="utf-8")[len(first[0]) :].removeprefix(line)
    return first[0] + (line if lags(page) else "") + rest


def lags(page: Path) -> bool:
    """Whether the English page has changed since the translation was brought up to date."""
    first, name = _named(page)
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:12] != first[2]


def differences(page: Path) -> Iterator[str]:
    """Yields where a page that is said to be up to date has more or fewer items than English."""
    if lags(page):
        return
    headings, texts = _sections(page)
    for heading, text, english in zip(headings, texts, _sections(source(page))[1], strict=False):
        for name, pattern in _COUNTED.items():
            own = len(pattern.findall(text))
            wanted = len(pattern.findall(english))
            if own != wanted:
                yield f"{page}, {heading}: {own} {name}, and {wanted} in English"


def _sections(page: Path) -> tuple[list[str], list[str]]:
    """The headings, the first being the page's name, and the text below each."""
    first, *parts = _HEADING.split(_CODE.sub("", page.read_text(encoding="utf-8")))
    return [page.name, *parts[::2]], [first, *parts[1::2]]


def _named(page: Path) -> tuple[re.Match[str], str]:
    first = _FIRST.match(page.read_text(encoding="utf-8"))
    if first is None:
        raise ValueError(
            f"{page}: the first line is not <!-- translation of docs/{page.name} at HASH -->, "
            f"HASH being the first 12 digits of: sha256sum docs/{page.name}"
        )
    return first, first[1]
