"""The status page: the state of the agent as one HTML document that needs nothing else. Pure.

Made for somebody who is called at night: the first line says whether all is well, and if not, what
is wrong. Works without JavaScript (the page then reloads itself), on a phone and in dark mode.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from npu_agent.core.hardware import CardState, CoreReading, Health, HealthState, Reading
from npu_agent.core.ledger import Assignment, Holding, PreparedDevice, card_of, part_of
from npu_agent.core.problems import Note, notes, problems, unready
from npu_agent.core.state import (
    AgentState,
    SessionPhase,
    SessionStatus,
    SlicesState,
    is_fenced,
)
from npu_agent.outputs.web import markup as m
from npu_agent.outputs.web.history import SPAN, Point

_HERE = Path(__file__).parent
_HTML = Template((_HERE / "page.html").read_text())
"""Its links are relative: the page may be seen through a proxy, below a path."""
_STYLE = (_HERE / "page.css").read_text()
_SCRIPT = (_HERE / "page.js").read_text()


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


def page(state: AgentState, history: Callable[[str], Sequence[Point]]) -> str:
    """The document.

    Args:
        state: what it shows.
        history: a card's last readings, by the card's ID.
    """
    found = problems(state)
    summary = m.number(len(found), "problem") if found else "all well"
    return _HTML.substitute(
        build=_BUILD,
        title=f"{m.plain(state.node or _NO_NODE)}: {summary} - npu-agent",
        style=_STYLE,
        script=_SCRIPT,
        top=_top(state),
        head=_head(state, found),
        sum=_sum(state),
        cards=_cards(state, history),
        assignments=_assignments(state),
        resources=_resources(state),
        dra=_dra(state),
        config=_config(state),
        labels=_labels(state),
        odd=_odd(state),
    )


_NO_NODE = "unknown node"
_SEARCHING = "Still searching for cards"


def _cards(state: AgentState, history: Callable[[str], Sequence[Point]]) -> str:
    cards = state.snapshot.cards[: m.MOST]
    if not cards:
        none = "No cards on this host." if state.snapshot.complete else _SEARCHING
        return f'<div class="box">{m.empty(none)}</div>'
    tiles = "".join(_card(card, state, history(card.id)) for card in cards)
    return f'<div class="cards">{tiles}</div>'


def _sum(state: AgentState) -> str:
    """Small print beside the title."""
    cards, limit = state.snapshot.cards, state.max_temperature
    if not cards:
        return ""
    in_use = sum(bool(state.holdings_of(card)) for card in cards)
    fence = "" if limit is None else f", taken out of service above {limit:g}{m.NBSP}°C"
    return f"<small>{len(cards)} installed, {in_use} in use{fence}</small>"


def _top(state: AgentState) -> str:
    return (
        f'<div class="top"><h1>{m.text(state.node or _NO_NODE)}</h1><p class="facts">'
        f"<span>npu-agent {m.text(state.version)}</span>"
        f"<span>up {m.span(state.now - state.started_at)}</span>"
        f"<span>as of {m.clock(state.now)} UTC</span></p></div>"
    )


def _head(state: AgentState, found: Sequence[Note]) -> str:
    """What is wrong, or that nothing is."""
    cards = state.snapshot.cards
    sick, counted = sum(map(is_fenced, cards)), m.number(len(cards), "card")
    if not found:
        kind, icon = "good", "good"
        text = f"All is well: {counted}" if cards else "All is well: no cards here"
        if not state.snapshot.complete:
            kind, icon, text = "plain", "wait", _SEARCHING
    else:
        kind = icon = "bad" if sick or unready(state) else "warn"
        text = m.number(len(found), "problem")
        if sick:
            text += f": {sick} of {counted} unhealthy"
    shown = [(note, "problem") for note in found] + [(note, "note") for note in notes(state)]
    lines = "".join(
        f'<li class="{kind_}"><a id="to-{number}" href="#{_anchor(note, state)}">'
        f"{m.text(note.text)}</a></li>"
        for number, (note, kind_) in enumerate(shown[: m.MOST])
    )
    return (
        f'<div class="head {kind}"><h2 id="headline">{m.icon(icon)}<span>{text}</span></h2>'
        + (f"<ul>{lines}</ul>" if lines else "")
        + "</div>"
    )


def _anchor(note: Note, state: AgentState) -> str:
    for card in state.snapshot.cards:
        if note.card == card.id:
            return _card_anchor(card)
    return {"card": "cards", "resource": "resources", "hardware": "not-served"}.get(
        note.subject, note.subject
    )


def _card_anchor(card: CardState) -> str:
    return "-".join(map(str, card.card.key))


def _card_link(card: CardState, number: int) -> str:
    """A link to the card; `number` tells apart the links to one card: ids keep the focus."""
    anchor = _card_anchor(card)
    return f'<a id="at-{anchor}-{number}" href="#{anchor}">{m.text(card.card.name)}</a>'


def _card(card: CardState, state: AgentState, points: Sequence[Point]) -> str:
    anchor = _card_anchor(card)
    sick = " sick" if is_fenced(card) else ""
    off = f" {m.pill('plain', 'disabled', 'off')}" if state.is_disabled(card) else ""
    return (
        f'<article class="card{sick}" id="{anchor}" aria-labelledby="{anchor}-t">'
        f'<header><h3 id="{anchor}-t">{m.text(card.card.name)}'
        f"<small>{m.text(card.card.title)}</small></h3>"
        f"<div>{_PILLS[card.health.state]}{off}</div></header>"
        + _why(card.health, state.now)
        + _figures(card, state, points)
        + _loads(card.reading.cores if card.reading else (), stale=state.is_stale(card))
        + _users(card, state.holdings_of(card))
        + _traits(card, anchor)
        + "</article>"
    )


def _why(health: Health, now: float) -> str:
    """The reason for a card's health, and since when; emphasised unless it is healthy."""
    since = f"since {m.when(health.since, now)}"
    if health.state is HealthState.HEALTHY:
        return f'<p class="why">{m.text(health.reason)} {since}</p>'
    return f'<p class="why"><b>{m.text(health.reason)}</b>{since}</p>'


