"""Cordons: the cards that a person has taken out of service by the Node's annotation. Pure.

The annotation has JSON: a card's UUID, PCI address or name, and the reason.
``npu-agent/cordoned: '{"npu3": "swap fan"}'``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from npu_agent.core.hardware import Snapshot
from npu_agent.core.kinds import Problem
from npu_agent.core.offer import names
from npu_agent.text import one_line

ANNOTATION = "npu-agent/cordoned"

_LONGEST = 256
"""Characters of a reason; the rest is cut."""
_NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordons:
    """The cordons of an annotation, applied to the cards of a host."""

    cards: Mapping[str, str] = field(default_factory=dict)
    """By card ID, the reason."""
    wrong: tuple[Problem, ...] = ()
    """What is wrong with the annotation; the rest of it still counts."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """The names that match no card here, and the reason."""
    present: Mapping[str, str] = field(default_factory=dict)
    """By ID, the names of all cards that there are."""
    first_ids: Mapping[str, str] = field(default_factory=dict)
    """As `first_ids`: also of names that the config has."""


def entries(annotation: str) -> dict[str, str]:
    """The cards as a person has named them, each with its reason; "" has none.

    A reason of another type than text does not keep a card in service.

    Raises:
        ValueError: it is not a JSON object; the message says what it is.
    """
    if not annotation.strip():
        return {}
    try:
        decoded = json.loads(annotation)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(decoded, dict):
        raise ValueError("not a map of cards to reasons")  # noqa: TRY004 (what a reader expects)
    return {named: _reason(reason) for named, reason in decoded.items()}


def first_ids(
    named: Collection[str], snapshot: Snapshot, before: Mapping[str, str]
) -> Mapping[str, str]:
    """The ID of the card that each name by a number (``npu3``, lower case) meant first.

    A driver gives new numbers when a card is moved or fails. `before` are those that are known.
    """
    numbers: dict[str, list[str]] = {}
    for state in snapshot.cards if snapshot.complete else ():
        numbers.setdefault(state.card.name, []).append(state.id)
    meant = {name: ids[0] for name, ids in numbers.items() if len(ids) == 1} | {**before}
    return {name: meant[name] for name in sorted(map(str.lower, named)) if name in meant}


def cordons(
    named: Mapping[str, str],
    snapshot: Snapshot,
    unreadable: str = "",
    first: Mapping[str, str] = MappingProxyType({}),
) -> Cordons:
    """Applies the entries of an annotation to these cards. All cards may be cordoned.

    Args:
        named: the last good entries.
        snapshot: the cards.
        unreadable: what is wrong with the annotation that is there now; "" if it is `named`.
        first: the `first_ids` of the names; it is those cards that are cordoned.
    """
    called: dict[str, list[str]] = {}
    for state in snapshot.cards:
        for name in names(state):
            called.setdefault(name, []).append(state.id)
    present = {state.id: state.card.name for state in snapshot.cards}
    cards: dict[str, str] = {}
    lost: dict[str, str] = {}
    wrong: list[Problem] = []
    if unreadable:
        facts = {"annotation": ANNOTATION, "error": unreadable}
        wrong.append(Problem("CordonUnreadable", facts=facts))
    for name, reason in named.items():
        ids = called.get(name.lower(), [])
        id_ = first.get(name.lower())
        if id_ is not None and ids and id_ not in ids:
            wrong.append(_renumbered(name, reason, id_, ids, present))
        elif id_ is None and len(ids) > 1:
            wrong.append(Problem("CordonAmbiguous", facts={"name": name, "ids": tuple(ids)}))
        elif not ids and id_ not in present and snapshot.complete:
            lost[name] = reason
        if (meant := id_ or (ids[0] if len(ids) == 1 else None)) in present:
            cards[meant] = reason
    return Cordons(cards=cards, wrong=tuple(wrong), lost=lost, present=present, first_ids=first)


def _reason(reason: object) -> str:
    text = reason if isinstance(reason, str) else f"no text: {reason!r}"
    return one_line(text, _LONGEST) or _NO_REASON


def _renumbered(
    name: str, reason: str, id_: str, ids: list[str], present: Mapping[str, str]
) -> Problem:
    facts = {
        "name": name,
        "meant": id_,
        "now": present.get(id_, ""),
        "others": ", ".join(ids),
        "reason": reason,
    }
    return Problem("CordonRenumbered" if id_ in present else "CordonOfMissingCard", facts=facts)


def unknown(names: Sequence[str], snapshot: Snapshot) -> Problem:
    """Returns the problem of names that match no card of this node."""
    first, *others = (one_line(name, 60) for name in names)
    here = ", ".join(state.card.name for state in snapshot.cards)
    return Problem(
        "CordonUnknown",
        facts={"name": first, "unknown": (first, *others), "any": bool(here), "here": here},
    )
