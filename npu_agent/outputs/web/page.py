"""The status page: the state of the agent as one HTML document that needs nothing else. Pure.

Made for an engineer on call at night: the first line says whether all is well, and if not, what
is wrong. Works without JavaScript (the page then reloads itself), on a phone and in dark mode.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from npu_agent.core.hardware import HealthState
from npu_agent.core.ledger import PreparedDevice, card_of
from npu_agent.core.problems import Note, notes, problems, unready
from npu_agent.core.state import (
    AgentState,
    SessionPhase,
    SessionStatus,
    SlicesState,
    is_fenced,
)
from npu_agent.core.timeline import SPAN, TimelineEntry
from npu_agent.outputs.web import card_view as view
from npu_agent.outputs.web import markup as m
from npu_agent.outputs.web.words import (
    LANGUAGES,
    in_language,
    template,
    translate,
    translate_clauses,
)
from npu_agent.text import natural

_HERE = Path(__file__).parent
_HTML = (_HERE / "page.html").read_text()
"""Its links are relative: the page may be seen through a proxy, below a path."""
_STYLE = (_HERE / "page.css").read_text()
_SCRIPT = (_HERE / "page.js").read_text()
_RUNBOOK = (_HERE / "page.runbook.html").read_text()


def _steps(language: str) -> str:
    """The runbook, made with the wheel: a checkout that was never installed has none."""
    made = _HERE / f"runbook.{language}.html"
    return made.read_text() if made.exists() else "<p>python docs/runbook.py makes this page.</p>"


_STEPS = {language: _steps(language) for language in LANGUAGES}


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


def page(state: AgentState, history: view.Tracks, language: str = "en") -> str:
    """The document; `history` gives a card's last hour by the card's ID."""
    with in_language(language):
        parts = _parts(state, history)
    return template(_HTML, language).substitute(language=language, **parts)


def _parts(state: AgentState, history: view.Tracks) -> dict[str, str]:
    wrong = problems(state)
    summary = translate("all well")
    if wrong:
        summary = translate_clauses(wrong[0].short)
        summary += f" (+{len(wrong) - 1})" if len(wrong) > 1 else ""
    node = state.node or translate(_NO_NODE)
    return {
        "build": _BUILD,
        "title": m.plain(f"{summary} - {node} - npu-agent"),
        "style": _STYLE,
        "script": _SCRIPT,
        "node": m.text(node),
        "version": m.text(state.version),
        "up": m.span(state.monotonic - state.started_at),
        "now": m.clock(state.monotonic, state),
        "head": _head(state, wrong),
        "sum": _sum(state),
        "cards": _cards(state, history),
        "timeline": _timeline(state),
        "assignments": _assignments(state),
        "resources": _resources(state),
        "dra": _dra(state),
        "config": _config(state),
        "labels": _labels(state),
        "condition": _condition(state),
        "odd": _skipped(state),
    }


def runbook(language: str = "en") -> str:
    """Renders the runbook that problems link to, in one of `LANGUAGES`."""
    document = template(_RUNBOOK, language)
    return document.substitute(language=language, style=_STYLE, steps=_STEPS[language])


_NO_NODE = "unknown node"
_SEARCHING = "Still searching for cards"
_CLASSES = {"critical": "problem", "warning": "problem warning", "info": "note"}


def _cards(state: AgentState, history: view.Tracks) -> str:
    none = "No cards on this host." if state.snapshot.complete else _SEARCHING
    more = ""
    if len(state.snapshot.cards) > m.MOST:
        more = m.empty(translate("The first {0} are shown: see {1}", m.MOST, m.ALL))
    return (view.cards(state, history) or f'<div class="box">{m.empty(none)}</div>') + more


def _sum(state: AgentState) -> str:
    cards, limit = state.snapshot.cards, state.max_temperature
    if not cards:
        return ""
    in_use = sum(bool(state.usages_of(card)) for card in cards)
    text = translate("{0} installed, {1} in use", len(cards), in_use)
    if limit is not None:
        text += translate(", taken out of service above {0}", f"{limit:g}{m.NBSP}°C")
    return f"<small>{text}</small>"


def _head(state: AgentState, wrong: Sequence[Note]) -> str:
    if wrong:
        bad = wrong[0].severity == "critical" or unready(state)
        kind = icon = "bad" if bad else "warn"
        text = m.text(translate_clauses(wrong[0].short))
        if len(wrong) > 1:
            text += translate(", and {0}", m.number(len(wrong) - 1, "more problem"))
    elif state.snapshot.complete:
        kind = icon = "good"
        text = translate("Healthy: no cards on this node")
        if cards := state.snapshot.cards:
            text = translate("Healthy: {0}", m.number(len(cards), "card"))
    else:
        kind, icon, text = "plain", "wait", translate(_SEARCHING)
    shown = (*wrong, *notes(state))[: m.MOST]
    lines = "".join(
        f'<li class="{_CLASSES[note.severity]}">'
        f'<a id="to-{number}" href="#{_anchor(note, state)}">'
        f"{m.text(translate_clauses(note.text))}</a>"
        f"{_since(note, state)}{_to_do(note, number)}</li>"
        for number, note in enumerate(shown)
    )
    return (
        f'<div class="head {kind}"><h2 id="headline">{m.icon(icon)}<span>{text}</span></h2>'
        f"{_readiness(state)}{f'<ul>{lines}</ul>' if lines else ''}</div>"
    )


def _readiness(state: AgentState) -> str:
    reasons = unready(state)
    if not reasons:
        offers = state.resources or state.dra
        registered = "Ready: every resource with cards is registered, and the config is applied."
        words = translate(registered if offers else "Ready: the config is applied.")
        if (cards := state.snapshot.cards) and all(is_fenced(card) for card in cards):
            words = translate("0 of {0} cards can be given to Pods", len(cards))
        return f'<p class="ready">{words}</p>'
    first = translate_clauses(reasons[0].partition("\n")[0])
    more = translate(" (and {0} more)", len(reasons) - 1) if len(reasons) > 1 else ""
    return f'<p class="ready"><b>{translate("Not ready:")}</b> {m.text(first)}{more}</p>'


def _since(note: Note, state: AgentState) -> str:
    if note.since is None:
        return ""
    return f' <small class="since">{m.since(note.since, state)}</small>'


def _to_do(note: Note, number: int) -> str:
    """The remedy, the command to copy, and a link to the steps."""
    remedy = m.prose(translate_clauses(note.remedy)) if note.remedy else ""
    steps = ""
    if note.runbook:
        word, link = translate("Steps"), f"runbook#{note.runbook}"
        steps = f'<a id="do-{number}" class="steps" href="{link}">{word}</a>'
    commands = filter(None, (note.command, note.last_command))
    command = "".join(f'<code class="command">{m.text(command)}</code>' for command in commands)
    return f'<p class="do">{remedy} {steps}{command}</p>' if remedy or steps or command else ""


_ANCHORS = {
    "card": "cards",
    "hardware": "not-served",
    "cdi": "cards",
    "node": "cards",
    "resource": "resources",
}
"""Where the page tells more of a note's subject; of the others under their own name."""


