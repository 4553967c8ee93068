"""The cards on the status page: a tile each, those with a problem first. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from npu_agent.core.advice import plain_reason
from npu_agent.core.comparison import plain
from npu_agent.core.hardware import Card, CardState, CoreReading, Health, HealthState, Reading
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.core.problems import is_hot
from npu_agent.core.state import AgentState, is_fenced
from npu_agent.core.timeline import GoneCard
from npu_agent.core.trends import TrendKind
from npu_agent.outputs.web import markup as m
from npu_agent.outputs.web.history import Figures, Track, step_of
from npu_agent.outputs.web.words import translate

MANY = 12
"""Cards from which on a tile is small, and shows the rest of it when it is opened."""
_IN_FULL = 6
"""Cards with a problem that have a large tile even so; of more, each has a small one."""

Tracks = Callable[[str], Track]


def cards(state: AgentState, tracks: Tracks) -> str:
    """Renders all cards, including missing ones; empty where there are none."""
    gone = [_gone(lost, state) for lost in state.missing]
    cards = sorted(state.snapshot.cards, key=lambda card: _urgency(card, state))[: m.MOST]
    if len(cards) + len(gone) <= MANY:
        fenced = sum(is_fenced(card) for card in cards)
        large = [_large(card, state, tracks(card.id)) for card in cards]
        large[fenced:fenced] = gone
        small = []
    else:
        urgent = [card for card in cards if _urgency(card, state) < _WELL]
        urgent = urgent if len(urgent) <= _IN_FULL else []
        large = [_large(card, state, tracks(card.id)) for card in urgent] + gone[:_IN_FULL]
        # Each keeps its place when others change.
        small = [
            _small(card, state, tracks(card.id), opens=card not in urgent)
            for card in state.snapshot.cards[: m.MOST]
        ]
    return "".join(
        f'<div class="{kind}">{"".join(shown)}</div>'
        for kind, shown in (("cards", large), ("many", small))
        if shown
    )


_WELL = 3


def _urgency(card: CardState, state: AgentState) -> int:
    """Cards are sorted by it; among equals the order stays that of their numbers."""
    if is_fenced(card):
        return 0
    if (
        is_hot(card, state)
        or state.is_stale(card)
        or (TrendKind.ERRORS, card.id) in state.trends.found
    ):
        return 1
    return 2 if card.health.state is HealthState.UNKNOWN else _WELL


def anchor_of(card: CardState) -> str:
    return "-".join(map(str, card.card.key))


def link(card: CardState, number: int) -> str:
    """A link to the card; `number` tells apart the links to one card: ids keep the focus."""
    anchor = anchor_of(card)
    return f'<a id="at-{anchor}-{number}" href="#{anchor}">{m.text(card.card.name)}</a>'


def _large(card: CardState, state: AgentState, track: Track, look: str | None = None) -> str:
    anchor, look = anchor_of(card), _look(card, state) if look is None else look
    more = m.pill("warn", "hot") if is_hot(card, state) else ""
    more += m.pill("plain", "disabled", "off") if state.is_disabled(card) else ""
    more += m.pill("warn", "cordoned", "off") if card.id in state.cordons else ""
    return _article(
        anchor,
        look,
        card.card,
        f"{pill_of(card)}{more}",
        _why(card.health, state)
        + _figures(card, state, track)
        + _loads(_reading(card).cores, stale=state.is_stale(card))
        + _users(card, state.usages_of(card))
        + _traits(card, anchor),
    )


def _article(anchor: str, look: str, card: Card, pills: str, content: str) -> str:
    """The frame of a large tile; `look` is a class with a space before it, or nothing."""
    return (
        f'<article class="card{look}" id="{anchor}" aria-labelledby="{anchor}-t">'
        f'<header><h3 id="{anchor}-t">{m.text(card.name)}<small>{m.text(card.title)}</small></h3>'
        f'<div class="pills">{pills}</div></header>{content}</article>'
    )


def _small(card: CardState, state: AgentState, track: Track, *, opens: bool) -> str:
    """Renders a small tile; `opens`: it unfolds to the rest, else it links to the large tile.

    The browser opens it for a link to the card.
    """
    anchor, stale = anchor_of(card), state.is_stale(card)
    now = Figures.of(_reading(card))
    kind = {HealthState.HEALTHY: "good", HealthState.UNHEALTHY: "bad"}.get(
        card.health.state, "unknown"
    )
    hot = ' class="hot"' if is_hot(card, state) else ' class="dim"' if stale else ""
    load = 0.0 if math.isnan(now.load) or stale else min(100.0, max(0.0, now.load))
    holdings = state.usages_of(card)
    who = m.text(holdings[0].assignment.pod) if holdings else translate("free")
    if len(holdings) > 1:
        who += f" +{len(holdings) - 1}"
    if state.is_disabled(card) or (card.id in state.cordons and not holdings):
        who = translate("disabled" if state.is_disabled(card) else "cordoned")
    brief = (
        f'<span class="{kind} sign">{m.icon(kind)}'
        f'<span class="away">{translate(card.health.state.value)}</span></span>'
        f"<b>{m.text(card.card.name)}</b><span{hot}>{_shown(now.temperature, '°C')}</span>"
        f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{load:.0f}" height="10"/></svg>'
        f'<small class="{"who" if holdings else "who dim"}">{who}</small>'
    )
    look = _look(card, state)
    if not opens:
        return f'<a class="small{look}" id="to-{anchor}" href="#{anchor}">{brief}</a>'
    return (
        f'<details class="small{look}" id="{anchor}-box">'
        f'<summary id="to-{anchor}-box">{brief}</summary>{_large(card, state, track, look="")}'
        "</details>"
    )


def _look(card: CardState, state: AgentState) -> str:
    return " fenced" if is_fenced(card) else " warm" if is_hot(card, state) else ""


def _gone(lost: GoneCard, state: AgentState) -> str:
    card = lost.state.card
    holders = [
        f"{device.assignment.namespace} / {device.assignment.pod}"
        for device in state.gone
        if device.card_id == lost.state.id
    ]
    held = (
        f'<ul class="users"><li>{translate("held by {0}", m.text(", ".join(holders)))}</li></ul>'
        if holders
        else ""
    )
    anchor = f"gone-{'-'.join(map(str, card.key))}-{lost.since:.0f}"
    facts = (
        ("PCI address", card.pci_bus_id),
        ("Serial", card.serial),
        ("Device ID", lost.state.id),
    )
    return _article(
        anchor,
        " gone",
        card,
        m.pill("bad", "gone"),
        f'<p class="why"><b>{translate("not found on this host any more")}</b>'
        f"{m.since(lost.since, state)}"
        f' (<a id="to-{anchor}" href="runbook#npucardmissing">{translate("what to do")}</a>)'
        f"</p>{held}"
        f'<div class="traits">{m.facts(facts)}</div>',
    )


def _why(health: Health, state: AgentState) -> str:
    """The reason for a card's health, and since when; emphasised unless it is healthy."""
    if health.state is HealthState.HEALTHY:
        long, since = m.span(state.monotonic - health.since), m.clock(health.since, state)
        words = translate("healthy for {0}, since {1}", long, since)
        return f'<p class="why"><span class="dim">{words}</span></p>'
    return f'<p class="why"><b>{m.text(plain_reason(health))}</b>{m.since(health.since, state)}</p>'


