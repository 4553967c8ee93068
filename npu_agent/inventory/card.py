"""Watches one slot of a card: plans questions to its driver, and judges the answers.

Start reading at `CardWatch.questions` and `CardWatch.answered`. Only `ask` runs on a thread; the
state of a card is on the event loop alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from npu_agent import text
from npu_agent.backoff import Backoff
from npu_agent.core import comparison, health
from npu_agent.core.hardware import (
    Card,
    Cause,
    CoreReading,
    Health,
    HealthState,
    Reading,
    SkippedDevice,
)
from npu_agent.core.health import Verdict
from npu_agent.core.utilization import LONGEST_PAUSE, UtilizationTracker
from npu_agent.core.vendor import OWN_LIMITS, Entry, NotServedError, Probe, Vendor
from npu_agent.logs import Reporter, logger
from npu_agent.repeats import Repeat
from npu_agent.ticks import until_tick

if TYPE_CHECKING:
    from collections.abc import Callable

log = logger(__name__)

T = TypeVar("T")

_TICK = 1.0
"""Seconds, as of `until_tick`: the loop wakes up then anyway, and readings are taken then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The part of the config that the inventory follows while it runs; all times in seconds."""

    interval: float = 10.0
    """Between reads of a card's identity."""
    health_interval: float = 0.5
    """Between probes of a card, and between searches for cards."""
    telemetry_interval: float = 5.0
    """Between full readings."""
    counter_interval: float = LONGEST_PAUSE
    """Between reads of counters that wrap, at most."""
    policy: health.Policy = field(default_factory=health.Policy)
    host_nodes: tuple[str, ...] = ()
    """Nodes of the host that every container with a device gets, as far as they are there."""
    root: str = "/"
    """Where that host's ``/`` is seen."""


@dataclass(frozen=True, slots=True)
class View:
    """The part of a Snapshot for one entry."""

    card: Card | None = None
    health: Health | None = None
    reading: Reading | None = None
    skipped: SkippedDevice | None = None

    @property
    def probed(self) -> bool:
        """Whether it has answered, or missed its deadline."""
        return self.card is not None or self.skipped is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Questions to a driver about one entry."""

    entry: Entry
    card: Card | None
    """The known card; None: identify it, and ask nothing else."""
    identify: bool
    probe: bool
    read: bool
    count: bool
    """Read the counters of its cores; a reading has them as well."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """Answers of a driver; a question that was not asked has none."""

    card: Card | None = None
    skipped: SkippedDevice | None = None
    """In place of a card that was not identified."""
    probe: Probe | None = None
    trouble: str = ""
    reading: Reading | None = None
    cores: tuple[CoreReading, ...] | None = None
    at: float = 0.0
    """When `cores` were read, by `time.monotonic`."""
    failures: list[str] = field(default_factory=list)
    """The failures of calls: ``refused`` or ``nonsense``."""
    limited: str = ""
    """The limit of our process that prevented a question; it says nothing about the card."""
    bug: Exception | None = None


def ask(vendor: Vendor, questions: Questions) -> Answers:
    """Asks a driver; blocking. Never raises."""
    answers = Answers()
    try:
        _ask(vendor, questions, answers)
    except MemoryError:
        answers.limited = "the agent has no memory left"
    except Exception as error:  # a fault of our own, which must not end the thread
        if isinstance(error, OSError) and error.errno in OWN_LIMITS:
            answers.limited = text.reason(error)
        else:
            answers.bug = error
    return answers


def _ask(vendor: Vendor, questions: Questions, answers: Answers) -> None:
    entry = questions.entry
    if questions.identify:
        try:
            answers.card = vendor.identify(entry)
        except NotServedError as error:
            sample = entry.family if error.sample else None
            answers.skipped = SkippedDevice(entry.path, text.reason(error), sample_of=sample)
        except OSError as error:
            answers.skipped = _unread(entry, _failure(error, answers))
    if questions.card is None:
        return
    if questions.probe:
        try:
            answers.probe = vendor.probe(entry)
        except (OSError, ValueError) as error:
            answers.trouble = _failure(error, answers)
    if questions.read:
        answers.reading = vendor.read(entry, questions.card)
    elif questions.count:
        answers.cores = vendor.read_cores(entry)
        answers.at = time.monotonic()


def _failure(error: OSError | ValueError, answers: Answers) -> str:
    """Counts a failed call and returns why; raises a limit of our own again."""
    if isinstance(error, OSError) and error.errno in OWN_LIMITS:
        raise error
    answers.failures.append("refused" if isinstance(error, OSError) else "nonsense")
    return text.reason(error)


def _quietly(question: Callable[[Entry], T], entry: Entry) -> T | str:
    """The answer, or the error's text: the loop asks again and judges it."""
    try:
        return question(entry)
    except Exception as error:
        return text.reason(error)