def _anchor(note: Note, state: AgentState) -> str:
    for card in state.snapshot.cards:
        if note.card == card.id:
            return view.anchor_of(card)
    if note.subject == "dra" and not state.dra:
        return "resources"
    return _ANCHORS.get(note.subject, note.subject)


_SHOWN = 8
"""Entries of the timeline that are shown before the reader asks for more."""


def _timeline(state: AgentState) -> str:
    """Renders the events of a day: as a strip, and in words, the latest first."""
    entries = state.timeline.entries(state.monotonic)
    if not entries:
        return m.empty("Nothing yet.")
    lines = [_entry(entry, state) for entry in entries]
    rest = ""
    if len(entries) > _SHOWN:
        last = m.clock(entries[-1].at, state)
        more = translate("{0} more, back to {1}", len(entries) - _SHOWN, last)
        rest = (
            f'<details id="earlier"><summary id="to-earlier">{more}</summary>'
            f'<ol class="happened">{"".join(lines[_SHOWN:])}</ol></details>'
        )
    first = f'<ol class="happened">{"".join(lines[:_SHOWN])}</ol>'
    return f"{_strip(entries, state.monotonic)}{first}{rest}"


def _entry(entry: TimelineEntry, state: AgentState) -> str:
    times = ""
    if entry.count > 1:
        first = m.clock(entry.first, state)
        times = f" <small>{translate('{0} times since {1}', entry.count, first)}</small>"
    icon = m.icon("dot" if entry.tone == "plain" else entry.tone)
    return (
        f'<li class="{entry.tone}-tone">{m.clock(entry.at, state)}{icon}'
        f"<span>{m.text(entry.text)}{times}</span></li>"
    )


