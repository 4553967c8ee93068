"""Keeps the Snapshot true: finds cards, has each watched by a thread, publishes what changes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from npu_agent.core.hardware import CardState, HealthState, Oddity, Snapshot, identify, remember
from npu_agent.core.vendor import Entry, Vendor
from npu_agent.feed import Feed
from npu_agent.inventory.watch import FAILURES, Settings, View, Watch
from npu_agent.inventory.worker import Worker, no_answer, said
from npu_agent.logs import logger
from npu_agent.ticks import until_tick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logger(__name__)

_CHECK_EVERY = 1.0
"""Seconds between two checks whether a thread hangs. One that does is found within this time, and
then checked just when it has missed enough deadlines."""
_TOGETHER = 0.1
"""Seconds from a change to the Snapshot: what many cards publish at a time is one Snapshot."""


class Inventory:
    """Publishes a Snapshot in `snapshots` whenever the hardware changes.

    Each card is watched by a thread of its own, so that one that hangs or answers nonsense delays
    neither the others nor the search for new ones, and the event loop has nothing to do until one
    of them has something new.
    """

    def __init__(
        self,
        vendors: Sequence[Vendor],
        settings: Feed[Settings] | None = None,
        restarts: Counter[str] | None = None,
        known: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """An inventory that has not begun.

        Args:
            vendors: what to search for cards.
            settings: followed while it runs.
            restarts: counts watches that failed, by ``watch of npu0``.
            known: the IDs that cards had before, each with the card's `Card.identities` of then:
                a card that is recognised keeps its ID.
        """
        self.snapshots: Feed[Snapshot] = Feed(Snapshot())
        self.hardware = self.snapshots.map(Snapshot.without_readings)
        """For those who need no readings: these change all the time."""
        self._vendors = tuple(vendors)
        self._settings = settings or Feed(Settings())
        self._restarts = restarts if restarts is not None else Counter()
        self._known = dict(known or {})
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._watches: dict[tuple[str, int], Watch] = {}
        self._shown: tuple[Mapping[tuple[str, int], View], str] = {}, ""
        """What the latest Snapshot was made of: the views, and why the search fails."""
        self._changed = asyncio.Event()
        self._waking = False
        """Whether `_changed` is being set."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failures(self) -> Counter[tuple[str, str, str]]:
        """Reads that failed, by family, card (``npu0``) and how: hung, refused or nonsense."""
        return +self._failures

    async def run(self) -> None:
        """Watches until cancelled."""
        self._loop = asyncio.get_running_loop()
        scan = _Scan(self._vendors, self._settings, self._wake)
        scan.start()
        try:
            while True:
                self._changed.clear()
                self._waking = False  # what a thread changes from here on wakes us again
                settings = self._settings.value
                if scan.found is not None:
                    self._follow(scan.found)
                checks = [watch.check(settings) for watch in self._watches.values()]
                checks.append(scan.check(settings))
                self._publish(scan)
                due = min(filter(None, (time.monotonic() + until_tick(_CHECK_EVERY), *checks)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(due - time.monotonic()):
                        await self._changed.wait()
                        await asyncio.sleep(_TOGETHER)
        finally:
            scan.end()
            for watch in self._watches.values():
                watch.move(None)

    def _follow(self, found: Sequence[tuple[Vendor, Entry]]) -> None:
        """Watches what there is, and forgets what has gone."""
        present = {entry.key: (vendor, entry) for vendor, entry in found}
        for key in [key for key in self._watches if key not in present]:
            watch = self._watches[key]
            hangs = watch.move(None)
            watch.view = View()
            if not hangs:  # one that does is kept, lest its card's return makes another thread
                del self._watches[key]
        for key, (vendor, entry) in present.items():
            before = self._watches.get(key)
            if before and before.move(entry):
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
                before=before,
            )
            self._watches[key].start()

    def _wake(self) -> None:
        """On any thread: there is something new. However many threads call, the loop wakes once."""
        if not self._waking:
            self._waking = True
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


class _Scan(Worker):
    """Finds the entries that come and go."""

    def __init__(
        self, vendors: Sequence[Vendor], settings: Feed[Settings], changed: Callable[[], None]
    ) -> None:
        super().__init__("npu-scan")
        self.place = ", ".join(vendor.place for vendor in vendors)
        self.found: tuple[tuple[Vendor, Entry], ...] | None = None
        """As the last scan that went well found them; None before there is one."""
        self.trouble = ""
        """Why they cannot be found now, which proves nothing of those that were."""
        self._vendors = vendors
        self._settings = settings
        self._changed = changed
        self._ending = False

    def check(self, settings: Settings) -> float | None:
        """Takes note of a scan that hangs; returns when to check again."""
        with self.lock:
            missed, due = self.missed(settings.health_interval)
            if missed:
                self._report(self.found, no_answer())
        return due

    def end(self) -> None:
        """Ends the thread when it is free."""
        self._ending = True
        self.wake()

    def _run(self) -> None:
        while not self._ending:
            self._asks()
            found, trouble = self.found, ""
            try:
                found = tuple((vendor, e) for vendor in self._vendors for e in vendor.scan())
            except OSError as error:
                trouble = said(error)
            except Exception as error:  # our own fault, which must not end the thread
                log.exception("the search for cards failed")
                trouble = f"internal error: {error!r}"
            with self.lock:
                changed = self._report(found, trouble)
            if changed:
                self._changed()
            self._pause(self._left(self._settings.value.health_interval))

    def _report(self, found: tuple[tuple[Vendor, Entry], ...] | None, trouble: str) -> bool:
        """Makes this the result, under `lock`; returns whether it is another one."""
        if trouble:
            trouble = f"cannot be searched for cards: {trouble}"
        elif self.trouble:
            log.info("the search for cards works again")
        before, self.found, self.trouble = (self.found, self.trouble), found, trouble
        return (found, trouble) != before


async def read_once(vendors: Sequence[Vendor]) -> Snapshot:
    """One complete Snapshot, as `npu-agent info` needs it; about a second at most."""
    inventory = Inventory(vendors)
    async with asyncio.TaskGroup() as parts:
        running = parts.create_task(inventory.run())
        async for snapshot in inventory.snapshots.watch():
            if snapshot.complete:
                running.cancel()
                return snapshot
    raise AssertionError("the feed of an inventory is never closed")


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
