"""Kinds of problems and notes, and what follows from a kind: severity, runbook, readiness. Pure.

`npu_agent.core.problems` finds problems; `npu_agent.wording` has the sentences, in each language.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from npu_agent.core.hardware import CardState, Cause

Subject = Literal[
    "card",
    "resource",
    "dra",
    "assignments",
    "config",
    "labels",
    "node",
    "condition",
    "hardware",
    "cdi",
]
Severity = Literal["critical", "warning", "info"]
"""Severities of the alerts: Pods lose NPUs now; this working day; for information."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


Kind = Literal[
    "CardUnhealthy",
    "AllCardsUnhealthy",  # No card of the node can be used
    "CardFlapping",
    "CardHot",
    "CardVeryHot",
    "ReadingsStale",
    "ErrorsRising",
    "LinkSlow",
    "CardSlow",
    "SameUUID",
    "CardMissing",
    "AllCardsMissing",
    "DeviceMissing",  # A Pod holds a device whose card was never seen by this agent
    "CardReplaced",
    "EarlierCardMissing",  # It was there before the agent restarted
    "FewerCardsThanExpected",
    "EntryUnreadable",
    "ResourceNotRegistered",
    "ResourceBlocked",
    "ResourceSearching",  # The search for cards is not complete yet
    "DRANotRegistered",
    "DRABlocked",
    "DRASearching",
    "SlicesNotPublished",
    "SlicesPending",
    "SlicesIncomplete",
    "SlicesForeign",  # Another client makes slices for this driver and node
    "APIServerAway",
    "APIUndecided",  # It is not known which API ``allocation.api: auto`` stands for
    "AssignmentsUnknown",
    "CDINotWritten",
    "HostNodeMissing",  # Of ``containers.deviceNodes``
    "ConfigRefused",
    "CertificateMissing",
    "CertificateExpired",
    "CertificateRefused",
    "CordonUnreadable",
    "CordonAmbiguous",
    "CordonRenumbered",  # Its name is another card's now
    "CordonOfMissingCard",  # The same, and the card that was meant is not here
    "CordonUnknown",  # This node has no such card
    "NodeNotWatched",
    "LabelsNotApplied",
    "ConditionNotWritten",
    "EvictionForbidden",  # The agent may evict no Pod
    "EvictionWaits",  # A Pod on a failed card is to be evicted, and is not yet
    # Notes.
    "CardsSimulated",
    "Maintenance",
    "CardLongMissing",
    "CordonedCardMissing",
    "EarlierCardLongMissing",
    "HealthUnknown",
    "ErrorsCounted",
    "CardCordoned",
    "CordonedCardUnhealthy",
    "CardDisabled",
    "DisabledNameMoved",  # The name in ``disabledDevices`` was another card's before
    "LimitsAlike",
    "ProductUnknown",  # The card was recognised by its nodes
    "VersionUnreadable",  # DRA's attribute for it is left out
    "LoadWithoutPod",
    "DeviceWithheld",
    "FieldsDropped",
    "PartitionsDropped",
    "ResourceStandby",
    "DRAStandby",
    "ConfigWaitsForRestart",
    "LabelsPending",
    "KernelUnheard",  # Cards that come and go are searched for
]
"""Kinds of problems and notes. They are a contract: ``kind`` in /status.json."""

Clause = Literal[
    "CardsFail",
    "AboveLimit",
    "Temperature",
    "FewerLanes",
    "SlowerLanes",
    "LanesBelowSiblings",
    "ClockBelowSiblings",
    "ClockLimitBelowSiblings",
    "PowerLimitBelowDefault",
    "PowerLimitBelowSiblings",
    "Throttled",
]
"""Kinds of what is so of a card, within the text of another message."""

EvictionClause = Literal[
    "EvictionOfHost",
    "EvictionInMaintenance",
    "EvictionInDoubt",
    "EvictionBudget",
    "EvictionFailed",
    "EvictedFrom",
]
"""Kinds of why a Pod is not evicted yet, and of what is said to one that was."""