def _strip(entries: Sequence[TimelineEntry], now: float) -> str:
    """A day from left to right, a mark for each minute in which something happened."""
    marks = dict.fromkeys(
        (tone, int(1440 * (1 - (now - at) / SPAN)))
        for tone in ("plain", "good", "warn", "bad")  # the worst is drawn last
        for entry in entries
        if entry.tone == tone
        for at in (entry.first, entry.at)
        if now - at < SPAN
    )
    drawn = "".join(f'<path class="{tone}-tone" d="M{x} 2V22"/>' for tone, x in marks)
    labels = "".join(
        f"<span>{translate(label)}</span>" for label in ("24 h ago", "18", "12", "6", "now")
    )
    return (
        '<div class="strip" aria-hidden="true"><svg viewBox="0 0 1440 24" '
        f'preserveAspectRatio="none"><path class="base" d="M0 23H1440"/>{drawn}</svg>'
        f'<p class="axis">{labels}</p></div>'
    )


def _assignments(state: AgentState) -> str:
    held = []
    for card in state.snapshot.cards:
        pill = "" if card.health.state is HealthState.HEALTHY else view.pill_of(card)
        held += [
            (usage.assignment, f"{view.link(card, number)}, {view.cores_of(usage, card)} {pill}")
            for number, usage in enumerate(state.usages_of(card))
        ]
    gone = m.pill("bad", "unhealthy")
    held += [
        (device.assignment, f"{translate('gone: {0}', m.text(device.name))} {gone}")
        for device in state.gone
    ]
    rows = [
        (
            m.text(holder.namespace),
            view.pod(holder),
            what,
            m.text(holder.resource)
            + (translate(", claim {0}", m.text(holder.claim)) if holder.claim else ""),
        )
        for holder, what in sorted(held, key=lambda row: (natural(row[0].pod_name), row[0]))
    ]
    error = state.assignments_error
    trouble = m.error("warn", error and translate("As last known: {0}", error))
    table = m.table(("Namespace", "Pod", "Holds", "Resource"), rows)
    return trouble + (table or m.empty("No container holds a card."))


def _count(good: int, devices: Sequence[object], words: str) -> str:
    return (
        translate(f"{{0}} of {{1}} {words}", good, len(devices)) if devices else translate("none")
    )


def _resources(state: AgentState) -> str:
    rows = [
        (
            m.text(row.session.resource),
            _phase(row.session),
            _count(sum(device.healthy for device in row.devices), row.devices, "healthy"),
            str(row.session.registrations),
        )
        for row in state.resources
    ]
    withheld = [
        (m.text(device.name), m.text(device.reason))
        for row in state.resources
        for device in state.withheld(row)
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
            m.text(row.name),
            _phase(row.session),
            _slices(row.slices),
            _count(sum(not device.barred for device in row.devices), row.devices, "without taints"),
            str(row.session.registrations),
        )
        for row in state.dra
    ]
    claims = [
        (
            m.text(claim.namespace),
            m.text(claim.name),
            m.text(", ".join(claim.pods)) or m.UNKNOWN,
            "<br>".join(_claimed(device, state) for device in claim.devices),
        )
        for driver in state.dra
        for claim in sorted(driver.claims, key=lambda claim: (claim.namespace, claim.name))
    ]
    columns = ("Driver", "At the kubelet", "ResourceSlices", "Devices", "Registrations")
    prepared = m.table(("Namespace", "Claim", "Pods", "Devices"), claims)
    return m.section(
        "dra",
        "Claims (DRA)",
        f"{m.table(columns, drivers)}{prepared or m.empty('No claim is prepared.')}",
    )


