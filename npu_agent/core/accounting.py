"""Usage per holder and card, in core-seconds and joules. Pure.

Start reading at `Accounts.follow`. It is given what is known now, and books the time since the last
call. The accounts of a card, with the one of its cores that have no holder, add up to the card:
its cores times the time, and its energy. What several holders share is divided evenly.
Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from npu_agent.core.hardware import CardState, Reading, Snapshot
from npu_agent.core.ledger import Usage

LINGER = 300.0
"""Seconds for which an account stays after its holder has ended: each Prometheus that scrapes every
few minutes reads its last value."""
IDLE = 1.0
"""Per cent of a core's cycles below which it counts as idle."""

_Key = tuple[str, int]


class Holder(NamedTuple):
    """A Pod, and the ResourceClaim by which it has cores, if any."""

    namespace: str = ""
    pod: str = ""
    uid: str = ""
    """Of the Pod; "": not known."""
    claim: str = ""
    """The claim's name; "": by the device plugin."""


UNHELD = Holder()
"""Stands for the cores that have no holder."""


class Subject(NamedTuple):
    """The subject of an account."""

    family: str
    card: str
    """``npu0``"""
    holder: Holder


@dataclass(slots=True)
class Account:
    """The usage of one card by one holder so far. It only grows."""

    since: float
    """When it began."""
    reserved: float = 0.0
    """Seconds, times cores."""
    busy: float | None = None
    """Of them, those that the cores spent on tasks; None: the driver has not said."""
    idle: float | None = None
    """Of them, those between two readings in which the core did nothing."""
    joules: float | None = None
    """Of the card's energy, the share of its cores; None: it has no sensor."""
    ended: float | None = None
    """When the holder released the card."""


@dataclass(slots=True)
class _Unread:
    """Seconds of each core, by holder, since the card's last reading."""

    read_at: float | None
    cores: list[dict[Holder, float]] = field(default_factory=list)


class Accounts:
    """The accounts of a node's cards. What it was not called for is in no account."""

    def __init__(self) -> None:
        self.accounts: dict[Subject, Account] = {}
        self._at = 0.0
        self._held: dict[_Key, tuple[tuple[Holder, ...], ...]] = {}
        """Of each card, who holds each core since then."""
        self._unread: dict[_Key, _Unread] = {}

    def follow(
        self, snapshot: Snapshot, usages: Iterable[Usage], now: float, longest: float
    ) -> None:
        """Books what the holders until now have used; from now on, `usages` says who they are.

        Args:
            snapshot: the cards; one without cards ends all accounts.
            usages: who holds which cores.
            now: the time.
            longest: seconds between two readings of a card, above which it is not known how much
                was used between them. Cores still count as reserved.
        """
        self._reserve(now)
        cards = {state.card.key: state for state in snapshot.cards}
        for key, state in cards.items():
            if state.reading is not None:
                self._read(key, state.reading, longest)
        self._unread = {key: one for key, one in self._unread.items() if key in cards}
        held = list(usages)
        self._held = {key: _holders(state, held) for key, state in cards.items()}
        self._begin_and_end(now)

    def _reserve(self, now: float) -> None:
        passed, self._at = now - self._at, now
        for key, cores in self._held.items():
            unread = self._unread.setdefault(key, _Unread(None))
            unread.cores = unread.cores or [{} for _ in cores]
            for holders, seconds in zip(cores, unread.cores, strict=True):
                for holder in holders:
                    share = passed / len(holders)
                    self._account(key, holder).reserved += share
                    seconds[holder] = seconds.get(holder, 0.0) + share

    def _read(self, key: _Key, reading: Reading, longest: float) -> None:
        before = self._unread.get(key, _Unread(None))
        if before.read_at == reading.at:
            return
        self._unread[key] = _Unread(reading.at)
        if before.read_at is None or reading.at - before.read_at > longest:
            return
        loads = {core.core: core.utilization for core in reading.cores}
        watts = reading.power()
        for core, seconds in enumerate(before.cores):
            if watts is not None:
                for holder, part in seconds.items():
                    account = self._account(key, holder)
                    account.joules = (account.joules or 0.0) + watts / len(before.cores) * part
            if (load := loads.get(core)) is not None:
                for holder, part, worked in _work(load, seconds):
                    account = self._account(key, holder)
                    account.busy = (account.busy or 0.0) + worked
                    account.idle = (account.idle or 0.0) + (part if load < IDLE else 0.0)

    def _begin_and_end(self, now: float) -> None:
        present = {
            Subject(*_named(key), holder)
            for key, cores in self._held.items()
            for holders in cores
            for holder in holders
        }
        for subject in sorted(present):
            self.accounts.setdefault(subject, Account(now)).ended = None
        for subject, account in tuple(self.accounts.items()):
            if subject in present:
                continue
            if account.ended is None:
                account.ended = now
            elif now - account.ended > LINGER:
                del self.accounts[subject]

    def _account(self, key: _Key, holder: Holder) -> Account:
        return self.accounts.setdefault(Subject(*_named(key), holder), Account(self._at))


def _named(key: _Key) -> tuple[str, str]:
    """Family and name of the card with this `Card.key`."""
    family, index = key
    return family, f"npu{index}"


def _holders(state: CardState, usages: Iterable[Usage]) -> tuple[tuple[Holder, ...], ...]:
    """Returns the holders of each core; several where Pods share a claim."""
    cores: list[dict[Holder, None]] = [{} for _ in state.card.all_cores]
    for usage in usages:
        if usage.card_id == state.id:
            it = usage.assignment
            for core in usage.cores:
                cores[core][Holder(it.namespace, it.pod, usage.uid, it.claim)] = None
    return tuple(tuple(holders) or (UNHELD,) for holders in cores)


def _work(load: float, seconds: Mapping[Holder, float]) -> Iterator[tuple[Holder, float, float]]:
    """Returns each holder's seconds, and those of them spent on work, at this total load.

    A core that was free for a part of the time was not busy then, if the rest explains the work.
    """
    worked = load / 100 * sum(seconds.values())
    held = sum(part for holder, part in seconds.items() if holder != UNHELD)
    by_holders = min(worked, held)
    for holder, part in seconds.items():
        if holder == UNHELD:
            yield holder, part, worked - by_holders
        else:
            yield holder, part, by_holders * part / held if held else 0.0