def pill_of(card: CardState) -> str:
    """Renders the health in colour and words."""
    health = card.health.state
    if health is HealthState.UNKNOWN:
        return m.pill("warn", "unknown", "unknown")
    return m.pill("good" if health is HealthState.HEALTHY else "bad", health.value)


def _reading(card: CardState) -> Reading:
    """The card's reading; one that says nothing if there is none."""
    return card.reading or Reading(at=0.0)


def _shown(value: float, unit: str) -> str:
    return m.UNKNOWN if math.isnan(value) else f"{value:.1f}{m.NBSP}{unit}"


def _figures(card: CardState, state: AgentState, track: Track) -> str:
    """Temperature, power and load: the present value, and the curve of the last hour."""
    stale, hot = state.is_stale(card), is_hot(card, state)
    now, end = Figures.of(_reading(card)), step_of(state.monotonic)
    at = [m.WIDE - m.STEP_WIDE * (end - point.step) for point in track]
    rows = []
    for column, (title, unit, least) in enumerate(
        (("Temperature", "°C", 20.0), ("Power", "W", 5.0), ("Load", "%", 100.0))
    ):
        values = [point.figures[column] for point in track]
        alert = hot and title == "Temperature"
        ends = (0.0, 100.0) if unit == "%" else m.bounds(values, least)
        curve = m.curve(translate(title), zip(at, values, strict=True), ends, alert=alert)
        rows.append(
            f"<div><dt>{translate(title)}</dt>"
            f'<dd class="value{" hot" if alert else " stale" if stale else ""}">'
            f"{_shown(now[column], unit)}</dd>{curve}</div>"
        )
    old = axis = ""
    if stale and card.reading:
        read = translate("read {0}", m.when(card.reading.at, state))
        old = f'<p class="why">{m.pill("warn", "stale")} {read}</p>'
    if track:
        ago, now_ = translate("1 h ago"), translate("now")
        axis = f'<p class="axis" aria-hidden="true"><span>{ago}</span><span>{now_}</span></p>'
    return f'<dl class="figures">{"".join(rows)}</dl>{axis}{old}'


