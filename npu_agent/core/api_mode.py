"""Decides the API of each card, also while a node moves between the two. Pure.

The kubelet hands out what the device plugin lists, the scheduler what is in a ResourceSlice, and
neither asks the other. So a card leaves one before it enters the other: once the kubelet no longer
offers it, or the API server has the slice without it.

A card in use stays where it is until its Pods have ended; no other Pod gets it meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class WantedApi(Enum):
    """The API that the config wants for a card."""

    PLUGIN = "device-plugin"
    DRA = "dra"
    STAY = "as it is"
    """It depends on something that is not known yet."""
    NEITHER = "neither"


class ApiMode(Enum):
    """The API by which a card is offered."""

    PLUGIN = "device-plugin"
    DRAINING_FROM_PLUGIN = "device-plugin, until its Pods have ended"
    """Listed as unhealthy: its Pods keep it, and no other Pod is given it."""
    NOWHERE = "neither"
    DRA = "dra"
    DRAINING_FROM_DRA = "dra, until its claims have ended"
    """In a slice with a taint: its claims keep it, and no other claim is given it."""

    @property
    def listed(self) -> bool:
        return self in (ApiMode.PLUGIN, ApiMode.DRAINING_FROM_PLUGIN)

    @property
    def published(self) -> bool:
        return self in (ApiMode.DRA, ApiMode.DRAINING_FROM_DRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedApis:
    """The APIs that the config wants for this node's cards."""

    families: Mapping[str, WantedApi] = field(default_factory=dict)
    """One that is not named is the device plugin's."""
    disabled: frozenset[str] = frozenset()
    """In lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """The current users of a card."""

    wanted: WantedApi
    listed: bool = False
    """Whether this agent has listed it, and the kubelet may still offer it."""
    published: bool = False
    """Whether a slice of the API server may have it, also from an earlier agent."""
    by_container: bool = False
    """Whether a container may hold any of its cores by the device plugin."""
    by_claim: bool = False
    """Whether a prepared claim holds any of its cores."""


def api_mode(card: CardUse) -> ApiMode:
    """Returns the API for a card now; each acknowledgement allows the next step."""
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
    """The API that a card is on its way to; None: it is where it is wanted."""
    if wanted is WantedApi.DRA and mode is not ApiMode.DRA:
        return WantedApi.DRA
    if wanted is WantedApi.PLUGIN and mode is not ApiMode.PLUGIN:
        return WantedApi.PLUGIN
    return None