_PILLS = {
    HealthState.HEALTHY: m.pill("good", "healthy"),
    HealthState.UNHEALTHY: m.pill("bad", "unhealthy"),
    HealthState.UNKNOWN: m.pill("warn", "unknown", "unknown"),
}


def _figures(card: CardState, state: AgentState, points: Sequence[Point]) -> str:
    """Temperature, power and load: the present value, and the curve of the last minutes."""
    stale, read_at, limit = state.is_stale(card), state.read_at(card), state.max_temperature
    now = Point.of(card.reading or Reading(at=state.monotonic))
    recent = [point for point in points if point.at >= state.monotonic - SPAN]
    at = [int(m.WIDE * (1 - (state.monotonic - point.at) / SPAN)) for point in recent]
    hot = limit is not None and now.temperature > limit
    figures = (
        ("Temperature", now.temperature, "°C", 0, [point.temperature for point in recent], 10.0),
        ("Power", now.power, "W", 1, [point.power for point in recent], 1.0),
        ("Load", now.load, "%", 0, [point.load for point in recent], 100.0),
    )
    cells = []
    for title, value, unit, digits, values, least in figures:
        shown = m.UNKNOWN if math.isnan(value) else f"{value:.{digits}f}{m.NBSP}{unit}"
        style = " stale" if stale else " hot" if hot and title == "Temperature" else ""
        cells.append(
            f'<div><dt>{title}</dt><dd class="value{style}">{shown}</dd>'
            f"{m.curve(title, at, values, least, digits)}</div>"
        )
    old = ""
    if stale and read_at is not None:
        old = f'<p class="why">{m.pill("warn", "stale")} read {m.when(read_at, state.now)}</p>'
    return f'<dl class="figures">{"".join(cells)}</dl>{old}'


def _loads(cores: Sequence[CoreReading], *, stale: bool) -> str:
    """A bar for the load of each core."""
    if not any(core.utilization is not None for core in cores):
        return ""
    few = len(cores) <= 4
    items = []
    for core in cores[:64]:
        load = core.utilization
        known = load is not None and math.isfinite(load) and not stale
        full = min(100.0, max(0.0, load)) if load is not None and known else 0.0
        if few:
            box, bar = "0 0 100 10", f'<rect width="{full:.1f}" height="10"/>'
        else:
            box, bar = "0 0 10 100", f'<rect y="{100 - full:.1f}" width="10" height="{full:.1f}"/>'
        items.append(
            f'<li><svg viewBox="{box}" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'
            f"<b>{f'{load:.0f}' if known else m.UNKNOWN}</b>"
            '<span class="away">% on core </span> '
            f"<span>{'core ' if few else ''}{core.core}</span></li>"
        )
    return (
        '<div><p class="caption" aria-hidden="true">Load of each core in %</p>'
        f'<ul class="cores{" few" if few else ""}" aria-label="Load of each core in per cent">'
        f"{''.join(items)}</ul></div>"
    )


