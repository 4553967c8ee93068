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
    order: tuple[int, str, int]


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
    places = dict(
        sorted(
            ((id_, _place(id_, devices)) for id_ in free),
            key=lambda item: (item[0] not in devices, item[1].order, item[0]),
        )
    )
    free_on = Counter(place.card for place in places.values())
    all_on = Counter(device.card_id for device in devices.values())
    left = {id_: place for id_, place in places.items() if id_ not in chosen}

    cards = {places[id_].card for id_ in chosen}
    switches = {places[id_].switch for id_ in chosen}
    numas = {places[id_].numa for id_ in chosen}
    while len(chosen) < size:
        offered = {id_: place for id_, place in left.items() if id_ in devices}
        home = _home(offered, size - len(chosen), switches, numas)

        def rank(id_: str, home: str | None = home) -> tuple[object, ...]:
            place = left[id_]
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
        place = left.pop(best)
        chosen.append(best)
        cards.add(place.card)
        switches.add(place.switch)
        numas.add(place.numa)
    return Choice(tuple(chosen), _reason([places[id_] for id_ in chosen]))


def _place(id_: str, devices: Mapping[str, Device]) -> _Place:
    device = devices.get(id_)
    if device is None:
        return _Place(id_, id_, id_, (0, "", 0))
    switch = device.card.switch or device.card_id
    numa = device.card_id if device.card.numa_node is None else str(device.card.numa_node)
    return _Place(device.card_id, switch, numa, device.order)


def _home(
    left: Mapping[str, _Place], wanted: int, switches: set[str], numas: set[str]
) -> str | None:
    """The switch to start behind: in the tightest neighbourhood that holds all that is wanted."""
    by_switch = Counter(place.switch for place in left.values())
    by_numa = Counter(place.numa for place in left.values())
    numa_of = {place.switch: place.numa for place in left.values()}
    fitting = [switch for switch in by_switch if by_switch[switch] >= wanted]
    near = [s for s in fitting if numa_of[s] in numas and s not in switches]
    if fitting:
        return min(near or fitting, key=lambda s: (by_switch[s], by_numa[numa_of[s]]))
    if not left:
        return None
    fitting = [numa for numa in by_numa if by_numa[numa] >= wanted]
    numa = min(fitting, key=by_numa.__getitem__) if fitting else by_numa.most_common(1)[0][0]
    inside = Counter(place.switch for place in left.values() if place.numa == numa)
    return inside.most_common(1)[0][0]


def _reason(places: Sequence[_Place]) -> str:
    if len({place.card for place in places}) == 1:
        return "one card"
    if len({place.switch for place in places}) == 1:
        return "one PCI switch"
    if len({place.numa for place in places}) == 1:
        return "one NUMA node"
    return "spread"
