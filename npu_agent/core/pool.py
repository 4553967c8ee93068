"""Snapshot -> the devices that DRA can offer: names and attributes; and claims for them. Pure.

`npu_agent.core.plan` leaves out and taints some; `npu_agent.outputs.dra.slices` writes them as
ResourceSlices. Prepare finds in them what an allocated name stands for.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from npu_agent.core.hardware import Card, CardState, CoreRange, Snapshot
from npu_agent.core.offer import Device, cut

_LONGEST_NAME = 63
"""The API server's limit: a device's name is a DNS label."""
_MOST_CORES = 30
"""Of a card that is cut, else it is offered whole: the API server takes 32 counters in a set, which
are one for each core and those of `Description.counters`."""
_PART = "-cores-"
"""Between the name of a card's device and the cores, where it is a part of the card."""
_LIKE_A_PART = re.compile(rf"{_PART}\d+(-\d+)?$")

UID = r"[A-Za-z0-9._-]{1,128}"
"""Part of the name of the claim's CDI spec, and of its devices' there."""

Value = int | str | bool
"""Of an attribute: an `int`, a `string` or a `bool` of the API; a `Version` is a `version`."""


class Version(str):
    """An attribute's value that is a version by semver 2.0.0."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The published name and attributes of a device; keys as users of the driver know them."""

    attributes: Mapping[str, Value]
    """By name; one without a domain is the driver's own."""
    capacity: Mapping[str, str]
    """Quantities in Kubernetes' form: ``{"memory": "48Gi"}``."""
    counters: Mapping[str, str]
    """What is counted of a card that is cut, in addition to each core: at most two quantities."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraSpec:
    """What DRA calls a vendor's cards."""

    driver: str
    """``npu.example.com``: the driver, its DeviceClass, and the domain of its attributes."""
    claim_kind: str
    """``example.com/claim``: the kind of the CDI devices that prepared claims are."""
    describe: Callable[[Card, CoreRange], Description]
    blank: Callable[[str, int], Card]
    """A card by family and number, with what every host shows of it and no more."""
    of_host: tuple[str, ...]
    """The attributes that such a card lacks."""
    first: str = ""
    """The family whose cards the scheduler takes first where a claim leaves it the choice."""


class Effect(Enum):
    """Effects of a taint, as the API server names them."""

    NONE = "None"
    """For information only."""
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A remark on a device, or the reason not to allocate it now."""

    key: str
    """``npu.example.com/unhealthy``."""
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSet:
    """Counters that the partitions of a card share: its cores, and totals of the card."""

    name: str
    sums: Mapping[str, str]
    """The `Description.counters` of the whole card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDevice:
    """A device that DRA offers."""

    name: str
    """Unique in the pool, a DNS label: ``npu-`` and the card's ID, or ``npu0``; of a part of a
    card, ``-cores-0-3`` follows."""
    device: Device
    """What it stands for now; its health is the card's."""
    description: Description
    taints: tuple[Taint, ...] = ()
    counters: CounterSet | None = None
    """Of the card: the device consumes its own part. None where no other device of the pool has any
    of its cores."""

    @property
    def barred(self) -> bool:
        """Whether a taint keeps it from being allocated."""
        return any(taint.effect is not Effect.NONE for taint in self.taints)

    @property
    def is_part(self) -> bool:
        return self.device.cores != self.device.card.all_cores


