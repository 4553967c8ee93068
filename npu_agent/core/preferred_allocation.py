"""Chooses the preferred devices of a container, with the reason. Pure.

Degraded cards come last: they are chosen where the others are too few, or lie farther apart.
Order of preference among the rest: fill cards that are partly used, then stay behind the same PCI
switch, then on the same NUMA node. Start in the smallest neighbourhood that can hold all, so that
large ones stay whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.offer import Device


@dataclass(frozen=True, slots=True)
class Choice:
    """The preferred devices, in the order in which they were chosen."""

    ids: tuple[str, ...]
    reason: str
    """Where they lie: ``one card``, ``one PCI switch``, ``one NUMA node`` or ``spread``."""


class _Place(NamedTuple):
    """The location of a device, from narrow to wide. Unknown counts as a separate place."""

    card: str
    switch: str
    numa: str


def prefer(
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    devices: Mapping[str, Device],
    degraded: Collection[str] = (),
) -> Choice:
    """Chooses `size` of the IDs in `available`, all of `must` among them; unknown IDs come last.

    Args:
        available: IDs of free devices.
        must: those that have to be among the chosen ones.
        size: how many to choose.
        devices: the known devices, by ID.
        degraded: IDs of cards that need attention.

    Raises:
        RefusalError: the request contradicts itself.
    """
    free = list(dict.fromkeys(available))
    chosen = list(dict.fromkeys(must))
    if not set(chosen) <= set(free) or not max(1, len(chosen)) <= size <= len(free):
        raise RefusalError(
            Refusal.INVALID,
            f"allocation_size is {size}: {len(free)} devices are available, and {len(chosen)} of "
            "them must be included",
        )
    choice = _choose(free, chosen, size, devices)
    if not any(id_ in devices and devices[id_].card_id in degraded for id_ in choice.ids):
        return choice
    included = {*chosen}
    others = (
        id_
        for id_ in free
        if id_ in devices and id_ not in included and devices[id_].card_id not in degraded
    )
    good = [*chosen, *sorted(others, key=lambda id_: (devices[id_].order, id_))]
    # Where the good ones are too few, they are all taken, and what is nearest to them.
    better = (
        _choose(good, chosen, size, devices)
        if len(good) >= size
        else _choose(free, good, size, devices)
    )
    return min(better, choice, key=lambda choice: _REASONS.index(choice.reason))


def _choose(
    free: Sequence[str], must: Sequence[str], size: int, devices: Mapping[str, Device]
) -> Choice:
    """Chooses from all of these; both have each ID once."""
    chosen = [*must]
    # In card order, not in the order asked for: of equally good ones the first is taken.
    ordered = sorted(
        free,
        key=lambda id_: (False, devices[id_].order, id_) if id_ in devices else (True, (), id_),
    )
    places = {id_: _place(id_, devices) for id_ in ordered}
    free_on = Counter(place.card for place in places.values())
    all_on = Counter(device.card_id for device in devices.values())
    # The devices of a card are equally good, so that cards are compared: they are few, and a
    # client may ask for any number of devices.
    left: dict[_Place, list[str]] = {}
    unknown: list[str] = []
    included = set(chosen)
    for id_, place in places.items():
        if id_ in included:
            continue
        if id_ in devices:
            left.setdefault(place, []).append(id_)
        else:
            unknown.append(id_)

    near = {name for id_ in chosen for name in places[id_]}
    while left and len(chosen) < size:
        home = _home(left, size - len(chosen), near)

        def rank(place: _Place, home: str = home) -> tuple[object, ...]:
            partly = place.card in near or free_on[place.card] < all_on[place.card]
            return (
                not partly,
                place.switch not in near,
                place.numa not in near,
                place.switch != home,
                free_on[place.card],
            )

        # A card has few devices, so that after each choice the rest of its card comes first.
        best = min(left, key=rank)
        chosen.append(left[best].pop(0))
        if not left[best]:
            del left[best]
        near.update(best)
    chosen += unknown[: size - len(chosen)]
    return Choice(tuple(chosen), _reason([places[id_] for id_ in chosen]))


def _place(id_: str, devices: Mapping[str, Device]) -> _Place:
    device = devices.get(id_)
    if device is None:
        return _Place(id_, id_, id_)
    switch = device.card.switch or device.card_id
    numa = device.card_id if device.card.numa_node is None else str(device.card.numa_node)
    return _Place(device.card_id, switch, numa)


def _home(left: Mapping[_Place, Sequence[str]], wanted: int, near: Collection[str]) -> str:
    """The switch to start behind: in the tightest neighbourhood that holds all that is wanted."""
    by_switch: Counter[str] = Counter()
    by_numa: Counter[str] = Counter()
    for place, ids in left.items():
        by_switch[place.switch] += len(ids)
        by_numa[place.numa] += len(ids)
    numa_of = {place.switch: place.numa for place in left}
    fitting = [switch for switch in by_switch if by_switch[switch] >= wanted]
    beyond = [s for s in fitting if numa_of[s] in near and s not in near]
    if fitting:
        return min(beyond or fitting, key=lambda s: (by_switch[s], by_numa[numa_of[s]]))
    fitting = [numa for numa in by_numa if by_numa[numa] >= wanted]
    numa = min(fitting, key=by_numa.__getitem__) if fitting else by_numa.most_common(1)[0][0]
    inside = {place.switch: by_switch[place.switch] for place in left if place.numa == numa}
    return max(inside, key=inside.__getitem__)


_REASONS = ("one card", "one PCI switch", "one NUMA node", "spread")
"""From near to far."""


def _reason(places: Sequence[_Place]) -> str:
    shared = [len({*names}) == 1 for names in zip(*places, strict=True)]
    return _REASONS[[*shared, True].index(True)]
