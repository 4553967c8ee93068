"""The pages' own words in the reader's language; English is the source. Pure.

What comes from elsewhere (names, problems, remedies, reasons) stays English.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from string import Template

LANGUAGES = ("en", "ko", "ja")
WORDS: Mapping[str, Sequence[str]] = json.loads(Path(__file__).with_name("words.json").read_text())
"""The Korean and the Japanese words by the English ones; ``{0}`` stands for the first value."""

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


@cache
def template(html: str, language: str) -> Template:
    """A page's template with its texts, between tags and in data-words, in that language."""
    texts = re.compile(r'(?<=>)[^<>\n]+(?=<)|(?<=data-words=")[^"]+')
    with in_language(language):
        return Template(texts.sub(lambda match: translate(match[0]), html))
