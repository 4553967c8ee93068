"""Pieces of HTML for the status page: escaped texts, tables, curves, times. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape

from npu_agent.outputs.web.history import SPAN
from npu_agent.outputs.web.status import iso

MOST = 100
"""Rows of a list that are shown; /status.json has them all."""
LONGEST = 300
"""Characters of a text from outside that are shown; of an error in full it is fifty times that."""

WIDE, HIGH = 300, 72
"""The box of a curve; a second is as wide as 1."""
_GAP = 30
"""Seconds without a reading from which on a curve is broken."""

NBSP = "\N{NO-BREAK SPACE}"
UNKNOWN = TO = "\N{EN DASH}"
"""Where nothing is known, and between the ends of a range."""


def curve(
    title: str, at: Sequence[int], values: Sequence[float], least: float, digits: int = 0
) -> str:
    """A curve over the last minutes, in a box of `WIDE` by `HIGH`, and the range of its values.

    Args:
        title: what it shows, for screen readers.
        at: the horizontal position of each value, 0 to `WIDE`.
        values: NaN where one is missing; there the curve is broken.
        least: the smallest range that fills the box's height, so that noise stays small.
        digits: decimal places of the range.
    """
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return '<dd></dd><dd class="range"></dd>'
    smallest, largest = min(known), max(known)
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (smallest, largest))
    height = max(least, largest - smallest)
    low = max(0.0, (smallest + largest - height) / 2)
    bottom = HIGH - 2
    scale = (bottom - 1) / height
    lines: list[list[str]] = []
    before = -WIDE
    for x, value in zip(at, values, strict=True):  # some 1,500 times a page: kept lean
        if value == value:  # not NaN
            if x - before > _GAP:
                lines.append([])
            before = x
            lines[-1].append(f"{x},{int(bottom - (value - low) * scale)}")
    drawn = "".join(f'<polyline points="{" ".join(line)}"/>' for line in lines if len(line) > 1)
    return (
        f'<dd><svg class="curve" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" '
        f'role="img" aria-label="{title} over the last {SPAN / 60:.0f} minutes">'
        f'<path class="base" d="M0 {HIGH - 1}H{WIDE}"/>{drawn}</svg></dd>'
        f'<dd class="range">{TO.join(ends)}</dd>'
    )


def empty(words: str) -> str:
    """Says that there is nothing; takes HTML."""
    return f'<p class="empty">{words}</p>'


def error(kind: str, message: str) -> str:
    """An error in full, its lines as they are; `kind` is the class ``bad`` or ``warn``."""
    return f'<pre class="{kind}">{plain(message, 50 * LONGEST)}</pre>'


def pairs(found: Iterable[tuple[str, str]]) -> str:
    """Names and values, as HTML."""
    items = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in found)
    return f'<dl class="pairs">{items}</dl>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; nothing without rows.

    The roles are explicit because on a narrow screen it is drawn as blocks, and browsers then no
    longer treat it as a table.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col" role="columnheader">{column}</th>' for column in columns)
    body = "".join(
        '<tr role="row">'
        + "".join(
            f'<td role="cell" data-label="{column}"><span>{cell}</span></td>'
            for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows[:MOST]
    )
    more = ""
    if len(rows) > MOST:
        more = empty(f'and {len(rows) - MOST} more: see <a href="status.json">status.json</a>')
    kind = ' class="two"' if len(columns) == 2 else ""
    return (
        f'<table role="table"{kind}><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table>{more}'
    )


_ICONS = {
    "good": '<path d="M3 8.5l3.2 3.2L13 4.8"/>',
    "bad": '<path d="M4 4l8 8M12 4l-8 8"/>',
    "warn": '<path d="M8 3v6M8 12.6v.1"/>',
    "unknown": '<path d="M5.4 5.6a2.6 2.6 0 1 1 3.9 2.3C8.4 8.4 8 8.9 8 9.8M8 12.9v.1"/>',
    "wait": '<circle cx="8" cy="8" r="5.5"/><path d="M8 5v3l2 1.5"/>',
    "off": '<circle cx="8" cy="8" r="5.5"/><path d="M4.2 11.8l7.6-7.6"/>',
}


def icon(name: str) -> str:
    """A sign beside a word that says the same: some people cannot tell colours apart."""
    return f'<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">{_ICONS[name]}</svg>'


def pill(kind: str, words: str, sign: str = "") -> str:
    """A short state as a sign and words; `kind` is its colour and, unless `sign` is, its sign."""
    return f'<span class="pill {kind}">{icon(sign or kind)}{words}</span>'


_UNSHOWABLE = re.compile(r"[^\n -~\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@lru_cache(512)  # nearly all of a page's texts are those of the page before
def text(found: str, longest: int = LONGEST) -> str:
    """A text from outside as HTML: escaped, cut short, and unable to turn its surroundings around.

    Marks that change the direction of writing stay within their <bdi>.
    """
    escaped = plain(found, longest)
    return escaped if escaped.isascii() else f"<bdi>{escaped}</bdi>"


def plain(text: str, longest: int = LONGEST) -> str:
    """As `text`, for places that take no elements.

    What is no character of a page (control characters, halves of surrogates, as in a driver's
    odd bytes) is shown as an escape.
    """
    if len(text) > longest:
        text = text[:longest] + "…"
    return escape(_UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def number(count: int, noun: str) -> str:
    """``1 card``, ``2 cards``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """A length of time in its two largest units."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or parts:
            parts.append(f"{amount}{NBSP}{unit}")
    return " ".join(parts[:2]) or f"0{NBSP}s"


def clock(at: float) -> str:
    """The time of day."""
    stamp = iso(at)
    return f'<time datetime="{stamp}">{stamp[11:19]}</time>'


def when(at: float, now: float) -> str:
    """A time, by how long ago it was and by the clock; with the date unless that is today's."""
    stamp = iso(at)
    clock = stamp[11:19] if stamp[:10] == iso(now)[:10] else f"{stamp[:10]} {stamp[11:16]}"
    return f'<time datetime="{stamp}">{span(now - at)} ago, {clock}</time>'
