"""Keeps the Snapshot true: finds cards, has each watched by a thread, publishes what changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from npu_agent import text
from npu_agent.core.hardware import CardState, HealthState, Oddity, Snapshot, identify, remember
from npu_agent.core.vendor import Entry, Vendor
from npu_agent.feed import Feed
from npu_agent.inventory.watch import FAILURES, Settings, View, Watch
from npu_agent.logs import logger
from npu_agent.rounds import Rounds, Task, next_moment, no_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logger(__name__)


class Inventory:
    """Publishes a Snapshot in `snapshots` whenever the hardware changes.

    `Rounds` probes the cards and searches for new ones, on threads: a card that hangs delays
    neither the others nor the search. The event loop sleeps until there is something new.
    """

    def __init__(
        self,
        vendors: Sequence[Vendor],
        settings: Feed[Settings] | None = None,
        restarts: Counter[str] | None = None,
        known: Mapping[str, frozenset[str]] | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        """An inventory that has not begun.

        Args:
            vendors: what to search for cards.
            settings: followed while it runs.
            restarts: counts watches that failed, by ``watch of npu0``.
            known: the IDs that cards had before, each with the card's `Card.identities` of then:
                a card that is recognised keeps its ID.
            rounds: probe the cards and search for new ones; None: rounds of its own.
        """
        self.snapshots: Feed[Snapshot] = Feed(Snapshot())
        self.hardware = self.snapshots.map(Snapshot.without_readings)
        """For those who need no readings: these change all the time."""
        self._vendors = tuple(vendors)
        self._settings = settings or Feed(Settings())
        self._restarts = restarts if restarts is not None else Counter()
        self._known = dict(known or {})
        self._rounds = rounds or Rounds()
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._watches: dict[tuple[str, int], Watch] = {}
        self._shown: tuple[Mapping[tuple[str, int], View], str] = {}, ""
        """What the latest Snapshot was made of: the views, and why the search fails."""
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failures(self) -> Counter[tuple[str, str, str]]:
        """Reads that failed, by family, card (``npu0``) and how: hung, refused or nonsense.

        Of the cards that are there: what is counted of one ends with it.
        """
        here = {
            (each.entry.family, each.entry.name) for each in self._watches.values() if each.entry
        }
        return Counter(
            {key: count for key, count in self._failures.items() if count and key[:2] in here}
        )

    async def run(self) -> None:
        """Watches until cancelled."""
        self._loop = asyncio.get_running_loop()
        scan = _Scan(self._vendors, self._settings, self._wake)
        pace = asyncio.create_task(self._keep_pace(scan))
        try:
            self._rounds.follow(self, (scan, *self._watches.values()))
            while True:
                self._changed.clear()
                if scan.found is not None and self._follow(scan.found):
                    self._rounds.follow(self, (scan, *self._watches.values()))
                self._publish(scan)
                await self._changed.wait()
        finally:
            pace.cancel()
            self._rounds.follow(self, ())

    async def _keep_pace(self, scan: _Scan) -> None:
        """Has other settings come into force immediately, not at times set by the ones before."""
        while True:
            await self._settings.changed.wait()
            for task in (scan, *self._watches.values()):
                task.hurry()
            self._rounds.wake()

    def _follow(self, found: Sequence[tuple[Vendor, Entry]]) -> bool:
        """Watches what there is, and forgets what has gone; returns whether that changed."""
        present = {entry.key: (vendor, entry) for vendor, entry in found}
        before = {key: watch.entry for key, watch in self._watches.items()}
        for key in before.keys() - present.keys():
            watch = self._watches[key]
            watch.move(None)
            watch.view = View()
            if watch.idle:  # else it is kept, lest its card's return makes another thread
                del self._watches[key]
        for key, (vendor, entry) in present.items():
            if key in before:
                self._watches[key].move(entry)
                continue
            for how in FAILURES:  # made here, as the threads only add to what there is
                self._failures.setdefault((entry.family, entry.name, how), 0)
            self._watches[key] = Watch(
                vendor,
                entry,
                settings=self._settings,
                failures=self._failures,
                changed=self._wake,
                crashed=self._crashed,
            )
        return before != {key: watch.entry for key, watch in self._watches.items()}

    def _wake(self) -> None:
        """On any thread: there is something new."""
        self._call(self._changed.set)

    def _crashed(self, part: str) -> None:
        """On any thread: counts a watch that failed, where nobody reads the counts meanwhile."""
        self._call(self._restarts.update, (part,))

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._loop:
            with suppress(RuntimeError):  # the loop is closed: the agent has ended
                self._loop.call_soon_threadsafe(function, *args)

    def _publish(self, scan: _Scan) -> None:
        """Publishes what is known now; at first not before everything has been probed."""
        watches = [watch for watch in self._watches.values() if watch.entry]
        views = {watch.entry.key: watch.view for watch in watches if watch.entry}
        before = self.snapshots.value
        if scan.found is None and (before.complete or not scan.trouble):
            return
        if before.complete and (views, scan.trouble) == self._shown:
            return
        if not before.complete and not all(view.probed for view in views.values()):
            return  # outputs see the whole picture first, not a list that grows card by card
        self._shown = views, scan.trouble
        ordered = [views[key] for key in sorted(views, key=lambda key: (key[1], key[0]))]
        odd = [view.odd for view in ordered if view.odd]
        if scan.trouble:
            odd.append(Oddity(scan.place, scan.trouble, unread=True))
        cards = tuple(view.card for view in ordered if view.card)
        if cards == tuple(state.card for state in before.cards):
            ids = tuple(state.id for state in before.cards)
        else:
            ids = identify(cards, self._known)
            self._known = remember(self._known, cards, ids)
        after = Snapshot(
            cards=tuple(
                CardState(id=id_, card=view.card, health=view.health, reading=view.reading)
                for id_, view in zip(ids, (v for v in ordered if v.card), strict=True)
                if view.card and view.health
            ),
            odd=tuple(odd),
            complete=True,
        )
        if self.snapshots.publish(after):
            _log_changes(before, after)


class _Scan(Task):
    """Finds the entries that come and go."""

    def __init__(
        self, vendors: Sequence[Vendor], settings: Feed[Settings], changed: Callable[[], None]
    ) -> None:
        super().__init__("npu-scan", changed)
        self.place = ", ".join(vendor.place for vendor in vendors)
        self.found: tuple[tuple[Vendor, Entry], ...] | None = None
        """As the last scan that went well found them; None before there is one."""
        self.trouble = ""
        """Why they cannot be found now, which proves nothing of those that were."""
        self._vendors = vendors
        self._settings = settings

    def check(self) -> float | None:
        """Takes note of a scan that hangs; see `Task.check`."""
        with self.lock:
            if not self.busy:
                return None
            missed, due = self.missed(self._settings.value.health_interval)
            if missed:
                self._result(self.found, no_answer())
        return due

    def do(self) -> None:
        """Searches."""
        settings, found, trouble = self._settings.value, self.found, ""
        try:
            found = tuple((vendor, e) for vendor in self._vendors for e in vendor.scan())
        except OSError as error:
            trouble = text.reason(error)
        except Exception as error:  # our own fault, which must not end the thread
            log.exception("the search for cards failed")
            trouble = f"internal error: {error!r}"
        with self.lock:
            self._result(found, trouble)
            if self._settings.value is settings:
                self.due = next_moment(settings.health_interval)  # else it stays due

    def _result(self, found: tuple[tuple[Vendor, Entry], ...] | None, trouble: str) -> None:
        """Makes this the result, under `lock`."""
        if trouble:
            trouble = f"cannot be searched for cards: {trouble}"
        elif self.trouble:
            log.info("the search for cards works again")
        if (found, trouble) != (self.found, self.trouble):
            self.report()
        self.found, self.trouble = found, trouble


async def read_once(vendors: Sequence[Vendor]) -> Snapshot:
    """One complete Snapshot, as `npu-agent info` needs it; about a second at most."""
    inventory = Inventory(vendors)
    async with asyncio.TaskGroup() as parts:
        running = parts.create_task(inventory.run())
        snapshot = await inventory.snapshots.until(lambda found: found.complete)
        running.cancel()
    return snapshot


def _log_changes(before: Snapshot, after: Snapshot) -> None:
    """Logs what became of the cards, one line for each change."""
    old = {state.id: state for state in before.cards}
    new = {state.id: state for state in after.cards}
    for id_, state in old.items():
        if id_ not in new:
            log.warning("card removed", card=state.card.name, id=id_)
    for id_, state in new.items():
        name = state.card.name
        previous = old.get(id_)
        if previous is None:
            log.info(
                "card added",
                card=name,
                id=id_,
                product=state.card.product,
                health=state.health.state.value,
                reason=state.health.reason,
            )
            continue
        if previous.card.name != state.card.name:
            log.warning("card renumbered", card=name, id=id_, before=previous.card.name)
        if previous.health.state is not state.health.state:
            bad = state.health.state is HealthState.UNHEALTHY
            report = log.warning if bad else log.info
            was = previous.health.state.value
            what = f"card {state.health.state.value}"
            report(what, card=name, id=id_, reason=state.health.reason, was=was)
    known_odd = set(before.odd)
    for odd in after.odd:
        if odd not in known_odd:
            log.warning("not served", entry=odd.entry, reason=odd.reason)
    if not after.cards and (before.cards or not before.complete):
        log.info("no cards on this host: waiting for some")