def _slices(slices: SlicesState) -> str:
    if slices.published:
        state = m.pill("good", "published")
    else:
        state = m.pill("bad", "not published") if slices.trouble else _not_yet()
    lines = [
        state,
        translate("{0}, generation {1}", m.number(slices.slices, "slice"), slices.generation),
    ]
    if slices.incomplete:
        lines.append(translate("the pool is incomplete: the scheduler does not use it"))
    if slices.trouble:
        lines.append(m.text(slices.trouble))
    if slices.dropped:
        lines.append(translate("dropped by the API server: {0}", m.text(", ".join(slices.dropped))))
    return f"<span>{'<br>'.join(lines)}</span>"


def _not_yet() -> str:
    return m.pill("plain", "not yet", "wait")


def _claimed(device: PreparedDevice, state: AgentState) -> str:
    """A device of a claim: its card, if that is present, and what it is for."""
    card, part = card_of(device.footprint, state.snapshot.cards), device.footprint.cores
    what = m.text(card.card.name) if card else translate("gone: {0}", m.text(device.device))
    if card and part != card.card.all_cores:
        what += f" {translate('cores {0}' if len(part) > 1 else 'core {0}', part)}"
    admin = translate(", admin access") if device.admin else ""
    return translate("{0} for {1}", what, m.text(device.request)) + admin


def _phase(session: SessionStatus) -> str:
    kind, sign = "bad", ""
    if session.phase is SessionPhase.REGISTERED:
        kind = "good"
    elif session.phase is SessionPhase.REGISTERING:
        kind = "warn"
    elif session.phase in (SessionPhase.NO_CARDS, SessionPhase.STANDBY, SessionPhase.WAITING):
        kind, sign = "plain", "wait"
    reason = f"<br>{m.text(session.reason)}" if session.reason else ""
    return f"<span>{m.pill(kind, session.phase.value, sign)}{reason}</span>"


def _config(state: AgentState) -> str:
    config = state.config
    status = m.pill("good", "in force")
    if config.error is not None:
        status = f"{m.pill('bad', 'file refused')} {translate('the last good one stays in force')}"
    waiting = ", ".join(f"<code>{m.text(key)}</code>" for key in config.waiting)
    return m.pairs(
        [
            ("State", status),
            ("Generation", str(config.generation)),
            ("Last good", m.when(config.loaded_at, state)),
            ("Refused versions", str(config.rejected)),
            ("Waits for a restart", waiting),
            ("What is wrong", m.error("bad", config.error)),
        ]
    )


_WRITERS = {"api": "the Node itself", "nfd": "Node Feature Discovery"}


def _labels(state: AgentState) -> str:
    labels = state.labels
    if labels is None:
        return m.empty("Switched off.")
    status = m.pill("good", "in place") if labels.in_place else _not_yet()
    if labels.error is not None:
        status = m.pill("bad", "not in place")
    written = translate("not by this process")
    if labels.applied_at is not None:
        written = m.when(labels.applied_at, state)
    pairs = [
        ("State", status),
        ("Written to", translate(_WRITERS[labels.output])),
        ("Last written", written),
        ("What is wrong", m.error("bad", labels.error)),
    ]
    rows = [(m.text(key), m.text(value)) for key, value in sorted(labels.labels.items())]
    return m.pairs(pairs) + m.table(("Label", "Value"), rows)


def _condition(state: AgentState) -> str:
    """The condition as the Node has it; nothing where the config asks for none."""
    if (now := state.condition) is None:
        return ""
    status = _not_yet()
    if now.status is not None:
        status = m.pill("good" if now.status else "bad", str(now.status))
    pairs = [
        ("Type", m.text(now.type)),
        ("Status", status),
        ("Reason", m.text(now.reason)),
        ("Message", m.plain(now.message, 1000)),
        ("What is wrong", m.error("bad", now.error)),
    ]
    return m.section("condition", "Condition of the Node", m.pairs(pairs))


def _skipped(state: AgentState) -> str:
    rows = [
        (f"<code>{m.text(row.entry)}</code>", m.text(row.reason)) for row in state.snapshot.skipped
    ]
    if not rows:
        return ""
    return m.section("not-served", "Found and not served", m.table(("Entry", "Why"), rows))
