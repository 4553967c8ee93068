"""Cordons: the cards that a person has taken out of service by the Node's annotation. Pure.

The annotation has JSON: a card's UUID, PCI address or name, and the reason.
``npu-agent/cordoned: '{"npu3": "swap fan"}'``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import names
from npu_agent.text import one_line

ANNOTATION = "npu-agent/cordoned"

_LONGEST = 256
"""Characters of a reason; the rest is cut."""
_NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that is wrong with the annotation."""

    what: str
    remedy: str
    """Its commands have ``NODE`` for the Node's name."""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordons:
    """The cordons of an annotation, applied to the cards of a host."""

    cards: Mapping[str, str] = field(default_factory=dict)
    """By card ID, the reason."""
    wrong: tuple[Trouble, ...] = ()
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
    wrong = [_unreadable(unreadable)] if unreadable else []
    for name, reason in named.items():
        ids, id_ = called.get(name.lower(), []), first.get(name.lower())
        if id_ is not None and ids and id_ not in ids:
            wrong.append(_renumbered(name, reason, id_, ids, present))
        elif id_ is None and len(ids) > 1:
            wrong.append(_ambiguous(name, ids))
        elif not ids and id_ not in present and snapshot.complete:
            lost[name] = reason
        if (meant := id_ or (ids[0] if len(ids) == 1 else None)) in present:
            cards[meant] = reason
    return Cordons(cards=cards, wrong=tuple(wrong), lost=lost, present=present, first_ids=first)


def _reason(reason: object) -> str:
    text = reason if isinstance(reason, str) else f"no text: {reason!r}"
    return one_line(text, _LONGEST) or _NO_REASON


def _unreadable(why: str) -> Trouble:
    return Trouble(
        what=f"the annotation {ANNOTATION} of this Node cannot be read, and the last good one "
        f"stays in force: {why}",
        remedy='write it as \'{"UUID": "the reason"}\', or start again: '
        f"`kubectl annotate node NODE {ANNOTATION}-`",
    )


def _ambiguous(name: str, ids: list[str]) -> Trouble:
    return Trouble(
        what=f"{name} is cordoned, but {len(ids)} cards have this name: none of them is",
        remedy=f"`kubectl npu uncordon NODE {name}`, and cordon one of {', '.join(ids)}",
    )


def _renumbered(
    name: str, reason: str, id_: str, ids: list[str], present: Mapping[str, str]
) -> Trouble:
    here = f"{id_}, which is not here"
    remedy = f"if it will not come back: `kubectl npu uncordon NODE {id_}`"
    if id_ in present:
        here = f"{id_}, which is {present[id_]} now"
        remedy = f"`kubectl npu cordon NODE {id_} --reason {shlex.quote(reason)}`"
    return Trouble(
        what=f"{name} was another card when it was cordoned: the cordon is of {here}, and not of "
        f"{', '.join(ids)}",
        remedy=remedy,
    )


def unknown(names: Sequence[str], snapshot: Snapshot) -> Trouble:
    """Returns the problem of names that match no card of this node."""
    first = one_line(names[0], 60)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    here = ", ".join(state.card.name for state in snapshot.cards) or "none"
    return Trouble(
        what=f"{first}{more} is cordoned, but this node has no such card; it has {here}",
        remedy=f"if it will not come back: `kubectl npu uncordon NODE {shlex.quote(first)}`",
    )
