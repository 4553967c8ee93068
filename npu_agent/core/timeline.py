"""The timeline: what has happened on this node within a day, bounded. Values only, no clock.

Times are seconds of `time.monotonic`; `npu_agent.core.changes` decides what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from npu_agent.core.hardware import CardState

SPAN = 86_400.0
MOST = 40
"""Entries of one subject: one that flaps displaces no other."""
GONE = 64
"""Cards that are gone."""
_LONGEST = 300

Subject = Literal["agent", "card", "errors", "assignments", "resource", "dra", "config", "labels"]
Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened, once or repeatedly."""

    subject: Subject
    tone: Tone
    text: str
    card: str | None = None
    at: float = 0.0
    """The last time."""
    first: float = 0.0
    """The first time."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class EventEntry(TimelineEntry):
    """An entry that is also an Event of the Node, if it has a `reason`."""

    reason: str = ""
    """``NPUUnhealthy``: one word, for programs."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class GoneCard:
    """A card that was here while the agent ran, and is not any more."""

    state: CardState
    """As it was at last, without a reading."""
    since: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Recent events and missing cards. Every method returns a new value."""

    _by_subject: Mapping[Subject, tuple[TimelineEntry, ...]] = field(default_factory=dict)
    """The latest comes last."""
    gone: tuple[GoneCard, ...] = ()
    """The one that left last comes first."""

    def noted(self, happened: Iterable[TimelineEntry], now: float) -> Timeline:
        by_subject = dict(self._by_subject)
        for entry in happened:
            text = entry.text[:_LONGEST]
            new = TimelineEntry(entry.subject, entry.tone, text, entry.card, at=now, first=now)
            known = [old for old in by_subject.get(entry.subject, ()) if now - old.at < SPAN]
            what = (text, entry.card, entry.tone)
            if same := next((old for old in known if (old.text, old.card, old.tone) == what), None):
                new = replace(new, first=same.first, count=same.count + 1)
                known.remove(same)
            by_subject[entry.subject] = (*known, new)[-MOST:]
        return replace(self, _by_subject=by_subject)

    def left(self, gone: Iterable[CardState], present: Iterable[CardState], now: float) -> Timeline:
        here = [state.card for state in present]
        left = (GoneCard(replace(state, reading=None), now) for state in gone)
        by_id: dict[str, GoneCard] = {}
        for card in (*left, *self.gone):
            if now - card.since < SPAN and not any(map(card.state.card.same_as, here)):
                by_id.setdefault(card.state.id, card)
        return replace(self, gone=tuple(by_id.values())[:GONE])

    def entries(self, now: float) -> tuple[TimelineEntry, ...]:
        entries = (
            entry for past in self._by_subject.values() for entry in past if now - entry.at < SPAN
        )
        return tuple(sorted(entries, key=lambda entry: -entry.at))