class CardWatch:
    """The state of one slot, and the next questions."""

    def __init__(self, vendor: Vendor, entry: Entry) -> None:
        self.vendor = vendor
        self.entry: Entry | None = entry
        """None: the card has gone."""
        self.view = View()
        self.due = 0.0
        """When to ask next, by `time.monotonic`."""
        self.failures: Counter[str] = Counter()
        """Reads of this card that failed, by how: hung, refused or nonsense."""
        self._crashes = Backoff(first=0.2, longest=30.0, least=0.1)
        self._limits = Reporter(
            log,
            "cannot read cards (a limit of the agent's process); retrying",
            card=entry.name,
        )
        self._forget()

    def _forget(self) -> None:
        self._health: health.HealthTracker | None = None
        self._known: Card | None = None  # read at this very entry, not at one before it
        self._identity: Card | None = None  # as it was read last, whether or not it was believed
        self._proposed: Card | None = None
        self._utilization = UtilizationTracker(
            wraps=self.entry is not None and self.entry.counters_wrap
        )
        self.hurry()

    def hurry(self) -> None:
        """Asks everything in the next round."""
        self.repeats: tuple[Repeat[Any], ...] = ()
        self.due = self._probe_at = self._identify_at = self._read_at = 0.0

    def differs(self, repeat: Repeat[Any]) -> None:
        """Asks in the next round what has another answer now; `repeat` is of `repeats`."""
        if repeat is self.repeats[-1]:
            self._identify_at = 0.0
        self.repeats = ()
        self.due = self._probe_at = 0.0

    def move(self, entry: Entry | None) -> None:
        """Watches another entry of the same slot; None: the card has gone."""
        if self.entry != entry:
            self.entry = entry
            self._forget()
            if entry is None:
                self.view = View()
                self.failures.clear()

    def questions(self, entry: Entry, now: float, settings: ProbeSettings) -> Questions:
        """Returns the questions about `entry` at `now`, and plans the next ones."""
        probe = now >= self._probe_at
        if probe:
            self._probe_at = now + until_tick(settings.health_interval)
        read = probe and now >= self._read_at
        pause = settings.health_interval
        longest = settings.counter_interval

        self._schedule(now, settings)
        return Questions(
            entry=entry,
            card=self._known,
            identify=self._known is None or (probe and now >= self._identify_at),
            probe=probe,
            read=read,
            count=not read and (not probe or self._utilization.due(now, pause, longest)),
        )

    def _schedule(self, now: float, settings: ProbeSettings) -> None:
        pause = settings.health_interval
        longest = settings.counter_interval

        self.due = self._probe_at
        if self.repeats:  # a thread probes, and the loop has all cards read at the same moment
            self.due = max(self._probe_at, math.ceil(self._read_at / pause) * pause)
        if self._utilization.wraps:
            every = min(pause, longest)
            count_at = math.floor((self._utilization.read_at + longest) / every) * every
            self.due = min(self.due, max(count_at, now + until_tick(every)))

    def answered(self, asked: Questions, answers: Answers, settings: ProbeSettings) -> None:
        """Applies answers; raises a fault of our own, for `crashed`."""
        if asked.entry != self.entry:
            return  # it moved in the meantime
        if answers.bug:
            raise answers.bug
        self.failures.update(answers.failures)
        if answers.limited:
            # Also at first: then nothing is known, and not that there is no card.
            self._limits.failed(answers.limited)
            return
        self._limits.works()
        now = time.monotonic()
        before = self._known

        if answers.card:
            self._identified(answers.card, asked.entry, now + settings.interval)
        elif before is None:
            self.view = View(skipped=answers.skipped)
            return
        if before is None:
            self._probe_at = self.due = 0.0  # probe what has just been identified
        elif asked.probe:
            self._judge(before, asked.entry, answers, settings, now)
        if answers.cores is not None:
            self._utilization.add(answers.cores, answers.at)
            self._schedule(now, settings)

    def missed(self, late: str, settings: ProbeSettings) -> None:
        """Counts overdue answers as a failed probe; `late` says so, for people."""
        if self.entry is None:
            return
        self.failures["hung"] += 1
        self.repeats = ()
        now = time.monotonic()
        self.due = now + until_tick(settings.health_interval)
        if self._known is None:
            # One late read is no fault here either: at first all wait for its identity.
            if self.failures["hung"] >= settings.policy.failures:
                self.view = View(skipped=_unread(self.entry, late))
            return
        verdict = Verdict(HealthState.UNHEALTHY, late, Cause.HANGS)
        self._step(verdict, settings, now)

    def crashed(self, error: Exception) -> None:
        """Begins again after a pause: until then the card is not offered, as nothing watches it."""
        if self.entry is None:
            return
        self._forget()
        self.view = View(skipped=_unread(self.entry, f"internal error: {error!r}"))
        self.due = self._probe_at = time.monotonic() + self._crashes.next()

    def _identified(self, card: Card, entry: Entry, again_at: float) -> None:
        before = self._known
        self._identity = card
        self._known, self._proposed = _agreed(before, self._proposed, card)
        if before is None or not before.same_as(self._known):
            self._health = None
            self._utilization = UtilizationTracker(wraps=entry.counters_wrap)
            self.view = replace(self.view, reading=None)
            self._read_at = 0.0
        self._identify_at = 0.0 if self._proposed else again_at

    def _judge(
        self, before: Card, entry: Entry, answers: Answers, settings: ProbeSettings, now: float
    ) -> None:
        card = self._known or before
        if answers.probe and not answers.probe.nodes <= card.nodes:  # udev was still at work
            card = self._known = replace(card, nodes=card.nodes | answers.probe.nodes)
        verdict = _verdict(card, answers)
        self._step(verdict, settings, now)
        if answers.reading and card.same_as(before):
            self._measure(answers.reading, settings)
        if not self._is_settled(verdict, answers, settings, now):
            self.repeats = ()
        elif not self.repeats or self.repeats[0].expected != answers.probe:
            self.repeats = self._questions_to_repeat(entry, answers.probe, settings)
        self._schedule(now, settings)

    def _is_settled(
        self, verdict: Verdict, answers: Answers, settings: ProbeSettings, now: float
    ) -> bool:
        """Whether the same answers again would change nothing, and count as no failure."""
        tracker = self._health
        return (
            tracker is not None
            and not answers.failures
            and self._proposed is None
            and settings.policy.max_temperature is None  # else each probe reads the temperature
            and health.step(tracker, verdict, settings.policy, now) == tracker
        )

    def _questions_to_repeat(
        self, entry: Entry, probe: Probe | None, settings: ProbeSettings
    ) -> tuple[Repeat[Any], ...]:
        """The probe first."""
        return (
            Repeat(
                ask=partial(_quietly, self.vendor.probe, entry),
                expected=probe,
                every=settings.health_interval,
                due=self._probe_at,
            ),
            Repeat(
                ask=partial(_quietly, self.vendor.identify, entry),
                expected=self._identity,
                every=settings.interval,
                due=self._identify_at,
            ),
        )

    def _measure(self, reading: Reading, settings: ProbeSettings) -> None:
        # Where heat is a reason, it is read as often as everything else.
        often = settings.policy.max_temperature is not None
        held = settings.telemetry_interval if often else 0.0
        cores = self._utilization.measured(reading.cores, reading.at, held=held)
        throttled = comparison.begun(self.view.reading, reading)
        reading = replace(reading, cores=cores, throttled=throttled)
        self.view = replace(self.view, reading=reading)
        tick = min(_TICK, settings.telemetry_interval)
        due = round((reading.at + settings.telemetry_interval) / tick) * tick
        # In time for the probe due then.
        self._read_at = reading.at if often else due - settings.health_interval / 2
        self._schedule(reading.at, settings)

    def _step(self, verdict: Verdict, settings: ProbeSettings, now: float) -> None:
        before = self._health
        reading = self.view.reading

        if before is None:
            self._health = health.begin(verdict, now)
        else:
            heat = reading.temperature() if reading else None
            verdict = health.with_heat(verdict, heat, before, settings.policy)
            self._health = health.step(before, verdict, settings.policy, now)
        self.view = View(self._known, self._health.health, reading)
        if before is None or before.health != self._health.health:
            self._read_at = 0.0  # readings and health should agree


