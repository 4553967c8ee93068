"""/status.json as our own commands read it, of an agent of any version (`outputs/web/status`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

Cores = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}(-[0-9]{1,3})?\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class Core(msgspec.Struct, frozen=True):
    """A core's load in per cent."""

    core: int
    utilization: float | None = None


class ReportedReading(msgspec.Struct, frozen=True):
    """The readings of a card."""

    cores: tuple[Core, ...] = ()


class ReportedHolder(msgspec.Struct, frozen=True):
    """A Pod that has the card, or these cores of it: ``0-3``."""

    namespace: str
    pod: str
    cores: Cores | None = None
    claim: str | None = None
    resource: str = ""


class ReportedHealth(msgspec.Struct, frozen=True):
    """A card's health, and why it is not healthy."""

    state: str = "unknown"
    reason: str = ""


class ReportedCard(msgspec.Struct, frozen=True):
    """A card, as its agent sees it."""

    name: str
    core_count: Count
    id: str = ""
    uuid: str | None = None
    pci_bus_id: str | None = None
    family: str = ""
    held_by: str | None = None
    cordoned: str | None = None
    health: ReportedHealth = ReportedHealth()
    holders: tuple[ReportedHolder, ...] = ()
    reading: ReportedReading | None = None


class ReportedResource(msgspec.Struct, frozen=True):
    """A resource of the device plugin that the agent serves."""

    resource: str


class ReportedProblem(msgspec.Struct, frozen=True):
    """A problem and its remedy."""

    text: str
    kind: str = ""
    """A value of `core.kinds.Kind`; an agent of another version may have others, or none."""
    subject: str = ""
    severity: str = ""
    remedy: str = ""
    command: str = ""
    last_command: str = ""
    unready: str = ""
    cards: tuple[str, ...] = ()
    """IDs."""


class Report(msgspec.Struct, frozen=True):
    """The report of a running agent, as far as it is used."""

    cards: tuple[ReportedCard, ...]
    version: str = "?"
    node: str | None = "?"
    ready: bool = False
    unready: tuple[str, ...] = ()
    problems: tuple[ReportedProblem, ...] = ()
    notes: tuple[ReportedProblem, ...] = ()
    resources: tuple[ReportedResource, ...] = ()
    first_ids: dict[str, str] = {}
    """By name in lower case, the ID of the card that it meant first."""

    @property
    def resource_names(self) -> frozenset[str]:
        """The names of resources that are cards of its Node: those served, and those in use."""
        held = (holder.resource for card in self.cards for holder in card.holders)
        return frozenset((*held, *(resource.resource for resource in self.resources)))