ConditionClause = Literal[
    "CardsHealthy",
    "NoCardSeen",
    "CardsFenced",
    "CardsGone",
    "TooFewCards",
    "UnderMaintenance",
]
"""Kinds of what the Node condition says in addition."""


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What follows from a kind."""

    subject: Subject
    runbook: str = ""
    """The section of the runbook that has the steps; empty: there is none."""
    severity: Severity = "warning"
    held: Severity | None = None
    """The severity if Pods hold the cards; None: the same."""
    unready: bool = False
    """Whether it keeps the agent from being ready."""
    waits: bool = False
    """Whether it may be a consequence of an API server that does not answer."""
    doctor: bool = False
    """Whether the first step is `npu-agent doctor`."""


TRAITS: Mapping[Kind, KindTraits] = {
    "CardUnhealthy": KindTraits("card", "npucardunhealthy", "critical"),
    "AllCardsUnhealthy": KindTraits("card", "npucardunhealthy", "critical"),
    "CardFlapping": KindTraits("card", "npucardflapping"),
    "CardHot": KindTraits("card", "nputemperaturehigh"),
    "CardVeryHot": KindTraits("card", "nputemperaturecritical", "critical"),
    "ReadingsStale": KindTraits("card", "npureadingsstale"),
    "ErrorsRising": KindTraits("card", "npuerrorsrising"),
    "LinkSlow": KindTraits("card", "npulinkslow"),
    "CardSlow": KindTraits("card", "npucardslow"),
    "SameUUID": KindTraits("card", "log-lines"),
    "CardMissing": KindTraits("card", "npucardmissing", held="critical"),
    "AllCardsMissing": KindTraits("card", "npucardmissing", held="critical"),
    "DeviceMissing": KindTraits("assignments", "npucardmissing", "critical"),
    "CardReplaced": KindTraits("assignments", "npucardmissing", "critical"),
    "EarlierCardMissing": KindTraits("hardware", "npucardmissing"),
    "FewerCardsThanExpected": KindTraits("hardware", "npucardsfewerthanexpected"),
    "EntryUnreadable": KindTraits("hardware", "a-node-offers-no-npus-or-too-few"),
    "ResourceNotRegistered": KindTraits(
        "resource", "npuresourcenotregistered", "critical", unready=True
    ),
    "ResourceBlocked": KindTraits(
        "resource", "npuresourcenotregistered", "critical", unready=True, doctor=True
    ),
    "ResourceSearching": KindTraits(
        "resource", "npuresourcenotregistered", "critical", unready=True
    ),
    "DRANotRegistered": KindTraits("dra", "npudranotregistered", "critical", unready=True),
    "DRABlocked": KindTraits("dra", "npudranotregistered", "critical", unready=True, doctor=True),
    "DRASearching": KindTraits("dra", "npudranotregistered", "critical", unready=True),
    "SlicesNotPublished": KindTraits(
        "dra", "npudraslicesnotpublished", "critical", unready=True, waits=True, doctor=True
    ),
    "SlicesPending": KindTraits(
        "dra", "npudraslicesnotpublished", "critical", unready=True, doctor=True
    ),
    "SlicesIncomplete": KindTraits("dra", "npudrapoolincomplete", "critical", doctor=True),
    "SlicesForeign": KindTraits("dra", "npudrapreparefailing", doctor=True),
    # What else follows from it is as of the first problem that it stands for.
    "APIServerAway": KindTraits("node", doctor=True),
    "APIUndecided": KindTraits(
        "dra", "npudranotregistered", "critical", unready=True, waits=True, doctor=True
    ),
    "AssignmentsUnknown": KindTraits("assignments", "log-lines", doctor=True),
    "CDINotWritten": KindTraits("cdi", "log-lines", "critical", unready=True, doctor=True),
    "HostNodeMissing": KindTraits("hardware"),
    "ConfigRefused": KindTraits("config", "npuconfigrejected", unready=True),
    "CertificateMissing": KindTraits("config", "npucertificateinvalid", unready=True, doctor=True),
    "CertificateExpired": KindTraits("config", "npucertificateinvalid", doctor=True),
    "CertificateRefused": KindTraits("config", "npucertificateinvalid", doctor=True),
    "CordonUnreadable": KindTraits("node", "log-lines", doctor=True),
    "CordonAmbiguous": KindTraits("node", "log-lines", doctor=True),
    "CordonRenumbered": KindTraits("node", "log-lines", doctor=True),
    "CordonOfMissingCard": KindTraits("node", "log-lines", doctor=True),
    "CordonUnknown": KindTraits("node", "log-lines", doctor=True),
    "NodeNotWatched": KindTraits("node", "log-lines", waits=True, doctor=True),
    "LabelsNotApplied": KindTraits("labels", "npulabelsnotapplied", waits=True, doctor=True),
    "ConditionNotWritten": KindTraits(
        "condition", "npuconditionnotwritten", waits=True, doctor=True
    ),
    "EvictionForbidden": KindTraits("node", doctor=True),
    "EvictionWaits": KindTraits("assignments"),
    "CardsSimulated": KindTraits("hardware", severity="info"),
    "Maintenance": KindTraits("node", severity="info"),
    "CardLongMissing": KindTraits("card", "npucardmissing", "info"),
    "CordonedCardMissing": KindTraits("card", "npucardmissing", "info"),
    "EarlierCardLongMissing": KindTraits("hardware", "npucardmissing", "info"),
    "HealthUnknown": KindTraits("card", severity="info"),
    "ErrorsCounted": KindTraits("card", "npuerrorsrising", "info"),
    "CardCordoned": KindTraits("card", "npucardcordoned", "info"),
    "CordonedCardUnhealthy": KindTraits("card", "npucardcordoned", "info"),
    "CardDisabled": KindTraits("card", severity="info"),
    "DisabledNameMoved": KindTraits("card", severity="info"),
    "LimitsAlike": KindTraits("card", severity="info"),
    "ProductUnknown": KindTraits("card", severity="info"),
    "VersionUnreadable": KindTraits("card", severity="info"),
    "LoadWithoutPod": KindTraits("card", "npuloadwithoutpod", "info"),
    "DeviceWithheld": KindTraits("resource", severity="info"),
    "FieldsDropped": KindTraits("dra", severity="info"),
    "PartitionsDropped": KindTraits("dra", severity="info"),
    "ResourceStandby": KindTraits("resource", severity="info"),
    "DRAStandby": KindTraits("dra", severity="info"),
    "ConfigWaitsForRestart": KindTraits("config", "npuconfigwaitsforrestart", "info"),
    "LabelsPending": KindTraits("labels", severity="info"),
    "KernelUnheard": KindTraits("hardware", severity="info"),
}

LEAD_TO_DOCTOR = frozenset(kind for kind, traits in TRAITS.items() if traits.doctor)
"""The kinds for which the first step is `npu-agent doctor`."""


CAUSE_RUNBOOKS: Mapping[Cause, str] = {Cause.HOT: "nputemperaturehigh"}
"""The sections of the runbook that are apart from that of the kind."""


class NamedCard(NamedTuple):
    """A card in a sentence."""

    id: str
    name: str

    @classmethod
    def of(cls, card: CardState) -> NamedCard:
        return cls(card.id, card.card.name)


@dataclass(frozen=True, slots=True)
class Message:
    """Something to say as data: `npu_agent.wording` has a row for each kind."""

    kind: str
    cards: tuple[NamedCard, ...] = ()
    """The cards that it concerns, also those that have left."""
    pods: tuple[str, ...] = ()
    """The affected Pods, ``namespace/pod``."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What the sentences quote, by the names of their fields: texts from outside, numbers in the
    units of those sentences, and tuples of these."""
    cause: Cause | None = field(default=None, kw_only=True)
    """Of unhealthy cards."""


@dataclass(frozen=True, slots=True)
class Problem(Message):
    """A problem or a note: one cause is one Problem."""

    kind: Kind
    since: float | None = field(default=None, kw_only=True)
    """When it began; None where that is not known."""
    of_host: bool = field(default=False, kw_only=True)
    """Whether no card of the node can be used: driver and host come first, and no Pod is deleted
    for it, as no card is left for another one."""
    parts: tuple[Problem, ...] = field(default=(), kw_only=True)
    """Problems with the same origin, which this one stands for."""

    @property
    def _traits(self) -> KindTraits:
        """An API server that is away matters as much as the first thing that waits for it."""
        first = self.parts[0] if self.kind == "APIServerAway" else self
        return TRAITS[first.kind]

    @property
    def subject(self) -> Subject:
        return self._traits.subject

    @property
    def severity(self) -> Severity:
        return self._traits.held if self.pods and self._traits.held else self._traits.severity

    @property
    def runbook(self) -> str:
        """The section of the runbook that has the steps: ``npucardunhealthy``; may be empty."""
        own = CAUSE_RUNBOOKS.get(self.cause) if self.cause else None
        return own or self._traits.runbook

    @property
    def unready(self) -> bool:
        """Whether it keeps the agent from being ready."""
        return any(TRAITS[problem.kind].unready for problem in (self, *self.parts))
