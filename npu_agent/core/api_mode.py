"""By which of the two APIs each card is offered, also while a node moves between them. Pure.

The kubelet hands out what the device plugin lists, the scheduler what is in a ResourceSlice, and
neither asks the other: a card that is in both is given away twice. So a card leaves one before it
enters the other, and it has left when the other side has said so: the kubelet no longer offers it,
or the API server has the slice without it. Until then it counts as there, whatever was sent.

A card that is in use stays where it is until its Pods have ended, in such a way that no other Pod
is given it meanwhile: listed as unhealthy, or with a taint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class WantedApi(Enum):
    """What the config says of a card."""

    PLUGIN = "device-plugin"
    DRA = "dra"
    STAY = "as it is"
    """It depends on something that is not known yet."""
    NEITHER = "neither"
    """It is disabled."""


class ApiMode(Enum):
    """Where a card is offered."""

    PLUGIN = "device-plugin"
    """Listed by the device plugin."""
    DRAINING_FROM_PLUGIN = "device-plugin, until its Pods have ended"
    """Listed as unhealthy: its Pods keep it, and no other Pod is given it."""
    NOWHERE = "neither"
    DRA = "dra"
    DRAINING_FROM_DRA = "dra, until its claims have ended"
    """In a slice with a taint: its claims keep it, and no other claim is given it."""

    @property
    def listed(self) -> bool:
        """Whether the device plugin lists it, healthy or not."""
        return self in (ApiMode.PLUGIN, ApiMode.DRAINING_FROM_PLUGIN)

    @property
    def published(self) -> bool:
        return self in (ApiMode.DRA, ApiMode.DRAINING_FROM_DRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedApis:
    """What the config says of this node's cards."""

    families: Mapping[str, WantedApi] = field(default_factory=dict)
    """By family; one that is not named is the device plugin's."""
    disabled: frozenset[str] = frozenset()
    """Names of cards that are not offered, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """What is known of a card."""

    wanted: WantedApi
    listed: bool = False
    """Whether the kubelet may be able to hand it out: it was listed by this agent, and the kubelet
    has not shown since that it no longer offers it."""
    published: bool = False
    """Whether a slice of the API server may have it: it was about to be written, by this agent or
    by one before it, and the API server has not confirmed the slices without it since."""
    by_container: bool = False
    """Whether a container holds any of its cores, or may, by the device plugin."""
    by_claim: bool = False
    """Whether a prepared claim holds any of its cores."""


def api_mode(card: CardUse) -> ApiMode:
    """Where a card is to be offered now; each acknowledgement allows the next step."""
    if card.wanted is WantedApi.NEITHER or (card.listed and card.published):
        return ApiMode.NOWHERE
    match card.wanted:
        case WantedApi.PLUGIN if card.published:
            return ApiMode.DRAINING_FROM_DRA if card.by_claim else ApiMode.NOWHERE
        case WantedApi.PLUGIN:
            return ApiMode.NOWHERE if card.by_claim else ApiMode.PLUGIN
        case WantedApi.DRA if card.by_container and not card.published:
            return ApiMode.DRAINING_FROM_PLUGIN
        case WantedApi.DRA:
            return ApiMode.NOWHERE if card.listed else ApiMode.DRA
    if card.published:
        return ApiMode.DRA
    return ApiMode.PLUGIN if card.listed else ApiMode.NOWHERE


def moves_to(wanted: WantedApi, mode: ApiMode) -> WantedApi | None:
    """To which API a card is on its way; None: it is where it is wanted."""
    if wanted is WantedApi.DRA and mode is not ApiMode.DRA:
        return WantedApi.DRA
    if wanted is WantedApi.PLUGIN and mode is not ApiMode.PLUGIN:
        return WantedApi.PLUGIN
    return None


def sends_elsewhere(before: WantedApis, after: WantedApis) -> bool:
    """Whether any family is sent from one API to the other."""
    ends = (WantedApi.PLUGIN, WantedApi.DRA)
    return any(
        wanted in ends
        and before.families.get(family, WantedApi.PLUGIN) in ends
        and wanted is not before.families.get(family, WantedApi.PLUGIN)
        for family, wanted in after.families.items()
    )
