"""Pieces of HTML for the status page: escaped texts, tables, curves, times. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from npu_agent.core.state import AgentState
from npu_agent.outputs.web.history import MOST as MOST_POINTS
from npu_agent.outputs.web.status import iso
from npu_agent.outputs.web.words import translate

MOST = 100
"""/status.json has all of them."""
ALL = '<a href="status.json">status.json</a>'
LONGEST = 300
"""Characters of a text from outside that are shown; of an error in full it is fifty times that."""

STEP_WIDE = 4
WIDE, HIGH = STEP_WIDE * MOST_POINTS, 72
"""The box of a curve, and of a step of the history in it."""
_GAP = 12
"""Width without a reading from which on a curve is broken."""

NBSP = "\N{NO-BREAK SPACE}"
UNKNOWN = "\N{EN DASH}"


def bounds(values: Iterable[float], least: float) -> tuple[float, float]:
    """The ends of an axis: round values, so that they seldom change.

    `values` are NaN where one is missing; `least` is the smallest range, so that noise stays small.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, least
    smallest, largest = min(finite), max(finite)
    rough = max(least, largest - smallest) / 2
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    low = math.floor(smallest / step) * step
    return low, max(low + 2 * step, math.ceil(largest / step) * step)


def curve(
    title: str,
    points: Iterable[tuple[int, float]],
    ends: tuple[float, float],
    *,
    alert: bool = False,
) -> str:
    """A curve over the last hour, in a box of `WIDE` by `HIGH`, with the ends of its axis.

    Args:
        title: what it shows, for screen readers.
        points: horizontal positions, 0 to `WIDE`, and values: NaN where one is missing. There the
            curve is broken, and where positions are more than `_GAP` apart.
        ends: the values at the bottom and at the top: see `bounds`.
        alert: whether it stands out.
    """
    low, high = ends
    bottom, before = HIGH - 2, -WIDE
    lines: list[list[str]] = []
    for x, value in points:
        if low <= value <= high:  # not NaN
            if x - before > _GAP:
                lines.append([])
            before = x
            lines[-1].append(f"{x},{int(bottom - (value - low) * (bottom - 2) / (high - low))}")
    if not lines:
        return '<dd class="plot"></dd>'
    drawn = "".join(f'<polyline points="{" ".join(line)}"/>' for line in lines if len(line) > 1)
    return (
        f'<dd class="plot"><svg class="curve{" alert" if alert else ""}" '
        f'viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" '
        f'aria-label="{translate("{0} over the last hour", title)}"><path class="base" '
        f'd="M0 1H{WIDE}M0 {HIGH // 2}H{WIDE}M0 {HIGH - 1}H{WIDE}"/>{drawn}</svg>'
        f'<span class="high">{high:g}</span><span class="low">{low:g}</span></dd>'
    )


def empty(words: str) -> str:
    return f'<p class="empty">{translate(words)}</p>'


def error(kind: str, message: str | None) -> str:
    """An error in full, its lines as they are; `kind` is the class ``bad`` or ``warn``."""
    return f'<pre class="{kind}">{plain(message, 50 * LONGEST)}</pre>' if message else ""


def pairs(rows: Iterable[tuple[str, str]], kind: str = ' class="pairs"') -> str:
    """Names and values; those without a value are left out."""
    items = "".join(f"<dt>{translate(key)}</dt><dd>{value}</dd>" for key, value in rows if value)
    return f"<dl{kind}>{items}</dl>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; nothing without rows.

    The roles are explicit because on a narrow screen it is drawn as blocks, and browsers then no
    longer treat it as a table.
    """
    if not rows:
        return ""
    columns = [translate(column) for column in columns]
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
        more = empty(translate("and {0} more: see {1}", len(rows) - MOST, ALL))
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
    "dot": '<circle cx="8" cy="8" r="2"/>',
    "off": '<circle cx="8" cy="8" r="5.5"/><path d="M4.2 11.8l7.6-7.6"/>',
}


def icon(name: str) -> str:
    """A sign next to a word with the same meaning: some people cannot tell colours apart."""
    return f'<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">{_ICONS[name]}</svg>'


def pill(kind: str, words: str, sign: str = "") -> str:
    """A short state as a sign and words; `kind` is its colour and, unless `sign` is, its sign."""
    return f'<span class="pill {kind}">{icon(sign or kind)}{translate(words)}</span>'


_UNSHOWABLE = re.compile(r"[^\n -~\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text(value: str) -> str:
    """A text from outside as HTML: escaped, cut short, and unable to turn its surroundings around.

    Marks that change the direction of writing stay within their <bdi>.
    """
    escaped = plain(value)
    return escaped if escaped.isascii() else f"<bdi>{escaped}</bdi>"


def plain(text: str, longest: int = LONGEST) -> str:
    """Escapes as `text` does, for places that take no elements.

    Control characters and halves of surrogates, which a driver's bytes may have, are shown as
    escapes.
    """
    if len(text) > longest:
        text = text[:longest] + "…"
    return escape(_UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def number(count: int, noun: str) -> str:
    """``1 card``, ``2 cards``."""
    return translate(f"{{0}} {noun}{'' if count == 1 else 's'}", count)


def facts(rows: Iterable[tuple[str, str | None]]) -> str:
    return pairs(((key, text(value or "")) for key, value in rows), kind="")


def section(anchor: str, title: str, content: str) -> str:
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h2 id="{anchor}-title">{translate(title)}</h2><div class="box">{content}</div></section>'
    )


def span(seconds: float) -> str:
    """A length of time in its two largest units."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or parts:
            parts.append(translate(f"{{0}}{NBSP}{unit}", amount))
    return " ".join(parts[:2]) or translate(f"{{0}}{NBSP}s", 0)


def clock(at: float, state: AgentState) -> str:
    """A past time in UTC, with the date unless that is today's; the script makes it local time.

    `at` is in seconds of `time.monotonic`, here and below.
    """
    stamp = iso(state.wall(at))
    same = stamp[:10] == iso(state.now)[:10]
    shown = stamp[11:19] if same else f"{stamp[:10]} {stamp[11:16]}"
    return f'<time datetime="{stamp}">{shown}</time>'


def when(at: float, state: AgentState) -> str:
    words = translate("{0} ago, {1}", span(state.monotonic - at), clock(at, state))
    return f'<span class="dim">{words}</span>'


def since(at: float, state: AgentState) -> str:
    return translate("since {0}", when(at, state))


def prose(sentence: str) -> str:
    """Our own words as a sentence, in which a command stands between backticks."""
    parts = escape(f"{sentence[:1].upper()}{sentence[1:]}.").split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))
