"""Chooses the preferred devices of a container, with the reason. Pure.

Order of preference: fill cards that are partly used, then stay behind the same PCI switch, then on
the same NUMA node. Start in the smallest neighbourhood that can hold all, so that large ones stay
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.offer import Device


@dataclass(frozen=True, slots=True)
class Choice:
    """The preferred devices, in the order in which they were chosen."""

    ids: tuple[str, ...]
    reason: str
    """Where they lie: ``one card``, ``one PCI switch``, ``one NUMA node`` or ``spread``."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of a device, from narrow to wide. Unknown counts as a separate place."""

    card: str
    switch: str
    numa: str


def prefer(
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    devices: Mapping[str, Device],
) -> Choice:
    """Chooses `size` of the IDs in `available`, all of `must` among them; unknown IDs come last.

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
    # In card order, not in the order asked for: of equally good ones the first is taken.
    ordered = sorted(free, key=lambda id_: (id_ not in devices, _order(id_, devices), id_))
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

    cards = {places[id_].card for id_ in chosen}
    switches = {places[id_].switch for id_ in chosen}
    numas = {places[id_].numa for id_ in chosen}
    while left and len(chosen) < size:
        home = _home(left, size - len(chosen), switches, numas)

        def rank(place: _Place, home: str = home) -> tuple[object, ...]:
            partly = place.card in cards or free_on[place.card] < all_on[place.card]
            return (
                not partly,
                place.switch not in switches,
                place.numa not in numas,
                place.switch != home,
                free_on[place.card],
            )

        # A card has few devices, so that after each choice the rest of its card comes first.
        best = min(left, key=rank)
        chosen.append(left[best].pop(0))
        if not left[best]:
            del left[best]
        cards.add(best.card)
        switches.add(best.switch)
        numas.add(best.numa)
    chosen += unknown[: size - len(chosen)]
    return Choice(tuple(chosen), _reason([places[id_] for id_ in chosen]))


def _order(id_: str, devices: Mapping[str, Device]) -> tuple[int, str, int]:
    device = devices.get(id_)
    return device.order if device else (0, "", 0)


def _place(id_: str, devices: Mapping[str, Device]) -> _Place:
    device = devices.get(id_)
    if device is None:
        return _Place(id_, id_, id_)
    switch = device.card.switch or device.card_id
    numa = device.card_id if device.card.numa_node is None else str(device.card.numa_node)
    return _Place(device.card_id, switch, numa)


def _home(
    left: Mapping[_Place, Sequence[str]], wanted: int, switches: set[str], numas: set[str]
) -> str:
    """The switch to start behind: in the tightest neighbourhood that holds all that is wanted."""
    by_switch: Counter[str] = Counter()
    by_numa: Counter[str] = Counter()
    for place, ids in left.items():
        by_switch[place.switch] += len(ids)
        by_numa[place.numa] += len(ids)
    numa_of = {place.switch: place.numa for place in left}
    fitting = [switch for switch in by_switch if by_switch[switch] >= wanted]
    near = [s for s in fitting if numa_of[s] in numas and s not in switches]
    if fitting:
        return min(near or fitting, key=lambda s: (by_switch[s], by_numa[numa_of[s]]))
    fitting = [numa for numa in by_numa if by_numa[numa] >= wanted]
    numa = min(fitting, key=by_numa.__getitem__) if fitting else by_numa.most_common(1)[0][0]
    inside = {place.switch: by_switch[place.switch] for place in left if place.numa == numa}
    return max(inside, key=inside.__getitem__)


def _reason(places: Sequence[_Place]) -> str:
    if len({place.card for place in places}) == 1:
        return "one card"
    if len({place.switch for place in places}) == 1:
        return "one PCI switch"
    if len({place.numa for place in places}) == 1:
        return "one NUMA node"
    return "spread"