def _users(card: CardState, holdings: Sequence[Holding]) -> str:
    if not holdings:
        return '<ul class="users"><li class="dim">not in use</li></ul>'
    items = "".join(
        f'<li><span class="cut">{_cut(holding, card)}</span>'
        f'<span><span class="dim">{m.text(holding.assignment.namespace)} /</span> '
        f"{_pod(holding.assignment)}</span></li>"
        for holding in holdings[: m.MOST]
    )
    return f'<ul class="users" aria-label="In use by">{items}</ul>'


def _cut(holding: Holding, card: CardState) -> str:
    if holding.cores == card.card.all_cores:
        return "all cores"
    return f"core{'s' if len(holding.cores) > 1 else ''} {holding.cores}"


def _pod(holder: Assignment) -> str:
    container = f' <span class="dim">/ {m.text(holder.container)}</span>'
    return m.text(holder.pod) + (container if holder.container else "")


def _traits(card: CardState, anchor: str) -> str:
    """What the card is: the most important facts on one line, the rest behind a click."""
    what, reading = card.card, card.reading
    errors = (
        ", ".join(f"{name} {count}" for name, count in reading.errors if count) if reading else ""
    )
    numa = None if what.numa_node is None else str(what.numa_node)
    driver = what.driver_version and what.driver_version.partition(",")[0]
    brief = (what.pci_bus_id, numa and f"NUMA {numa}", driver and f"driver {driver}")
    uptime = None if reading is None or reading.uptime is None else m.span(reading.uptime)
    pairs = (
        ("Product", what.product),
        ("PCI address", what.pci_bus_id),
        ("NUMA node", numa),
        ("Driver", what.driver_version),
        ("Firmware", what.firmware_version),
        ("Serial", what.serial),
        ("Device ID", card.id),
        ("Running for", uptime),
    )
    items = "".join(f"<dt>{k}</dt><dd>{m.text(v)}</dd>" for k, v in pairs if v is not None)
    return (
        '<div class="traits">'
        + (f'<p class="errors">errors counted: {m.text(errors)}</p>' if errors else "")
        + f'<details id="{anchor}-more"><summary id="to-{anchor}-more">'
        f"{m.text(' · '.join(filter(None, brief))) or 'Details'}</summary>"
        f"<dl>{items}</dl></details></div>"
    )


def _assignments(state: AgentState) -> str:
    held = [
        (
            holding.assignment,
            f"{_card_link(card, number)}, {_cut(holding, card)} "
            + (_PILLS[card.health.state] if card.health.state is not HealthState.HEALTHY else ""),
        )
        for card in state.snapshot.cards
        for number, holding in enumerate(state.holdings_of(card))
    ]
    held += [
        (gone, f"gone: {m.text(gone.device)} {_PILLS[HealthState.UNHEALTHY]}")
        for gone in state.gone
    ]
    rows = [
        (
            m.text(holder.namespace),
            _pod(holder),
            what,
            m.text(holder.resource) + (f", claim {m.text(holder.claim)}" if holder.claim else ""),
        )
        for holder, what in sorted(held, key=lambda one: one[0])
    ]
    trouble = ""
    if state.assignments_error is not None:
        trouble = m.error("warn", f"As last known: {state.assignments_error}")
    table = m.table(("Namespace", "Pod", "Holds", "Resource"), rows)
    return trouble + (table or m.empty("No container holds a card."))


def _resources(state: AgentState) -> str:
    rows = [
        (
            m.text(one.session.resource),
            _phase(one.session),
            f"{sum(device.healthy for device in one.devices)} of {len(one.devices)} healthy"
            if one.devices
            else "none",
            str(one.session.registrations),
        )
        for one in state.resources
    ]
    withheld = [
        (m.text(device.name), m.text(device.reason))
        for one in state.resources
        for device in state.withheld(one)
    ]
    table = m.table(("Resource", "At the kubelet", "Devices", "Registrations"), rows)
    return (table or m.empty("No card is offered by the device plugin.")) + m.table(
        ("Device", "Withheld because"), withheld
    )


