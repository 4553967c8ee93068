"""The pages' own words in the reader's language, and texts as HTML. English is the source. Pure.

The words of problems and of the timeline are in `npu_agent.wording`. What they quote (names, the
reasons of drivers and servers) stays English.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from markupsafe import Markup, escape

from npu_agent.wording import LANGUAGES

WORDS: Mapping[str, Sequence[str]] = json.loads(Path(__file__).with_name("words.json").read_bytes())
"""The Korean and the Japanese words by the English ones; ``{0}`` stands for the first value."""
LONGEST = 300
"""Characters of a text from outside that are shown."""
WHOLE = 50 * LONGEST
"""Of an error in full."""
NBSP = "\N{NO-BREAK SPACE}"
UNKNOWN = Markup("\N{EN DASH}")

_UNSHOWABLE = re.compile(r"[^\n -~\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

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


def text(value: object) -> Markup:
    """A text from outside as HTML: escaped, cut short, and unable to turn its surroundings around.

    Marks that change the direction of writing stay within their <bdi>. HTML stays as it is.
    """
    if isinstance(value, Markup):
        return value
    escaped = plain(str(value))
    return escaped if escaped.isascii() else Markup("<bdi>{}</bdi>").format(escaped)


def plain(text: str, longest: int = LONGEST) -> Markup:
    """Escapes as `text` does, for places that take no elements.

    Control characters and halves of surrogates, which a driver's bytes may have, are shown as
    escapes.
    """
    if isinstance(text, Markup):
        return text
    if len(text) > longest:
        text = text[:longest] + "…"
    return escape(_UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def figure(value: float, unit: str) -> Markup:
    return UNKNOWN if math.isnan(value) else escape(f"{value:.1f}{NBSP}{unit}")


def words(english: str, *values: object) -> Markup:
    """`translate` for templates: our words are HTML, the values in them are as `text` has them."""
    return Markup(translate(english, *map(text, values)))  # noqa: S704


def counted(one: str, many: str, count: int) -> Markup:
    return words(one if count == 1 else many, count)


def span(seconds: float) -> Markup:
    """A length of time in its two largest units."""
    left = max(0, int(seconds))
    parts: list[Markup] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or parts:
            parts.append(words(f"{{0}}{NBSP}{unit}", amount))
    return Markup(" ").join(parts[:2] or [words(f"{{0}}{NBSP}s", 0)])


def prose(sentence: str) -> Markup:
    """Our own words as a sentence, in which a command stands between backticks."""
    parts = escape(f"{sentence[:1].upper()}{sentence[1:]}.").split("`")
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(part) if at % 2 else part for at, part in enumerate(parts))
