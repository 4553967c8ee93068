"""Words for people: foreign text made fit to show, guesses at what was meant, natural order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_DIGITS = re.compile("([0-9]+)")


def natural(text: str) -> tuple[list[str | int], str]:
    """A key that sorts numbers within texts as numbers: temp2 before temp10, 1.9 before 1.10."""
    parts = _DIGITS.split(text)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], text


NAMED = 4
"""The most cards, Pods or files that a sentence names."""


def listed(names: Iterable[str], most: int = NAMED) -> str:
    """The first `most` of the names, and how many more there are: ``npu0, npu1 and 62 more``."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def closest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that was likely meant, in upper or lower case; None if none is close.

    One with another number is not: who asks for npu9 does not mean npu3.
    """
    by_lower = {spelled.lower(): spelled for spelled in words}
    from difflib import get_close_matches  # 0.3 MB, for a word that was misspelt

    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close and not _another(word.lower(), close[0]) else None


def _another(name: str, other: str) -> bool:
    numbered = [re.fullmatch(r"([a-z]+)[0-9]+", part) for part in (name, other)]
    return name != other and all(numbered) and len({match[1] for match in numbered if match}) == 1


def reason(error: BaseException) -> str:
    """Describes an error for people: file and words of an OSError, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def one_line(words: object, most: int = 300) -> str:
    """Foreign words as one line that a terminal can show, of `most` characters."""
    text = str(words) or (type(words).__name__ if isinstance(words, Exception) else "")
    line = " ".join(text[: 4 * most].split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def middle(name: str, most: int) -> str:
    """A name of `most` characters at most: Pods of one Deployment differ at the end."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def shown(text: str, most: int = 60) -> str:
    """A user's text within a sentence; in quotes where it would not stand out."""
    if len(text) > most:
        text = text[:most] + "…"
    return text if text and text.isprintable() and text == text.strip() else quoted_json(text)


def printable(text: str) -> str:
    """A text of some lines in which nothing can steer a terminal: what could is escaped."""
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def quoted(text: str, most: int = 80) -> str:
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def quoted_json(text: str) -> str:
    printed = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in printed)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
