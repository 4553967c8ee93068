"""Keeps the Snapshot true: finds cards, watches each on its own, notices when they come and go."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from npu_agent.core import health
from npu_agent.core.hardware import (
    Card,
    CardState,
    CoreReading,
    Oddity,
    Reading,
    Snapshot,
    State,
    identify,
)
from npu_agent.core.utilization import LONGEST_PAUSE, Meter
from npu_agent.core.vendor import Entry, NotServedError, Probe, Vendor
from npu_agent.feed import Feed
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.logs import logger
from npu_agent.supervise import keep_running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logger(__name__)

READ_DEADLINE = 0.5
"""Seconds a card may take to answer. With the default health settings a card that hangs is fenced
within 1.5 s of its last good answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of the config that the inventory follows while it runs; all times in seconds."""

    interval: float = 10.0
    """Between looks at what a card is."""
    health_interval: float = 0.5
    """Between looks at whether a card works, and at which cards there are."""
    telemetry_interval: float = 5.0
    """Between full readings."""
    policy: health.Policy = field(default_factory=health.Policy)


@dataclass(slots=True)
class _Seen:
    """What is known of one entry; owned by its watch task."""

    vendor: Vendor
    entry: Entry
    task: asyncio.Task[None] | None = None
    card: Card | None = None
    course: health.Course | None = None
    reading: Reading | None = None
    odd: Oddity | None = None
    looked: bool = False

    def forget(self, why: str, cause: Exception | None = None) -> None:
        """Nothing is known of the card, or not any more."""
        self.card = self.course = self.reading = None
        told = isinstance(cause, NotServedError)
        sample = self.entry.family if isinstance(cause, NotServedError) and cause.sample else None
        self.odd = Oddity(self.entry.path, why, unread=not told, sample_of=sample)
        self.looked = True

    def shown(self) -> tuple[object, ...]:
        """What a Snapshot shows of it."""
        health = self.course.health if self.course else None
        return self.card, health, self.reading, self.odd, self.looked


class Inventory:
    """Publishes a Snapshot in `snapshots` whenever the hardware changes.

    Each card is watched by a task with a thread of its own, so that one that hangs or answers
    nonsense holds up neither the others nor the search for new ones.
    """

    def __init__(
        self,
        vendors: Sequence[Vendor],
        settings: Callable[[], Settings] = Settings,
        restarts: Counter[str] | None = None,
    ) -> None:
        """`settings` is asked anew before each look; `restarts` counts watches that failed."""
        self.snapshots: Feed[Snapshot] = Feed(Snapshot())
        self.failures: Counter[tuple[str, str, str]] = Counter()
        """Looks that failed, by family, card (``npu0``) and how: hung, refused or nonsense."""
        self._vendors = vendors
        self._settings = settings
        self._restarts = restarts
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._scanned = False
        self._trouble: Oddity | None = None
        self._publishing = False

    async def run(self) -> None:
        """Watches until cancelled."""
        scanner = Reader("npu-scan")
        try:
            async with asyncio.TaskGroup() as watches:
                while True:
                    trouble = None
                    try:
                        entries = await scanner.call(self._scan, deadline=READ_DEADLINE)
                        self._reconcile(entries, watches)
                    except (HungError, OSError) as error:
                        # The cards that are known stay: that they cannot be listed is no proof
                        # that they have gone.
                        where = ", ".join(vendor.place for vendor in self._vendors)
                        reason = f"cannot be searched for cards: {_said(error)}"
                        trouble = Oddity(where, reason, unread=True)
                    if self._trouble and not trouble:
                        log.info("looking for cards works again")
                    self._trouble = trouble
                    self._scanned = True
                    self._changed()
                    await _next_look(self._settings().health_interval)
        finally:
            scanner.close()

    def _scan(self) -> list[tuple[Vendor, Entry]]:
        return [(vendor, entry) for vendor in self._vendors for entry in vendor.scan()]

    def _reconcile(
        self, entries: Sequence[tuple[Vendor, Entry]], watches: asyncio.TaskGroup
    ) -> None:
        """Starts to watch what is new, and forgets what has gone."""
        present = {entry.key: (vendor, entry) for vendor, entry in entries}
        for key in [key for key in self._seen if key not in present]:
            gone = self._seen.pop(key)
            if gone.task:
                gone.task.cancel()
        for key, (vendor, entry) in present.items():
            seen = self._seen.get(key)
            if seen and seen.entry.inode == entry.inode and seen.task and not seen.task.done():
                continue
            # A driver that was reloaded between two looks, or `run` was started again: what was
            # known stands until the entry has been read, so that nothing flickers; but it is read
            # as a new card.
            fresh = _Seen(vendor, entry)
            if seen:
                if seen.task:
                    seen.task.cancel()
                fresh.card, fresh.course, fresh.reading = seen.card, seen.course, seen.reading
            self._seen[key] = fresh
            # Kept running one by one: a fault at one card does not stop the watch of the others.
            watch = keep_running(
                f"watch of {entry.name}", partial(self._watch, fresh), self._restarts
            )
            fresh.task = watches.create_task(watch)

    async def _watch(self, seen: _Seen) -> None:
        """Looks at one entry for as long as it is there."""
        try:
            with closing(Reader(f"npu-{seen.entry.family}-{seen.entry.index}")) as reader:
                await self._look_on(seen, reader)
        except Exception as error:
            # A fault of ours: `keep_running` logs it and starts again. Until then nobody watches
            # the card, so it is not offered.
            seen.forget(f"internal error: {error!r}")
            self._changed()
            raise

    async def _look_on(self, seen: _Seen, reader: Reader) -> None:
        known: Card | None = None  # at this very entry, not at one before it
        proposed: Card | None = None
        identify_at = read_at = 0.0
        wraps = seen.entry.counters_wrap
        meter = Meter(wraps=wraps)
        while True:
            settings, now, shown = self._settings(), time.monotonic(), seen.shown()
            card, trouble, cause = known, "", None  # type: Card | None, str, Exception | None
            if now >= identify_at:
                try:
                    look = partial(seen.vendor.identify, seen.entry)
                    found = await reader.call(look, deadline=READ_DEADLINE)
                except (NotServedError, HungError, OSError) as error:
                    trouble, cause = _said(error), error  # and the next look asks again
                    self._failed(seen.entry, error)
                else:
                    card, proposed = _agreed(known, proposed, found)
                    identify_at = 0.0 if proposed else now + settings.interval
            if card is None:
                seen.forget(trouble, cause)
            else:
                counted = now < read_at and meter.due(now, settings.health_interval)
                verdict, card = await self._look(
                    reader, seen, card, trouble, meter if counted else None
                )
                before = seen.course
                if before is None or known is None or not _same(known, card):
                    course, seen.reading = health.begin(verdict, time.time()), None
                    meter = Meter(wraps=wraps)
                else:
                    if seen.reading:
                        heat = seen.reading.temperature()
                        verdict = health.with_heat(verdict, heat, before, settings.policy)
                    course = health.step(before, verdict, settings.policy, time.time())
                if before is None or before.health != course.health:
                    read_at = 0.0  # readings and health should tell the same story
                # All at once: a Snapshot may be made at each `await`.
                seen.card, seen.course, seen.odd, known = card, course, None, card
                if now >= read_at and not reader.hangs:
                    if seen.looked:
                        self._changed()  # health does not wait for a reading
                    # Where heat is a reason, it is looked at as often as everything else.
                    watched = settings.policy.max_temperature is not None
                    read_at = now + (0 if watched else settings.telemetry_interval)
                    await self._read(reader, seen, card, meter)
            seen.looked = True
            if seen.shown() != shown:
                self._changed()
            await self._rest(reader, seen, meter, settings.health_interval)

    async def _look(
        self, reader: Reader, seen: _Seen, card: Card, trouble: str, meter: Meter | None
    ) -> tuple[health.Verdict, Card]:
        """Judges whether a card works; also returns it with all the nodes that it has by now.

        `trouble` is what reading its identity ran into just now, if anything. With a `meter`, the
        counters of its cores are looked at in the same go: that saves a way through the thread.
        """
        vendor, entry = seen.vendor, seen.entry

        def look() -> tuple[Probe, tuple[CoreReading, ...]]:
            found = vendor.probe(entry)
            return found, vendor.read_cores(entry) if meter else ()

        try:
            found, cores = await reader.call(look, deadline=READ_DEADLINE)
        except (HungError, OSError, ValueError) as error:
            self._failed(entry, error)
            return health.Verdict(health.Outcome.BAD, _said(error)), card
        if meter:
            meter.add(cores, time.monotonic())
        missing = card.nodes - found.nodes
        if found.nodes - card.nodes:  # udev was still at work
            card = replace(card, nodes=card.nodes | found.nodes)
        if found.alive is False:
            return health.Verdict(health.Outcome.DEAD, found.reason), card
        if trouble:
            return health.Verdict(health.Outcome.BAD, trouble), card
        if missing:
            shown = ", ".join(f"/dev/{node}" for node in sorted(missing)[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            return health.Verdict(health.Outcome.BAD, f"{shown}{more} missing"), card
        if found.alive is None:
            return health.Verdict(health.Outcome.SILENT, "the driver does not say"), card
        return health.Verdict(health.Outcome.GOOD, "works"), card

    async def _read(self, reader: Reader, seen: _Seen, card: Card, meter: Meter) -> None:
        """Takes a full reading; one that hangs shows in the next look at whether it works."""
        try:
            look = partial(seen.vendor.read, seen.entry, card)
            reading = await reader.call(look, deadline=READ_DEADLINE)
        except HungError as error:
            self._failed(seen.entry, error)
            log.warning("telemetry hangs", card=card.name, error=error)
        else:
            seen.reading = replace(reading, cores=meter.told(reading.cores, reading.at))

    async def _rest(self, reader: Reader, seen: _Seen, meter: Meter, interval: float) -> None:
        """Waits for the next look; where that is long, counters are looked at meanwhile."""
        while meter.counts and not reader.hangs and _left(interval) > LONGEST_PAUSE:
            await _next_look(LONGEST_PAUSE)
            try:
                look = partial(seen.vendor.read_cores, seen.entry)
                cores = await reader.call(look, deadline=READ_DEADLINE)
            except HungError:
                break  # which shows in the next look at whether it works
            meter.add(cores, time.monotonic())
        await _next_look(interval)

    def _failed(self, entry: Entry, error: Exception) -> None:
        """Counts a look that failed; that an entry is no card of ours is no failure."""
        if not isinstance(error, NotServedError):
            hung, refused = isinstance(error, HungError), isinstance(error, OSError)
            how = "hung" if hung else "refused" if refused else "nonsense"
            self.failures[entry.family, entry.name, how] += 1

    def _changed(self) -> None:
        """Publishes after the tasks that are ready now had their turn: many changes, one value."""
        if not self._publishing:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publishing = False
        before = self.snapshots.value
        all_seen = sorted(self._seen.values(), key=lambda s: (s.entry.index, s.entry.family))
        complete = before.complete or (self._scanned and all(seen.looked for seen in all_seen))
        if not complete:
            return  # outputs see the whole picture first, not a list that grows card by card
        known = [(seen.card, seen.course, seen.reading) for seen in all_seen if seen.card]
        ids = identify(tuple(card for card, _, _ in known))
        odd = [seen.odd for seen in all_seen if seen.odd]
        if self._trouble:
            odd.append(self._trouble)
        after = Snapshot(
            cards=tuple(
                CardState(id=id_, card=card, health=course.health, reading=reading)
                for id_, (card, course, reading) in zip(ids, known, strict=True)
                if course is not None
            ),
            odd=tuple(odd),
            complete=True,
        )
        if self.snapshots.publish(after):
            _log_changes(before, after)


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


async def _next_look(interval: float) -> None:
    """Waits until it is time to look again, which is the same moment for all.

    So an idle agent wakes up once an interval and not once for each card, and what they find
    becomes one Snapshot.
    """
    await asyncio.sleep(_left(interval))


def _left(interval: float) -> float:
    """Seconds until `_next_look`."""
    return interval - time.monotonic() % interval


def _agreed(known: Card | None, proposed: Card | None, found: Card) -> tuple[Card, Card | None]:
    """What a card is taken for after it was read again, and what the next look has to confirm.

    A change counts once two looks in a row agree on it. What could not be read this time stays as
    it was: half an answer is no other card, and an ID that changed would take the device from the
    Pod that holds it.
    """
    if known is None:
        return found, None
    if _same(known, found):
        values = {each.name: getattr(found, each.name) for each in fields(Card)}
        kept = {k: getattr(known, k) for k, value in values.items() if value in (None, ())}
        # Nodes are the business of each look at whether the card works.
        found = replace(found, **{**kept, "nodes": known.nodes})
    return (found, None) if found in (known, proposed) else (known, found)


def _same(one: Card, other: Card) -> bool:
    """Whether both are one card: the first of UUID, serial and PCI address that both have tells."""
    for mine, its in (
        (one.uuid, other.uuid),
        (one.serial, other.serial),
        (one.pci_bus_id, other.pci_bus_id),
    ):
        if mine and its:
            return mine == its
    return True


def _said(error: BaseException) -> str:
    """An error of reading, for people: what failed, without Python's errno prefix."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _log_changes(before: Snapshot, after: Snapshot) -> None:
    """Tells what became of the cards, one line a change."""
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
            bad = state.health.state is State.UNHEALTHY
            say = log.warning if bad else log.info
            was = previous.health.state.value
            what = f"card {state.health.state.value}"
            say(what, card=name, id=id_, reason=state.health.reason, was=was)
    known_odd = set(before.odd)
    for odd in after.odd:
        if odd not in known_odd:
            log.warning("not served", entry=odd.entry, reason=odd.reason)
    if not after.cards and (before.cards or not before.complete):
        log.info("no cards on this host: waiting for some")