def pool(
    snapshot: Snapshot,
    *,
    dra: DraSpec,
    families: Collection[str],
    by_index: bool = False,
    partitions: bool = False,
    last: Collection[str] = (),
) -> tuple[PoolDevice, ...]:
    """The devices of these families' cards: those of `dra.first`, then the others, by number.

    They have no taints: `npu_agent.core.plan.claim_pool`.

    Args:
        snapshot: the cards.
        dra: the vendor's names.
        families: those that DRA offers on this node.
        by_index: whether a device is called ``npu0``, as the vendor's driver does it, and not by
            what identifies its card. Where two families number their cards alike, the family is
            put before the number: ``anvil-npu0``.
        partitions: whether each card is offered in every width that it has nodes for, all of them
            at the same time, and not only whole. The scheduler then cuts it: a device is free as
            long as no core of it is another one's.
        last: IDs of cards that come after the others of their family.
    """
    cards = [state for state in snapshot.cards if state.card.family in families]
    cards.sort(key=lambda state: (state.card.family != dra.first, state.id in last))
    called = _by_index(cards) if by_index else _by_identity(cards)
    devices: list[PoolDevice] = []
    for state, name in zip(cards, called, strict=True):
        card = state.card
        counters = None
        widths = _widths(card) if partitions else (card.core_count,)
        if len(widths) > 1:
            sums = dra.describe(card, card.all_cores).counters
            counters = CounterSet(name=name, sums=sums)
        devices += (
            PoolDevice(
                name=_named(name, state, device.cores),
                device=device,
                description=dra.describe(card, device.cores),
                counters=counters,
            )
            for width in widths
            for device in cut(state, width)
        )
    return tuple(devices)


def devices_by_name(cards: Collection[CardState]) -> Mapping[str, tuple[str, CoreRange]]:
    """The card, by its ID, and the cores of all names that these cards' devices can have."""
    called = (*_by_identity(cards), *_by_index(cards))
    return {
        _named(name, state, device.cores): (state.id, device.cores)
        for name, state in zip(called, (*cards, *cards), strict=True)
        for width in _widths(state.card)
        for device in cut(state, width)
    }


def _widths(card: Card) -> tuple[int, ...]:
    if card.core_count > _MOST_CORES:
        return (card.core_count,)
    widths = {len(cores) for cores, _ in card.access.core_nodes}
    return tuple(sorted(widths | {card.core_count}, reverse=True))


def _named(name: str, state: CardState, cores: CoreRange) -> str:
    if cores == state.card.all_cores:
        return name
    part = f"{_PART}{cores}"
    if len(name) + len(part) > _LONGEST_NAME:
        name = _hashed(name, state.id, _LONGEST_NAME - len(part))
    return name + part


def _by_identity(cards: Collection[CardState]) -> list[str]:
    """Names that a card keeps over renumbering and reboots."""
    plain = [_label(f"npu-{state.id}") for state in cards]
    seen = Counter(plain)
    return [
        name
        if seen[name] == 1 and len(name) <= _LONGEST_NAME and not _LIKE_A_PART.search(name)
        else _hashed(name, state.id)
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
    """Returns a DNS label of any length: lower case letters, digits and ``-``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _hashed(name: str, id_: str, longest: int = _LONGEST_NAME) -> str:
    """A name that tells cards apart.

    Their IDs may be the same as a DNS label, too long for one, or like a part of another card.
    """
    digest = hashlib.sha256(id_.encode()).hexdigest()[:8]
    return f"{name[: longest - 9].rstrip('-')}-{digest}"


def is_uid(text: str) -> bool:
    return re.fullmatch(UID, text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """A device that the scheduler has allocated to a claim."""

    request: str
    """Without the alternative that a prioritized list chose."""
    pool: str
    name: str
    """In the pool."""
    admin: bool = False
    """Whether it is an administrator's, who shares it with any holder."""
    tolerations: tuple[str, ...] = ()
    """Keys of the taints in spite of which it was allocated; "": each."""

    def tolerates(self, key: str) -> bool:
        return key in self.tolerations or "" in self.tolerations


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedClaim:
    """A ResourceClaim, with what one driver has to know of its allocation."""

    namespace: str
    name: str
    uid: str
    pods: tuple[str, ...]
    """Names of the Pods that may use it."""
    pod_uids: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Sources of the opaque parameters for the driver: ``FromClaim``, ``FromClass``."""
    devices: tuple[AllocatedDevice, ...]
    """The driver's own."""

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"
