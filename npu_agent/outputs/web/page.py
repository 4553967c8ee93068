"""The status page: a Status as one HTML document that needs nothing from elsewhere. Pure.

Made for somebody who is called at night: the first line says whether all is well, and if not, what
is not. Works without JavaScript (it is reloaded then), on a phone and in the dark.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path

from npu_agent.core.hardware import CoreReading, Health, State
from npu_agent.outputs.deviceplugin.session import Phase
from npu_agent.outputs.web import markup as m
from npu_agent.outputs.web.history import SPAN, Point, load_of
from npu_agent.outputs.web.status import CardStatus, Holder, Note, ResourceStatus, Status

_STYLE = (Path(__file__).parent / "page.css").read_text()
_SCRIPT = (Path(__file__).parent / "page.js").read_text()


def _digest(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = (
    "default-src 'none'; "
    f"style-src 'sha256-{_digest(_STYLE)}'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: nothing but the style and the script that it brings."""

_BUILD = hashlib.sha256((_STYLE + _SCRIPT).encode()).hexdigest()[:12]


def page(status: Status, history: Callable[[str], Sequence[Point]], monotonic: float) -> str:
    """The document.

    Args:
        status: what it shows.
        history: a card's last readings, by the card's ID.
        monotonic: `time.monotonic` of `status.now`: the clock of the history.
    """
    node = status.node or "unknown node"
    count = len(status.problems)
    state = f"{count} problem{'s' if count > 1 else ''}" if count else "all well"
    return (
        f'<!DOCTYPE html>\n<html lang="en" data-build="{_BUILD}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{m.plain(node)}: {state} - npu-agent</title>\n"
        '<link rel="icon" href="data:,">\n'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        '<p id="said" class="away" role="status"></p>\n<p id="lost" role="alert" hidden></p>\n'
        f"{_main(status, history, monotonic)}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _main(status: Status, history: Callable[[str], Sequence[Point]], monotonic: float) -> str:
    cards = status.cards
    tiles = "".join(
        _card(card, status, history(card.state.id), monotonic) for card in cards[: m.MOST]
    )
    none = "No cards on this host." if status.looked else "Still looking for cards."
    return "\n".join(
        (
            "<main>",
            _top(status),
            _head(status),
            m.section(
                "cards",
                "Cards",
                f'<div class="cards">{tiles}</div>' if tiles else m.box(m.empty(none)),
                _sum(status),
            ),
            _assignments(status),
            '<div class="halves">',
            _resources(status),
            _config(status),
            _labels(status),
            _odd(status),
            "</div>",
            _FOOT,
            "</main>",
        )
    )


_FOOT = (
    '<footer><a id="to-metrics" href="metrics">Metrics</a>'
    '<a id="to-json" href="status.json">This page as JSON</a>'
    "<span>All times are UTC.</span></footer>"
)
"""Its links are relative: the page may be seen through a proxy, below a path."""


def _sum(status: Status) -> str:
    if not status.cards:
        return ""
    in_use = sum(bool(card.holders) for card in status.cards)
    limit = status.config.config.health.max_temperature
    fence = "" if limit is None else f", taken out of service above {limit:g}{m.NBSP}°C"
    return f"{len(status.cards)} installed, {in_use} in use{fence}"


def _top(status: Status) -> str:
    return (
        f'<div class="top"><h1>{m.text(status.node or "unknown node")}</h1><p class="facts">'
        f"<span>npu-agent {m.text(status.version)}</span>"
        f"<span>up {m.span(status.now - status.started_at)}</span>"
        f"<span>as of {m.clock(status.now)} UTC</span></p></div>"
    )


def _head(status: Status) -> str:
    """What is wrong, or that nothing is."""
    problems, notes = status.problems, status.notes
    sick = sum(card.state.health.state is State.UNHEALTHY for card in status.cards)
    counted = m.number(len(status.cards), "card")
    if not problems:
        kind, icon = "good", "good"
        text = f"All is well: {counted}" if status.cards else "All is well: no cards here"
        if not status.looked:
            kind, icon, text = "plain", "wait", "Still looking for cards"
    else:
        kind, icon = ("bad", "bad") if sick or status.unready else ("warn", "warn")
        text = m.number(len(problems), "problem")
        if sick:
            text += f": {sick} of {counted} unhealthy"
    shown = [(note, "problem") for note in problems] + [(note, "note") for note in notes]
    lines = "".join(
        f'<li class="{kind_}"><a id="to-{number}" href="#{_anchor(note, status)}">'
        f"{m.text(note.text)}</a></li>"
        for number, (note, kind_) in enumerate(shown[: m.MOST])
    )
    return (
        f'<div class="head {kind}"><h2 id="headline">{m.icon(icon)}<span>{text}</span></h2>'
        + (f"<ul>{lines}</ul>" if lines else "")
        + "</div>"
    )


def _anchor(note: Note, status: Status) -> str:
    for card in status.cards:
        if note.card == card.state.id:
            return _card_anchor(card)
    return {"card": "cards", "resource": "resources", "hardware": "not-served"}.get(
        note.subject, note.subject
    )


def _card_anchor(card: CardStatus) -> str:
    return "-".join(map(str, card.state.card.key))


def _card_link(card: CardStatus, number: int) -> str:
    """A link to the card; `number` tells apart the links to one card: ids keep the focus."""
    anchor = _card_anchor(card)
    return f'<a id="at-{anchor}-{number}" href="#{anchor}">{m.text(card.state.card.name)}</a>'


def _card(card: CardStatus, status: Status, points: Sequence[Point], monotonic: float) -> str:
    state, health = card.state, card.state.health
    anchor = _card_anchor(card)
    sick = health.state is State.UNHEALTHY
    off = f' <span class="pill plain">{m.icon("off")}disabled</span>' if card.disabled else ""
    return (
        f'<article class="card{" sick" if sick else ""}" id="{anchor}" '
        f'aria-labelledby="{anchor}-t">'
        f'<header><h3 id="{anchor}-t">{m.text(state.card.name)}'
        f"<small>{m.text(card.title)}</small></h3>"
        f"<div>{_health(health.state)}{off}</div></header>"
        + _why(health, status.now)
        + _figures(card, status, points, monotonic)
        + _cores(state.reading.cores if state.reading else (), late=card.late)
        + _users(card)
        + _traits(card, anchor)
        + "</article>"
    )


def _why(health: Health, now: float) -> str:
    """Why a card is as it is, and since when; for one that works that is no news."""
    since = f"since {m.when(health.since, now)}"
    if health.state is State.HEALTHY:
        return f'<p class="why">{m.text(health.reason)} {since}</p>'
    return f'<p class="why"><b>{m.text(health.reason)}</b>{since}</p>'


def _health(state: State) -> str:
    kind = {State.HEALTHY: "good", State.UNHEALTHY: "bad", State.UNKNOWN: "warn"}[state]
    icon = "unknown" if state is State.UNKNOWN else kind
    return f'<span class="pill {kind}">{m.icon(icon)}{state.value}</span>'


def _figures(card: CardStatus, status: Status, points: Sequence[Point], monotonic: float) -> str:
    """Temperature, power and load: the value of now, and the curve of the last minutes."""
    reading = card.state.reading
    limit = status.config.config.health.max_temperature
    now = (None, None, math.nan)  # type: tuple[float | None, float | None, float]
    if reading is not None:
        now = (reading.temperature(), reading.power(), load_of(reading))
    temperature, power, load = (math.nan if value is None else value for value in now)
    recent = [point for point in points if point.at >= monotonic - SPAN]
    at = [int(m.WIDE * (1 - (monotonic - point.at) / SPAN)) for point in recent]
    rows = (
        ("Temperature", temperature, "°C", 0, [point.temperature for point in recent], 10.0),
        ("Power", power, "W", 1, [point.power for point in recent], 1.0),
        ("Load", load, "%", 0, [point.load for point in recent], 100.0),
    )
    cells = []
    for title, value, unit, digits, values, least in rows:
        hot = title == "Temperature" and limit is not None and value > limit
        shown = m.UNKNOWN if math.isnan(value) else f"{value:.{digits}f}{m.NBSP}{unit}"
        style = " stale" if card.late else " hot" if hot else ""
        cells.append(
            f'<div><dt>{title}</dt><dd class="value{style}">{shown}</dd>'
            f"<dd>{m.curve(title, at, values, least)}</dd>"
            f'<dd class="range">{_range(values, digits)}</dd></div>'
        )
    late = ""
    if card.late and card.read_at is not None:
        late = (
            f'<p class="why"><span class="pill warn">{m.icon("warn")}old figures</span> '
            f"read {m.when(card.read_at, status.now)}</p>"
        )
    return f'<dl class="figures">{"".join(cells)}</dl>{late}'


def _range(values: Sequence[float], digits: int) -> str:
    """The least and the greatest of a curve's values; nothing where there is no curve."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return ""
    low, high = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return low if low == high else f"{low}{m.TO}{high}"


def _cores(cores: Sequence[CoreReading], *, late: bool) -> str:
    """A bar for the load of each core."""
    if not any(core.utilization is not None for core in cores):
        return ""
    items = []
    for core in cores[:64]:
        load = core.utilization
        if late or load is None or not math.isfinite(load):
            load = None
        full = 0.0 if load is None else min(100.0, max(0.0, load))
        shown = m.UNKNOWN if load is None else f"{load:.0f}"
        if len(cores) <= 4:
            box, bar = "0 0 100 10", f'<rect width="{full:.1f}" height="10"/>'
        else:
            box, bar = "0 0 10 100", f'<rect y="{100 - full:.1f}" width="10" height="{full:.1f}"/>'
        items.append(
            f'<li><svg viewBox="{box}" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'
            f'<b>{shown}</b><span class="away">% on core </span> '
            f"<span>{'core ' if len(cores) <= 4 else ''}{core.core}</span></li>"
        )
    few = " few" if len(cores) <= 4 else ""
    return (
        '<div><p class="caption" aria-hidden="true">Load of each core in %</p>'
        f'<ul class="cores{few}" aria-label="Load of each core in per cent">{"".join(items)}'
        "</ul></div>"
    )


def _users(card: CardStatus) -> str:
    if not card.holders:
        return '<ul class="users"><li class="dim">not in use</li></ul>'
    items = "".join(
        f'<li><span class="cut">{_cut(holder)}</span>'
        f'<span>{_pod(holder)} <span class="dim">/ {m.text(holder.container)}</span></span></li>'
        for holder in card.holders[: m.MOST]
    )
    return f'<ul class="users" aria-label="In use by">{items}</ul>'


def _cut(holder: Holder) -> str:
    if holder.cores is None:
        return "all cores"
    return f"core{'s' if len(holder.cores) > 1 else ''} {holder.cores}"


def _pod(holder: Holder) -> str:
    return f'<span class="dim">{m.text(holder.namespace)} /</span> {m.text(holder.pod)}'


def _traits(card: CardStatus, anchor: str) -> str:
    """What the card is: on one line what is asked for most, and the rest on request."""
    what, reading = card.state.card, card.state.reading
    errors = [(name, count) for name, count in (reading.errors if reading else ()) if count]
    brief = (
        what.pci_bus_id,
        None if what.numa_node is None else f"NUMA {what.numa_node}",
        f"driver {what.driver_version.partition(',')[0]}" if what.driver_version else None,
    )
    counted = ", ".join(f"{name} {count}" for name, count in errors)
    pairs: tuple[tuple[str, str | None], ...] = (
        ("Product", what.product),
        ("PCI address", what.pci_bus_id),
        ("NUMA node", None if what.numa_node is None else str(what.numa_node)),
        ("Driver", what.driver_version),
        ("Firmware", what.firmware_version),
        ("Serial", what.serial),
        ("Device ID", card.state.id),
        ("Running for", m.span(reading.uptime) if reading and reading.uptime is not None else None),
    )
    items = "".join(f"<dt>{k}</dt><dd>{m.text(v)}</dd>" for k, v in pairs if v is not None)
    return (
        '<div class="traits">'
        + (f'<p class="errors">errors counted: {m.text(counted)}</p>' if counted else "")
        + f'<details id="{anchor}-more"><summary id="to-{anchor}-more">'
        f"{m.text(' · '.join(filter(None, brief))) or 'Details'}</summary>"
        f"<dl>{items}</dl></details></div>"
    )


def _assignments(status: Status) -> str:
    rows = [
        (holder, _card_link(card, number), card.state.health.state)
        for card in status.cards
        for number, holder in enumerate(card.holders)
    ]
    rows += [
        (holder, f"gone: {m.text(holder.device)}", State.UNHEALTHY) for holder in status.missing
    ]
    rows.sort(key=lambda row: (row[0].namespace, row[0].pod, row[0].container))
    table = m.table(
        ("Namespace", "Pod", "Holds", "Resource"),
        [
            (
                m.text(holder.namespace),
                f'{m.text(holder.pod)} <span class="dim">/ {m.text(holder.container)}</span>',
                f"{card}, {_cut(holder)} {'' if health is State.HEALTHY else _health(health)}",
                m.text(holder.resource),
            )
            for holder, card, health in rows
        ],
    )
    trouble = ""
    if status.holdings_error is not None:
        trouble = m.error("warn", f"As last known: {status.holdings_error}")
    body = table or m.empty("No container holds a card.")
    return m.section("assignments", "In use by", m.box(trouble + body))


def _resources(status: Status) -> str:
    rows = [
        (
            m.text(one.session.resource),
            _phase(one),
            f"{one.healthy} of {one.offered} healthy" if one.offered else "none",
            str(one.session.registrations),
        )
        for one in status.resources
    ]
    table = m.table(("Resource", "At the kubelet", "Devices", "Registrations"), rows)
    held_back = [pair for one in status.resources for pair in one.withheld]
    more = m.table(
        ("Device", "Held back because"),
        [(m.text(name), m.text(reason)) for name, reason in held_back],
    )
    return m.section("resources", "Resources", m.box(table + more))


def _phase(one: ResourceStatus) -> str:
    phase = one.session.phase
    kind = {
        Phase.REGISTERED: "good",
        Phase.NO_CARDS: "plain",
        Phase.STANDBY: "plain",
        Phase.REGISTERING: "warn",
    }.get(phase, "bad")
    icon = {"plain": "wait"}.get(kind, kind)
    reason = f"<br>{m.text(one.session.reason)}" if one.session.reason else ""
    return f'<span><span class="pill {kind}">{m.icon(icon)}{phase.value}</span>{reason}</span>'


def _config(status: Status) -> str:
    config = status.config
    pairs = [
        ("Generation", str(config.generation)),
        ("Last found good", m.when(config.loaded_at, status.now)),
        ("Refused versions", str(config.rejected)),
    ]
    if config.waiting:
        keys = ", ".join(f"<code>{m.text(key)}</code>" for key in config.waiting)
        pairs.append(("Waits for a restart", keys))
    if config.error is None:
        pairs.insert(0, ("State", f'<span class="pill good">{m.icon("good")}in force</span>'))
    else:
        pill = f'<span class="pill bad">{m.icon("bad")}file refused</span>'
        pairs.insert(0, ("State", f"{pill} the last good one stays in force"))
        pairs.append(("What is wrong", m.error("bad", config.error)))
    return m.section("config", "Config", m.box(m.pairs(pairs)))


def _labels(status: Status) -> str:
    labels = status.labels
    if labels is None or labels.output == "none":
        return m.section("labels", "Labels on the Node", m.box(m.empty("Switched off.")))
    where = "the Node itself" if labels.output == "api" else "Node Feature Discovery"
    written = (
        "not by this process"
        if labels.applied_at is None
        else m.when(labels.applied_at, status.now)
    )
    if labels.error is not None:
        pill = f'<span class="pill bad">{m.icon("bad")}not in place</span>'
    elif labels.in_place:
        pill = f'<span class="pill good">{m.icon("good")}in place</span>'
    else:
        pill = f'<span class="pill plain">{m.icon("wait")}not yet</span>'
    pairs = [("State", pill), ("Written to", where), ("Last written", written)]
    if labels.error is not None:
        pairs.append(("What is wrong", m.error("bad", labels.error)))
    rows = [(m.text(key), m.text(value)) for key, value in sorted(labels.labels.items())]
    return m.section(
        "labels", "Labels on the Node", m.box(m.pairs(pairs) + m.table(("Label", "Value"), rows))
    )


def _odd(status: Status) -> str:
    if not status.odd:
        return ""
    rows = [(f"<code>{m.text(odd.entry)}</code>", m.text(odd.reason)) for odd in status.odd]
    return m.section("not-served", "Seen and not served", m.box(m.table(("Entry", "Why"), rows)))
