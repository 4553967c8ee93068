"""The watch of one card: probes it, reads it, and keeps what is known of it.

Start reading at `Watch._probe_once`, which is what happens each `health.interval`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from npu_agent import text
from npu_agent.backoff import Backoff
from npu_agent.core import health
from npu_agent.core.hardware import Card, Cause, Health, HealthState, Oddity, Reading
from npu_agent.core.health import Outcome, Verdict
from npu_agent.core.utilization import LONGEST_PAUSE, Meter
from npu_agent.core.vendor import OWN_LIMITS, Entry, NotServedError, Probe, Vendor
from npu_agent.logs import logger
from npu_agent.rounds import Task, next_moment, no_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_agent.feed import Feed

log = logger(__name__)

T = TypeVar("T")

FAILURES = ("hung", "refused", "nonsense")
"""How a read can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of the config that the inventory follows while it runs; all times in seconds."""

    interval: float = 10.0
    """Between reads of what a card is."""
    health_interval: float = 0.5
    """Between probes of a card, and between searches for cards."""
    telemetry_interval: float = 5.0
    """Between full readings."""
    policy: health.Policy = field(default_factory=health.Policy)


@dataclass(frozen=True, slots=True)
class View:
    """What a Snapshot shows of one entry."""

    card: Card | None = None
    health: Health | None = None
    reading: Reading | None = None
    odd: Oddity | None = None
    probed: bool = False
    """Whether it has answered, or missed its deadline."""


class _LimitedError(Exception):
    """A read failed because of our own limits, which says nothing of the card."""


class Watch(Task):
    """Watches one place where a card may be; `view` is what is known of it.

    A place has one watch, whatever becomes of its card. One that hangs is given the next entry, for
    when it comes back: Linux ends every read of an entry before it removes it.
    """

    def __init__(
        self,
        vendor: Vendor,
        entry: Entry,
        *,
        settings: Feed[Settings],
        failures: Counter[tuple[str, str, str]],
        changed: Callable[[], None],
        crashed: Callable[[str], None],
    ) -> None:
        """A watch that knows nothing yet.

        Args:
            vendor: whose card it may be.
            entry: where.
            settings: looked up for each probe.
            failures: counts reads that fail; has a key for each way in which these can.
            changed: called on any thread when `view` is another one.
            crashed: called on any thread, with the watch's name, after a fault of our own.
        """
        super().__init__(f"npu-{entry.family}-{entry.index}", changed)
        self.view = View()
        self._course: health.Course | None = None
        self._vendor = vendor
        self._settings = settings
        self._failures = failures
        self._crashed = crashed
        self._entry: Entry | None = entry
        self._begun: Entry | None = None
        """The entry that the attributes of `_begin` are about."""
        self._paced: Settings | None = None
        """The settings that the times of a probe, of what the card is and of a reading go by."""
        self._identified: tuple[Entry, Card] | None = None
        """The card that was identified last, and where."""
        self._reading = False
        """Whether a reading is under way, and the log does not know that it hangs."""
        self._settled: tuple[Probe, Card | None] | None = None
        """A probe that changed nothing, and the card as it is known: nor will an equal one."""
        self._limited = False
        """Whether our own limits keep it from reading, which the log knows of."""
        self._pause = Backoff(first=0.2, longest=30.0)
        """After faults of our own."""

    # On the event loop.

    @property
    def entry(self) -> Entry | None:
        """What it watches; None: nothing any more."""
        return self._entry

    @property
    def idle(self) -> bool:
        """Whether it watches nothing any more, and no read of what it watched is under way."""
        return self._entry is None and (not self.busy or self.due == math.inf)

    def move(self, entry: Entry | None) -> None:
        """Watches another entry of the same place from now on; None: nothing."""
        with self.lock:
            if self._entry != entry:
                self._entry, self.due = entry, 0.0

    # On the thread that watches for hangs.

    def check(self) -> float | None:
        """Fences the card if a read hangs; see `Task.check`."""
        settings = self._settings.value
        with self.lock:
            entry, view, course = self._entry, self.view, self._course
            missed, due = self.missed(settings.health_interval)
            if entry is None or not self.busy:
                return None
            if missed:
                self._failures[entry.family, entry.name, "hung"] += missed
                if self._reading:
                    self._reading = False
                    log.warning("telemetry hangs", card=entry.name, error=no_answer())
            if view.card is None or course is None:
                identified = self._identified
                if missed and identified and identified[0] is entry:  # its first probe hangs
                    verdict = Verdict(Outcome.BAD, no_answer(), Cause.HANGS)
                    self._course, self._new = health.begin(verdict, time.monotonic()), False
                    self.view = View(identified[1], self._course.health, probed=True)
                elif missed:
                    self.view = _not_served(entry, no_answer())
                due = due if not missed and not view.probed else math.inf
            else:
                for _ in range(min(missed, settings.policy.failures)):
                    verdict = Verdict(Outcome.BAD, no_answer(), Cause.HANGS)
                    course = health.step(course, verdict, settings.policy, time.monotonic())
                self._course = course
                if missed:
                    self._settled = None
                    self.view = replace(view, health=course.health, probed=True)
                if course.health.state is HealthState.UNHEALTHY:
                    due = math.inf
            news = self.view != view
        if news:
            self.report()
        return due

    # On any thread, but one at a time.

    def do(self) -> None:
        """Probes the card; where that is not due yet, reads its counters."""
        with self.lock:
            entry = self._entry
        settings = self._settings.value
        if entry is None:
            self._begun, due = None, math.inf
        else:
            if entry is not self._begun:
                self._begin(entry)
            if settings is not self._paced:
                self._paced = settings
                self._probe_at = self._identify_at = self._read_at = 0.0
            try:
                due = self._do(entry, settings)
            except Exception as error:
                # Our own fault. Until the next try nobody watches the card: it is not offered.
                self._begun = None
                part = f"watch of {entry.name}"
                log.exception("a part failed and will be started again", part=part)
                self._show(entry, _not_served(entry, f"internal error: {error!r}"))
                self._crashed(part)
                due = time.monotonic() + self._pause.next()
        with self.lock:
            if self._entry is entry and self._settings.value is settings:
                self.due = due  # else it stays due
        if entry is None:
            self.report()  # it can be forgotten now

    def _begin(self, entry: Entry) -> None:
        """Knows nothing of the entry."""
        self._begun = entry
        self._known: Card | None = None  # read at this very entry, not at one before it
        self._proposed: Card | None = None
        self._new = True
        self._settled = self._paced = None
        self._meter = Meter(wraps=entry.counters_wrap)

    def _do(self, entry: Entry, settings: Settings) -> float:
        if time.monotonic() < self._probe_at:
            self._count(entry)
        else:
            self._probe_once(entry, settings)
            self._probe_at = next_moment(settings.health_interval)
        # Where the next probe is far away, counters are read meanwhile.
        if self._meter.counts and self._probe_at - time.monotonic() > LONGEST_PAUSE:
            return next_moment(LONGEST_PAUSE)
        return self._probe_at

    def _probe_once(self, entry: Entry, settings: Settings) -> None:
        """Whether the card works and, each at its time, what it is and what it measures."""
        now = time.monotonic()
        try:
            trouble = self._identify(entry, now, settings) if now >= self._identify_at else None
            if self._known is None:
                self._show(entry, _not_served(entry, trouble))
                return
            self._probe(entry, self._known, trouble, now, settings)
            if now >= self._read_at:
                # Where heat is a reason, it is read as often as everything else.
                often = settings.policy.max_temperature is not None
                pause = settings.telemetry_interval - settings.health_interval / 2
                self._read_at = now + (0 if often else pause)  # in time for the probe due then
                self._reading = True
                reading = self._ask(entry, self._vendor.read, self._known)
                if not self._reading:
                    log.info("telemetry is read again", card=entry.name)
                self._reading = False
                held = settings.telemetry_interval if often else 0.0
                cores = self._meter.measured(reading.cores, reading.at, held=held)
                reading = replace(reading, cores=cores)
                with self.lock:  # `check` may have fenced the card
                    self._show(entry, replace(self.view, reading=reading, probed=True))
                self._limited = False
        except _LimitedError as error:
            if not self._limited:
                log.error("the agent cannot read cards for now", card=entry.name, reason=error)
            self._limited = True
            if not self.view.probed:
                self._show(entry, _not_served(entry, error))

    def _identify(self, entry: Entry, now: float, settings: Settings) -> Exception | None:
        """Reads what the card is; returns what kept it from that: the next probe tries again."""
        try:
            found = self._ask(entry, self._vendor.identify)
        except (NotServedError, OSError) as error:
            return error
        before = self._known
        self._known, self._proposed = _agreed(before, self._proposed, found)
        self._identified = entry, self._known
        if before is None or not before.same_as(self._known):
            self._new, self._meter = True, Meter(wraps=entry.counters_wrap)
            self._read_at = 0.0
        self._identify_at = 0.0 if self._proposed else now + settings.interval
        return None

    def _probe(
        self, entry: Entry, card: Card, trouble: Exception | None, now: float, settings: Settings
    ) -> None:
        """Whether the card works. `trouble` is what reading its identity ran into just now."""
        try:
            found = self._ask(entry, self._vendor.probe)
        except (OSError, ValueError) as error:
            self._judge(entry, Verdict(Outcome.BAD, text.reason(error), Cause.NONSENSE), settings)
            return
        if now < self._read_at and self._meter.due(now, settings.health_interval):
            self._count(entry)
        limit = settings.policy.max_temperature
        if not trouble and limit is None and self._settled == (found, card):
            return
        if not found.nodes <= card.nodes:  # udev was still at work
            self._known = replace(card, nodes=card.nodes | found.nodes)
        settles = found if not trouble and limit is None else None
        self._judge(entry, _verdict(card, found, trouble), settings, settles)

    def _judge(
        self, entry: Entry, verdict: Verdict, settings: Settings, settles: Probe | None = None
    ) -> None:
        """Steps the card's health, and shows it; that does not wait for a reading.

        If nothing changes, `settles` is a probe that changes nothing from now on.
        """
        with self.lock:  # all of it: meanwhile `check` may fence the card
            before, view = self._course, self.view
            if before is None or self._new:
                course, reading = health.begin(verdict, time.monotonic()), None
            else:
                reading = view.reading
                if reading:
                    heat = reading.temperature()
                    verdict = health.with_heat(verdict, heat, before, settings.policy)
                course = health.step(before, verdict, settings.policy, time.monotonic())
            if self._entry is entry:
                self._course, self._new = course, False
                self._settled = (settles, self._known) if settles and course == before else None
            self._show(entry, View(self._known, course.health, reading, probed=view.probed))
        if before is None or before.health != course.health:
            self._read_at = 0.0  # readings and health should tell the same story

    def _count(self, entry: Entry) -> None:
        with suppress(_LimitedError):
            self._meter.add(self._ask(entry, self._vendor.read_cores), time.monotonic())

    def _ask(self, entry: Entry, verb: Callable[..., T], *args: Any) -> T:
        """Has the vendor do something, and counts it if that fails.

        Raises:
            _LimitedError: the agent has no files or no memory left.
        """
        self.asks()
        try:
            return verb(entry, *args)
        except ValueError:
            self._failures[entry.family, entry.name, "nonsense"] += 1
            raise
        except MemoryError as error:
            raise _LimitedError("the agent has no memory left") from error
        except OSError as error:
            if error.errno in OWN_LIMITS:
                raise _LimitedError(text.reason(error)) from error
            self._failures[entry.family, entry.name, "refused"] += 1
            raise

    def _show(self, entry: Entry, view: View) -> None:
        """Makes `view` what is known of `entry`, unless another entry has taken its place."""
        with self.lock:
            if self._entry is not entry or view == self.view:
                return
            self.view = view
            if view.card is None:
                self._course = self._settled = None
        if view.probed:
            self.report()


def _verdict(card: Card, found: Probe, trouble: Exception | None) -> Verdict:
    """What a probe says of a card; `trouble` is what reading its identity ran into."""
    missing = sorted(card.nodes - found.nodes)
    if found.alive is False:
        return Verdict(Outcome.DEAD, found.reason)
    if trouble:
        return Verdict(Outcome.BAD, text.reason(trouble), Cause.NONSENSE)
    if missing:
        shown = ", ".join(f"/dev/{node}" for node in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return Verdict(Outcome.BAD, f"{shown}{more} missing", Cause.NODES)
    if found.alive is None:
        return Verdict(Outcome.SILENT, "the driver does not say")
    return Verdict(Outcome.GOOD, "works")


def _not_served(entry: Entry, why: Exception | str | None) -> View:
    """An entry of which no card is known."""
    reason = text.reason(why) if isinstance(why, Exception) else str(why)
    refused = isinstance(why, NotServedError)
    sample = entry.family if isinstance(why, NotServedError) and why.sample else None
    odd = Oddity(entry.path, reason, unread=not refused, sample_of=sample)
    return View(odd=odd, probed=True)


def _agreed(known: Card | None, proposed: Card | None, found: Card) -> tuple[Card, Card | None]:
    """What a card is taken for after it was read again, and what the next read has to confirm.

    A change counts once two reads in a row agree on it. What could not be read this time stays as
    it was: half an answer is no other card, and an ID that changed would take the device from the
    Pod that holds it.
    """
    if known is None:
        return found, None
    if known.same_as(found):
        values = {each.name: getattr(found, each.name) for each in fields(Card)}
        kept = {k: getattr(known, k) for k, value in values.items() if value in (None, ())}
        # Nodes are followed by each probe.
        found = replace(found, **{**kept, "nodes": known.nodes})
    if found == known:
        return known, None
    return (found, None) if found == proposed else (known, found)
