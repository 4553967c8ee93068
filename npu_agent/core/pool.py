"""Snapshot -> the devices that DRA offers: names, attributes, taints. Pure.

`npu_agent.outputs.dra.slices` writes them as ResourceSlices, and Prepare finds in them what an
allocated name stands for.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from npu_agent.core.hardware import Card, CardState, CoreRange, Snapshot
from npu_agent.core.offer import Device, cut, names

_LONGEST_NAME = 63
"""The API server's limit: a device's name is a DNS label."""

Value = int | str | bool
"""Of an attribute: an `int`, a `string` or a `bool` of the API; a `Version` is a `version`."""


class Version(str):
    """An attribute's value that is a version by semver 2.0.0."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is published of a device beside its name; names as the driver's users know them."""

    attributes: Mapping[str, Value]
    """By name; one without a domain is the driver's own."""
    capacity: Mapping[str, str]
    """Quantities as Kubernetes writes them: ``{"memory": "48Gi"}``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraNames:
    """What a vendor calls things in DRA."""

    driver: str
    """``npu.example.com``: the driver, its DeviceClass, and the domain of its attributes."""
    claim_kind: str
    """``example.com/claim``: the kind of the CDI devices that prepared claims are."""
    describe: Callable[[Card, CoreRange], Description]
    """What is published of a card's device with these cores."""


class Effect(Enum):
    """What a taint does, as the API server names it."""

    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """Why the scheduler should not allocate a device now."""

    key: str
    """``npu.example.com/unhealthy``."""
    effect: Effect
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDevice:
    """A device that DRA offers."""

    name: str
    """Unique in the pool, a DNS label: ``npu-`` and the card's ID, or ``npu0``."""
    device: Device
    """What it stands for now; its health is the card's."""
    description: Description
    taints: tuple[Taint, ...] = ()


def pool(
    snapshot: Snapshot,
    *,
    dra: DraNames,
    families: Collection[str],
    disabled: Collection[str] = (),
    by_index: bool = False,
    evict: bool = False,
    held: Callable[[Device], str | None] = lambda _: None,
) -> tuple[PoolDevice, ...]:
    """The devices of these families' cards, whole, in the order of the cards.

    Args:
        snapshot: the cards.
        dra: the vendor's names.
        families: those that DRA offers on this node.
        disabled: cards that are not offered, as `advertise` takes them.
        by_index: whether a device is called ``npu0``, as the vendor's driver does it, and not by
            what identifies its card. Where two families number their cards alike, the family is
            put before the number: ``anvil-npu0``.
        evict: whether a sick card's Pods are to be evicted.
        held: why a device must not be allocated although nothing in the cluster says so; None: it
            may be.
    """
    unwanted = {word.lower() for word in disabled}
    cards = [
        state
        for state in snapshot.cards
        if state.card.family in families and not (unwanted and unwanted & names(state))
    ]
    called = _by_index(cards) if by_index else _by_identity(cards)
    return tuple(
        PoolDevice(
            name=name,
            device=device,
            description=dra.describe(state.card, device.cores),
            taints=_taints(dra.driver, device, evict=evict, held=held(device)),
        )
        for state, name in zip(cards, called, strict=True)
        for device in cut(state, state.card.core_count)
    )


def cards_by_name(cards: Collection[CardState]) -> Mapping[str, str]:
    """The IDs of these cards by all names that their devices can have in a pool."""
    called = (*_by_identity(cards), *_by_index(cards))
    return {name: state.id for name, state in zip(called, (*cards, *cards), strict=True)}


def _by_identity(cards: Collection[CardState]) -> list[str]:
    """Names that a card keeps over renumbering and reboots."""
    plain = [_label(f"npu-{state.id}") for state in cards]
    seen = Counter(plain)
    return [
        name if seen[name] == 1 and len(name) <= _LONGEST_NAME else _hashed(name, state.id)
        for name, state in zip(plain, cards, strict=True)
    ]


def _by_index(cards: Collection[CardState]) -> list[str]:
    seen = Counter(state.card.name for state in cards)
    return [
        state.card.name
        if seen[state.card.name] == 1
        else _label(f"{state.card.family}-{state.card.name}")
        for state in cards
    ]


def _label(text: str) -> str:
    """As a DNS label of any length: lower case letters, digits and ``-``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _hashed(name: str, id_: str) -> str:
    """A name that tells cards apart whose IDs are the same as a DNS label, or too long for one."""
    digest = hashlib.sha256(id_.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"


def _taints(driver: str, device: Device, *, evict: bool, held: str | None) -> tuple[Taint, ...]:
    taints = []
    if not device.healthy:
        effect = Effect.NO_EXECUTE if evict else Effect.NO_SCHEDULE
        taints.append(Taint(key=f"{driver}/unhealthy", effect=effect))
    if held:
        taints.append(Taint(key=f"{driver}/held", effect=Effect.NO_SCHEDULE))
    return tuple(taints)