def _verdict(card: Card, answers: Answers) -> Verdict:
    probe = answers.probe
    if probe is None:
        return Verdict(HealthState.UNHEALTHY, answers.trouble, Cause.NONSENSE)
    # Also those that it never had here: a restart of the agent makes no card whole.
    missing = sorted(card.nodes.union(card.access.required_nodes) - probe.nodes)
    if probe.alive is False:
        return Verdict(HealthState.UNHEALTHY, probe.reason, Cause.DEAD)
    if answers.skipped:
        return Verdict(HealthState.UNHEALTHY, answers.skipped.reason, Cause.NONSENSE)
    if missing:
        names = text.listed((f"/dev/{node}" for node in missing), 3)
        return Verdict(HealthState.UNHEALTHY, f"{names} missing", Cause.NODES)
    if probe.alive is None:
        return Verdict(HealthState.UNKNOWN, "the driver does not say")
    return Verdict(HealthState.HEALTHY, "works")


def _unread(entry: Entry, why: str) -> SkippedDevice:
    return SkippedDevice(entry.path, why, unread=True)


def _agreed(current: Card | None, proposed: Card | None, card: Card) -> tuple[Card, Card | None]:
    """Returns the card after another read, and what the next read must confirm.

    A change counts once two reads in a row agree on it. What could not be read this time stays as
    it was: half an answer is not another card, and an ID that changed would take the device from
    the Pod that holds it.
    """
    if current is None:
        return card, None
    if current.same_as(card):
        values = {field.name: getattr(card, field.name) for field in fields(Card)}
        kept = {k: getattr(current, k) for k, value in values.items() if value in (None, ())}
        # Nodes are followed by each probe.
        card = replace(card, **{**kept, "nodes": current.nodes})
    if card == current:
        return current, None
    return (card, None) if card == proposed else (current, card)