def _loads(cores: Sequence[CoreReading], *, stale: bool) -> str:
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
            f'<span class="away">{translate("% on core")} </span> '
            f"<span>{translate('core {0}', core.core) if few else core.core}</span></li>"
        )
    return (
        f'<div><p class="caption" aria-hidden="true">{translate("Load of each core in %")}</p>'
        f'<ul class="cores{" few" if few else ""}" '
        f'aria-label="{translate("Load of each core in %")}">{"".join(items)}</ul></div>'
    )


def _users(card: CardState, holdings: Sequence[Usage]) -> str:
    if not holdings:
        return f'<ul class="users"><li class="dim">{translate("not in use")}</li></ul>'
    items = "".join(
        f'<li><span class="cut">{cores_of(holding, card)}</span>'
        f'<span><span class="dim">{m.text(holding.assignment.namespace)} /</span> '
        f"{pod(holding.assignment)}</span></li>"
        for holding in holdings[: m.MOST]
    )
    return f'<ul class="users" aria-label="{translate("In use by")}">{items}</ul>'


def cores_of(holding: Usage, card: CardState) -> str:
    if holding.cores == card.card.all_cores:
        return translate("all cores")
    return translate("cores {0}" if len(holding.cores) > 1 else "core {0}", holding.cores)


def pod(holder: Assignment) -> str:
    container = f' <span class="dim">/ {m.text(holder.container)}</span>'
    return m.text(holder.pod) + (container if holder.container else "")


def _limits(reading: Reading) -> Iterator[tuple[str, str | None]]:
    """What the driver says of limits and errors; nothing of a driver that does not."""
    limits = reading.limits
    if limits.power is not None:
        watts = f"{limits.power:g} W"
        if limits.default_power:
            watts = translate("{0}, default {1} W", watts, f"{limits.default_power:g}")
        yield "Power limit", watts
    if reading.throttle is not None:
        yield "Throttled", ", ".join(map(plain, reading.throttle)) or translate("no")
    if limits.slowdown is not None:
        yield "Slows down at", f"{limits.slowdown:g} °C"
    if reading.error_text is not None:
        yield "Errors of the hardware", reading.error_text


def _traits(card: CardState, anchor: str) -> str:
    """Renders the card's properties: the most important on one line, the rest behind a click."""
    what, reading = card.card, _reading(card)
    errors = ", ".join(f"{name} {count}" for name, count in reading.errors if count)
    if errors:
        counted = translate("errors counted: {0}", m.text(errors))
        errors = f'<p class="errors">{counted}</p>'
    numa = None if what.numa_node is None else str(what.numa_node)
    driver = what.driver_version and what.driver_version.partition(",")[0]
    brief = (what.pci_bus_id, numa and f"NUMA {numa}", driver and translate("driver {0}", driver))
    uptime = None if reading.uptime is None else m.span(reading.uptime)
    pairs = (
        ("Product", what.product),
        ("PCI address", what.pci_bus_id),
        ("NUMA node", numa),
        ("Driver", what.driver_version),
        ("Firmware", what.firmware_version),
        ("Serial", what.serial),
        ("Device ID", card.id),
        ("Running for", uptime),
        *_limits(reading),
    )
    return (
        f'<div class="traits">{errors}'
        f'<details id="{anchor}-more"><summary id="to-{anchor}-more">'
        f"{m.text(' · '.join(filter(None, brief))) or translate('Details')}</summary>"
        f"{m.facts(pairs)}</details></div>"
    )
