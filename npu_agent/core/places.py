"""By which of the two APIs each card is offered, also while a node moves between them. Pure.

The kubelet hands out what the device plugin lists, the scheduler what is in a ResourceSlice, and
neither asks the other: a card that is in both is given away twice. So a card leaves one before it
enters the other, and it has left when the other side has said so: the kubelet no longer offers it,
or the API server has the slice without it. Until then it counts as there, whatever was sent.

A card that is in use stays where it is until its Pods have ended, in such a way that nobody else
is given it meanwhile: listed as unhealthy, or with a taint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Wish(Enum):
    """What the config says of a card."""

    PLUGIN = "device-plugin"
    DRA = "dra"
    STAY = "as it is"
    """It depends on something that is not known yet."""
    NEITHER = "neither"
    """It is disabled."""


class Place(Enum):
    """Where a card is offered."""

    PLUGIN = "device-plugin"
    """Listed by the device plugin."""
    WITHHELD = "device-plugin, until its Pods have ended"
    """Listed as unhealthy: its Pods keep it, and nobody else is given it."""
    NOWHERE = "neither"
    SLICE = "dra"
    LEAVING = "dra, until its claims have ended"
    """In a slice with a taint: its claims keep it, and no other claim is given it."""

    @property
    def listed(self) -> bool:
        """Whether the device plugin lists it, healthy or not."""
        return self in (Place.PLUGIN, Place.WITHHELD)

    @property
    def sliced(self) -> bool:
        """Whether it is to be in a slice."""
        return self in (Place.SLICE, Place.LEAVING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the config says of this node's cards."""

    families: Mapping[str, Wish] = field(default_factory=dict)
    """By family; one that is not named is the device plugin's."""
    disabled: frozenset[str] = frozenset()
    """Names of cards that are not offered, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a card."""

    wish: Wish
    listed: bool = False
    """Whether the kubelet may be able to hand it out: it was listed by this agent, and the kubelet
    has not shown since that it no longer offers it."""
    sliced: bool = False
    """Whether a slice of the API server may have it: it was about to be written, by this agent or
    by one before it, and the API server has not confirmed the slices without it since."""
    by_container: bool = False
    """Whether a container holds any of its cores, or may, by the device plugin."""
    by_claim: bool = False
    """Whether a prepared claim holds any of its cores."""


def place(card: Situation) -> Place:
    """Where a card is to be offered now; each acknowledgement makes the next step possible."""
    if card.wish is Wish.NEITHER or (card.listed and card.sliced):
        return Place.NOWHERE
    match card.wish:
        case Wish.PLUGIN if card.sliced:
            return Place.LEAVING if card.by_claim else Place.NOWHERE
        case Wish.PLUGIN:
            return Place.NOWHERE if card.by_claim else Place.PLUGIN
        case Wish.DRA if card.by_container and not card.sliced:
            return Place.WITHHELD
        case Wish.DRA:
            return Place.NOWHERE if card.listed else Place.SLICE
    if card.sliced:
        return Place.SLICE
    return Place.PLUGIN if card.listed else Place.NOWHERE


def moves_to(wish: Wish, place: Place) -> Wish | None:
    """To which API a card is on its way; None: it is where it is wanted."""
    if wish is Wish.DRA and place is not Place.SLICE:
        return Wish.DRA
    if wish is Wish.PLUGIN and place is not Place.PLUGIN:
        return Wish.PLUGIN
    return None


def turns(before: Wishes, after: Wishes) -> bool:
    """Whether any family is sent from one API to the other."""
    ends = (Wish.PLUGIN, Wish.DRA)
    return any(
        wish in ends
        and before.families.get(family, Wish.PLUGIN) in ends
        and wish is not before.families.get(family, Wish.PLUGIN)
        for family, wish in after.families.items()
    )
