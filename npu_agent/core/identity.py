"""Stable IDs of cards, from the identifiers that they report. Pure.

Start reading at `identify`.
"""

from __future__ import annotations

import re
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING

from npu_agent.core.hardware import Card, by_kind, same_card

if TYPE_CHECKING:
    from collections.abc import Mapping


def identify(
    cards: tuple[Card, ...], known: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> tuple[str, ...]:
    """Gives each card its stable ID, in the order of `cards`.

    A known card keeps its ID. Any other is called by its UUID, else its serial number, else its PCI
    address, else its family and number. A text that two cards claim, or that is a known card's ID,
    is not used. The kubelet, CDI and file names take all its characters (a vendor's parsers see to
    that), and no ID is another one with a suffix for cores (`_stem`).

    Args:
        cards: those of one moment.
        known: earlier IDs, each with what identified its card: see `remember`.
    """
    claims = [tuple(filter(None, (card.uuid, card.serial, card.pci_bus_id))) for card in cards]
    claimed = Counter(
        stem
        for card, claim in zip(cards, claims, strict=True)
        for stem in {_stem(text) for text in (*claim, _name(card))}
    )
    taken = {_stem(id_) for id_ in known}
    ids = _known_ids(cards, known)
    for at, (card, claim) in enumerate(zip(cards, claims, strict=True)):
        if at not in ids:
            own = (text for text in claim if claimed[_stem(text)] == 1)
            names = (_name(card), *(f"{_name(card)}-{number}" for number in range(len(taken) + 1)))
            ids[at] = next(text for text in (*own, *names) if _stem(text) not in taken)
            taken.add(_stem(ids[at]))
    return tuple(ids[at] for at in range(len(cards)))


def remember(
    known: Mapping[str, frozenset[str]], cards: tuple[Card, ...], ids: tuple[str, ...]
) -> dict[str, frozenset[str]]:
    """`known` for the next `identify`, after these cards were given these IDs.

    Identifiers that cannot be read now are kept, as is the card's name on the host, by which cards
    differ that claim to be the same. An ID that is only the number is not kept. Of all others the
    latest are: a card that has another identity after each reset would fill the memory.
    """
    identities = dict(known)
    for card, id_ in zip(cards, ids, strict=True):
        if id_ in known or id_ in (card.uuid, card.serial, card.pci_bus_id):
            now = by_kind(card.identities) | {"name": _name(card)}
            before = by_kind(identities.pop(id_, frozenset()))
            identities[id_] = frozenset(f"{kind}:{text}" for kind, text in (before | now).items())
    return dict([*identities.items()][-_MOST:])


def _known_ids(cards: tuple[Card, ...], known: Mapping[str, frozenset[str]]) -> dict[int, str]:
    """Returns the best known ID of each card, by place; none that fits two equally well."""
    fits: dict[tuple[int, str], list[int]] = {}
    for at, card in enumerate(cards):
        for id_, before in known.items():
            if fit := _fit(before, card):
                fits.setdefault((fit, id_), []).append(at)
    kept: dict[int, str] = {}
    used: set[str] = set()
    for (_, id_), places in sorted(fits.items(), reverse=True):
        free = [at for at in places if at not in kept]
        if free and _stem(id_) not in used:
            used.add(_stem(id_))
            if len(free) == 1:
                kept[free[0]] = id_
    return kept


def _fit(before: frozenset[str], card: Card) -> int:
    """Returns how well a card fits known identifiers; 0: it is another card.

    What is said only once counts neither way. The UUID alone is not enough if the serial number and
    the place are others.
    """
    if not same_card(before, card.identities):
        return 0

    old = by_kind(before)
    new = by_kind(card.identities)
    differ = sum(old[kind] != new[kind] for kind in old.keys() & new.keys())
    agree = len(before & card.identities)
    return 2 * agree + (old.get("name") == _name(card)) if agree >= differ else 0


def _name(card: Card) -> str:
    return f"{card.family}-{card.index}"


def _stem(text: str) -> str:
    """Returns a card's ID without a part like a device's cores: ``WBY`` of ``WBY_cores_0-1``."""
    return _CORES.sub("", text)


_MOST = 128
"""Cards that are known: those of the largest host, and as many that were there before."""

_CORES = re.compile(r"(?:_cores_[0-9]+(?:-[0-9]+)?)+$")
"""As `npu_agent.core.offer.device_id` writes the cores of a device."""