def _dra(state: AgentState) -> str:
    """The DRA drivers and their prepared claims; nothing where there is no driver to serve."""
    if not state.dra:
        return ""
    drivers = [
        (
            m.text(one.name),
            _phase(one.session),
            _slices(one.slices),
            f"{sum(not device.taints for device in one.devices)} of {len(one.devices)} without "
            "taints"
            if one.devices
            else "none",
            str(one.session.registrations),
        )
        for one in state.dra
    ]
    claims = [
        (
            m.text(claim.namespace),
            m.text(claim.name),
            m.text(", ".join(claim.pods)) or m.UNKNOWN,
            "<br>".join(_claimed(device, state) for device in claim.devices),
        )
        for one in state.dra
        for claim in sorted(one.claims, key=lambda claim: (claim.namespace, claim.name))
    ]
    columns = ("Driver", "At the kubelet", "ResourceSlices", "Devices", "Registrations")
    prepared = m.table(("Namespace", "Claim", "Pods", "Devices"), claims)
    return (
        '<section id="dra" aria-labelledby="dra-title"><h2 id="dra-title">Claims (DRA)</h2>'
        f'<div class="box">{m.table(columns, drivers)}'
        f"{prepared or m.empty('No claim is prepared.')}</div></section>"
    )


def _slices(slices: SlicesState) -> str:
    """Whether they are in place, and what they are."""
    if slices.published:
        state = m.pill("good", "published")
    else:
        state = m.pill("bad", "not published") if slices.trouble else _NOT_YET
    lines = [f"{m.number(slices.slices, 'slice')}, generation {slices.generation}"]
    if slices.incomplete:
        lines.append("the pool is incomplete: the scheduler does not use it")
    if slices.trouble:
        lines.append(m.text(str(slices.trouble)))
    if slices.dropped:
        lines.append(m.text(f"dropped by the API server: {', '.join(slices.dropped)}"))
    return f"<span>{state}<br>{'<br>'.join(lines)}</span>"


_NOT_YET = m.pill("plain", "not yet", "wait")


def _claimed(device: PreparedDevice, state: AgentState) -> str:
    """A device of a claim: its card, if that is present, and what it is for."""
    card_id = card_of(device.footprint, state.snapshot.cards)
    cards = (card for card in state.snapshot.cards if card.id == card_id)
    name = next((card.card.name for card in cards), None)
    what = m.text(name) if name else f"gone: {m.text(device.device)}"
    if part := part_of(device.footprint, state.snapshot.cards):
        what += f" cores {part}" if len(part) > 1 else f" core {part}"
    return f"{what} for {m.text(device.request)}{', admin access' if device.admin else ''}"


def _phase(session: SessionStatus) -> str:
    kind, sign = {
        SessionPhase.REGISTERED: ("good", ""),
        SessionPhase.NO_CARDS: ("plain", "wait"),
        SessionPhase.STANDBY: ("plain", "wait"),
        SessionPhase.REGISTERING: ("warn", ""),
    }.get(session.phase, ("bad", ""))
    reason = f"<br>{m.text(session.reason)}" if session.reason else ""
    return f"<span>{m.pill(kind, session.phase.value, sign)}{reason}</span>"


def _config(state: AgentState) -> str:
    config = state.config
    status = m.pill("good", "in force")
    if config.error is not None:
        status = f"{m.pill('bad', 'file refused')} the last good one stays in force"
    pairs = [
        ("State", status),
        ("Generation", str(config.generation)),
        ("Last good", m.when(config.loaded_at, state.now)),
        ("Refused versions", str(config.rejected)),
    ]
    if config.waiting:
        keys = ", ".join(f"<code>{m.text(key)}</code>" for key in config.waiting)
        pairs.append(("Waits for a restart", keys))
    if config.error is not None:
        pairs.append(("What is wrong", m.error("bad", config.error)))
    return m.pairs(pairs)


def _labels(state: AgentState) -> str:
    labels = state.labels
    if labels is None or labels.output == "none":
        return m.empty("Switched off.")
    status = m.pill("good", "in place") if labels.in_place else _NOT_YET
    if labels.error is not None:
        status = m.pill("bad", "not in place")
    written = "not by this process"
    if labels.applied_at is not None:
        written = m.when(labels.applied_at, state.now)
    pairs = [
        ("State", status),
        ("Written to", "the Node itself" if labels.output == "api" else "Node Feature Discovery"),
        ("Last written", written),
    ]
    if labels.error is not None:
        pairs.append(("What is wrong", m.error("bad", labels.error)))
    rows = [(m.text(key), m.text(value)) for key, value in sorted(labels.labels.items())]
    return m.pairs(pairs) + m.table(("Label", "Value"), rows)


def _odd(state: AgentState) -> str:
    if not state.snapshot.odd:
        return ""
    rows = [(f"<code>{m.text(odd.entry)}</code>", m.text(odd.reason)) for odd in state.snapshot.odd]
    return (
        '<section id="not-served" aria-labelledby="not-served-title">'
        '<h2 id="not-served-title">Found and not served</h2>'
        f'<div class="box">{m.table(("Entry", "Why"), rows)}</div></section>'
    )
