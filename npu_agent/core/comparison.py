"""Slow cards and links: a card compared with its siblings and with its own default. Pure.

Siblings are the node's other cards of one product. A card is slow for a limit of its own, or for a
reason to throttle that the driver reports; never for its clock or load alone, which a governor
changes. Start reading at `slow`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from npu_agent.core.hardware import CardState, Limits, Reading
from npu_agent.core.kinds import Clause, Message

IDLE = "idle"
"""The reason to throttle that is not a fault."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Why a card is slow."""

    detail: tuple[Message, ...]
    """``1700 MHz, its siblings 2000; power limit 225 W, default 300 W; driver: app power cap``."""
    limited: bool
    """Whether it is for a limit; a mere reason to throttle may be over in a moment."""


def slow(cards: Sequence[CardState]) -> Mapping[str, Slow]:
    """Returns the slow cards by ID."""
    return {card.id: trend for card in cards if (trend := _slow(card, cards))}


def alike(cards: Sequence[CardState]) -> Iterator[tuple[tuple[CardState, ...], Message]]:
    """Yields cards of one product that all have one power limit below their default."""
    for product in dict.fromkeys(card.card.product for card in cards):
        of = tuple(card for card in cards if card.card.product == product)
        limits = _limits(of[0])
        if len(of) > 1 and _is_lowered(limits) and _have_power_of(of[1:], limits):
            yield of, _compared("PowerLimitBelowDefault", limits.power, limits.default_power)


def begun(before: Reading | None, after: Reading) -> tuple[tuple[str, int], ...]:
    """How often each reason to throttle has begun, once `after` has followed `before`."""
    counts = dict(before.throttled) if before else {}
    active = before.throttle or () if before else ()
    for reason in after.throttle or ():
        counts[reason] = counts.get(reason, 0) + (reason not in active)
    return tuple(counts.items())


def _slow(card: CardState, cards: Sequence[CardState]) -> Slow | None:
    if card.reading is None:
        return None
    siblings = _siblings(card, cards)
    own = card.reading.limits
    power = _power(own, siblings)
    clock = _clock_limit(own, siblings)
    excused = {IDLE}
    # What holds a card at a limit that is as it should be is full load.
    if own.power is not None and power is None:
        excused.add("app_power_cap")
    if own.clock is not None and clock is None:
        excused.add("app_clock_cap")
    reasons = [reason for reason in card.reading.throttle or () if reason not in excused]
    limits = [limit for limit in (power, clock) if limit]
    if not limits and not reasons:
        return None
    detail = [*_clocks(card.reading, siblings), *limits]
    if reasons:
        detail.append(Message("Throttled", facts={"reasons": ", ".join(map(plain, reasons))}))
    return Slow(tuple(detail), limited=bool(limits))


def slow_link(card: CardState, cards: Sequence[CardState]) -> tuple[Message, ...]:
    """``8 of 16 lanes; 16 GT/s, its siblings 32``; empty: its PCIe link is as fast as it can be."""
    detail: list[Message] = []
    lanes = card.card.lanes
    speed = card.card.link_speed
    if lanes and lanes[0] < lanes[1]:
        detail.append(_compared("FewerLanes", *lanes))
    if speed:
        now, most = speed
        theirs = [other.card.link_speed for other in _siblings(card, cards)]
        fastest = max((pair[0] for pair in theirs if pair), default=now)
        if now < most:
            detail.append(_compared("SlowerLanes", now, most))
        elif now < fastest:  # its slot is slower than theirs
            detail.append(_compared("LanesBelowSiblings", now, fastest))
    return tuple(detail)


def _compared(clause: Clause, own: float | None, other: float | None) -> Message:
    """A figure of a card, and the one that it should have."""
    return Message(clause, facts={"own": own, "other": other})


def plain(reason: str) -> str:
    """``app_power_cap`` -> ``app power cap``."""
    return reason.replace("_", " ")


def _siblings(card: CardState, cards: Sequence[CardState]) -> list[CardState]:
    product = card.card.product
    return [other for other in cards if other.card.product == product and other is not card]


def _limits(card: CardState) -> Limits:
    return card.reading.limits if card.reading else Limits()


def _is_lowered(limits: Limits) -> bool:
    return limits.power is not None and limits.power < (limits.default_power or 0.0)


def _have_power_of(cards: Sequence[CardState], limits: Limits) -> bool:
    wanted = (limits.power, limits.default_power)
    return all((_limits(card).power, _limits(card).default_power) == wanted for card in cards)


def _power(limits: Limits, siblings: Sequence[CardState]) -> Message | None:
    """``power limit 225 W, default 300 W``; None: as it should be, or lowered on all cards."""
    if limits.power is None:
        return None
    if limits.default_power is not None:
        if not _is_lowered(limits) or (siblings and _have_power_of(siblings, limits)):
            return None
        return _compared("PowerLimitBelowDefault", limits.power, limits.default_power)
    most = max((_limits(other).power or 0.0 for other in siblings), default=0.0)
    is_less = limits.power < most
    return _compared("PowerLimitBelowSiblings", limits.power, most) if is_less else None


def _clock_limit(limits: Limits, siblings: Sequence[CardState]) -> Message | None:
    most = max((_limits(other).clock or 0 for other in siblings), default=0)
    if limits.clock is None or limits.clock >= most:
        return None
    return _compared("ClockLimitBelowSiblings", limits.clock, most)


def _clocks(reading: Reading, siblings: Sequence[CardState]) -> Iterator[Message]:
    """Yields ``1700 MHz, its siblings 2000`` where they are faster."""
    own = _clock(reading)
    theirs = [clock for other in siblings if other.reading and (clock := _clock(other.reading))]
    if own and theirs and own < min(theirs):
        yield _compared("ClockBelowSiblings", own, min(theirs))


def _clock(reading: Reading) -> int | None:
    return max((core.frequency for core in reading.cores if core.frequency), default=None)
