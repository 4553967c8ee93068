"""The timeline: what has happened on this node within a day, bounded. Values only, no clock.

Times are seconds of `time.monotonic`; `npu_agent.core.changes` decides what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from npu_agent.core.hardware import CardState
from npu_agent.core.kinds import Kind, Message, NamedCard

SPAN = 86_400.0
MOST = 40
"""Entries of one subject: one that flaps displaces no other."""
GONE = 64
"""Cards that are gone."""
_LONGEST = 300

Subject = Literal["agent", "card", "errors", "assignments", "resource", "dra", "config", "labels"]
Tone = Literal["good", "bad", "warn", "plain"]


EntryKind = Literal[
    "AgentStarted",
    "NPURemoved",
    "NPULost",  # While no agent ran
    "NPUExchanged",
    "NPUAdded",
    "NPURenumbered",
    "NPUUnhealthy",
    "NPURecovered",
    "NPUHardwareError",
    "NPUHot",
    "NPUCooled",
    "NPUErrorsRising",
    "NPUErrorsQuiet",
    "NPUFlapping",
    "NPUSteady",
    "NPUSameUUID",
    "NPUOwnUUID",
    "NPULinkSlow",
    "NPULinkRestored",
    "NPUSlow",
    "NPUNotSlow",
    "NPUCordoned",
    "NPUUncordoned",
    "ConfigApplied",
    "ConfigAppliedInPart",
    "ConfigGoodAgain",
    "ConfigRejected",
    "Registered",
    "RegisteredAgain",
    "ResourceNotServed",
    "DRANotServed",
    "Standby",
    "RegistrationLost",
    "LabelsFailed",
    "LabelsApplied",
    "NPUReleased",
    "NPUGiven",
    "PodEvicted",
    "PodNotEvicted",  # It keeps a card that has failed
]
"""Kinds of entries. They are a contract: ``kind`` in /status.json, and the reasons of Events."""


class EntryTraits(NamedTuple):
    """What follows from the kind of an entry."""

    tone: Tone
    is_event: bool = False
    """Whether it is also an Event of the Node, with the kind as its reason."""
    problem: Kind | None = None
    """The kind of problem with the remedy that the Event has."""


ENTRIES: Mapping[EntryKind, EntryTraits] = {
    "AgentStarted": EntryTraits("plain"),
    "NPURemoved": EntryTraits("bad", True, "CardMissing"),
    "NPULost": EntryTraits("bad", True, "EarlierCardMissing"),
    "NPUExchanged": EntryTraits("plain", True),
    "NPUAdded": EntryTraits("good", True),
    "NPURenumbered": EntryTraits("plain"),
    "NPUUnhealthy": EntryTraits("bad", True, "CardUnhealthy"),
    "NPURecovered": EntryTraits("good", True),
    "NPUHardwareError": EntryTraits("warn", True, "ErrorsRising"),
    "NPUHot": EntryTraits("warn", True, "CardHot"),
    "NPUCooled": EntryTraits("good", True),
    "NPUErrorsRising": EntryTraits("warn", True, "ErrorsRising"),
    "NPUErrorsQuiet": EntryTraits("good", True),
    "NPUFlapping": EntryTraits("warn", True, "CardFlapping"),
    "NPUSteady": EntryTraits("good", True),
    "NPUSameUUID": EntryTraits("warn", True, "SameUUID"),
    "NPUOwnUUID": EntryTraits("good", True),
    "NPULinkSlow": EntryTraits("warn", True, "LinkSlow"),
    "NPULinkRestored": EntryTraits("good", True),
    "NPUSlow": EntryTraits("warn", True, "CardSlow"),
    "NPUNotSlow": EntryTraits("good", True),
    "NPUCordoned": EntryTraits("plain", True),
    "NPUUncordoned": EntryTraits("good", True),
    "ConfigApplied": EntryTraits("good"),
    "ConfigAppliedInPart": EntryTraits("good"),
    "ConfigGoodAgain": EntryTraits("good"),
    "ConfigRejected": EntryTraits("bad", True),
    "Registered": EntryTraits("good"),
    "RegisteredAgain": EntryTraits("good"),
    "ResourceNotServed": EntryTraits("bad"),
    "DRANotServed": EntryTraits("bad", True),
    "Standby": EntryTraits("plain"),
    "RegistrationLost": EntryTraits("warn"),
    "LabelsFailed": EntryTraits("warn"),
    "LabelsApplied": EntryTraits("good"),
    "NPUReleased": EntryTraits("plain"),
    "NPUGiven": EntryTraits("plain"),
    "PodEvicted": EntryTraits("warn", True),
    "PodNotEvicted": EntryTraits("warn", True),
}


@dataclass(frozen=True, slots=True)
class TimelineEntry(Message):
    """Something that happened, once or repeatedly."""

    kind: EntryKind
    subject: Subject = field(kw_only=True)
    at: float = field(default=0.0, kw_only=True)
    """The last time."""
    first: float = field(default=0.0, kw_only=True)
    """The first time."""
    count: int = field(default=1, kw_only=True)

    @property
    def card(self) -> NamedCard | None:
        return self.cards[0] if self.cards else None

    @property
    def tone(self) -> Tone:
        return ENTRIES[self.kind].tone

    def says_the_same_as(self, other: TimelineEntry) -> bool:
        return (self.kind, self.cards, self.facts) == (other.kind, other.cards, other.facts)


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

    def with_entries(self, happened: Iterable[TimelineEntry], now: float) -> Timeline:
        by_subject = dict(self._by_subject)
        for entry in happened:
            facts = {name: _cut(fact) for name, fact in entry.facts.items()}
            new = replace(entry, facts=facts, at=now, first=now)
            recent = [old for old in by_subject.get(entry.subject, ()) if now - old.at < SPAN]
            same = next((old for old in recent if old.says_the_same_as(new)), None)
            if same is not None:
                new = replace(new, first=same.first, count=same.count + 1)
                recent.remove(same)
            by_subject[entry.subject] = (*recent, new)[-MOST:]
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


def _cut(fact: object) -> object:
    return fact[:_LONGEST] if isinstance(fact, str) else fact
