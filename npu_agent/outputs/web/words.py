"""The pages' own words in the reader's language; English is the source. Pure.

Problems and remedies are translated clause by clause. What they quote (names, the reasons of
drivers and servers) stays English.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path

LANGUAGES = ("en", "ko", "ja")
WORDS: Mapping[str, Sequence[str]] = json.loads(Path(__file__).with_name("words.json").read_text())
"""The Korean and the Japanese words by the English ones; ``{0}`` stands for the first value."""
SENTENCES: Mapping[str, Sequence[str]] = json.loads(
    Path(__file__).with_name("sentences.json").read_text()
)
"""The same for the clauses of problems and remedies, and for what stands between two clauses."""
_BETWEEN = re.compile(r"(; then |; in use by |; or |; |: )")
_LONGEST = 500
"""Characters of a clause of ours, with names in it; a longer one would take too long to match."""
_QUOTED = re.compile(r"\([^()]*\)")

_language: ContextVar[str] = ContextVar("_language", default="en")


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """Within it, `translate` is in that one of `LANGUAGES`."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def translate(english: str, *values: object) -> str:
    """The words with values in place of ``{0}``, ``{1}``; English where they are not known."""
    words = (english, *WORDS.get(english, (english, english)))[LANGUAGES.index(_language.get())]
    return words.format(*values) if values else words


def translate_clauses(english: str) -> str:
    """The text of a problem or a remedy: its clauses that are known in the reader's language."""
    language = LANGUAGES.index(_language.get())
    return _translated(english, language - 1) if language else english


@lru_cache(1024)
def _translated(english: str, language: int) -> str:
    english = english.replace("\0", "")
    quoted = iter(_QUOTED.findall(english))
    clauses = _BETWEEN.split(_QUOTED.sub("\0", english))
    whole = (re.sub("\0", lambda _: next(quoted), clause) for clause in clauses)
    return "".join(_clause(clause, language) for clause in whole)


def _clause(english: str, language: int) -> str:
    short = len(english) < _LONGEST
    for pattern, words in _patterns() if short else ():
        if match := pattern.fullmatch(english):
            *values, quoted = match.groups()
            return f"{words[language].format(*values)}{quoted or ''}"
    return english


@cache
def _patterns() -> Sequence[tuple[re.Pattern[str], Sequence[str]]]:
    """How each clause may read: with its values, and with something quoted at its end."""
    return [
        (re.compile(re.sub(r"\\\{\d\\\}", "(.+)", re.escape(english)) + r"( \(.*\))?"), words)
        # Those with the most words of their own first: others may be a part of them.
        for english, words in sorted(SENTENCES.items(), key=lambda entry: -_own_length(entry[0]))
    ]


def _own_length(english: str) -> int:
    return len(re.sub(r"\{\d\}", "", english))
