"""What happens on the node: the timeline, and the Events that `kubectl describe node` shows.

Start reading at `TimelineWriter`. Format: core/v1 Event. Those about a Node live in the namespace
``default``, as the kubelet's do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from npu_agent import __version__
from npu_agent.backoff import Backoff
from npu_agent.core import changes
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.kinds import Message, NamedCard
from npu_agent.core.ledger import Usage
from npu_agent.core.state import SessionPhase, SessionStatus
from npu_agent.core.timeline import ENTRIES, Timeline, TimelineEntry
from npu_agent.core.trends import TrendKind, Trends
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.logs import Reporter, logger
from npu_agent.ticks import stamp
from npu_agent.wording import ENGLISH

log = logger(__name__)

NAMESPACE = "default"
COMPONENT = "npu-agent"
_LONGEST = 1024
"""Characters of a message: the API server's limit."""
_SETTLE = 10.0
"""Seconds after the start without entries for Pods with a card: the kubelet's first
answer names Pods that held theirs before."""

Source = tuple[Feed[Any], Callable[[Any, Any], Iterable[TimelineEntry]]]
"""A feed, and what makes entries of two of its values."""


class TimelineWriter:
    """Writes what happens while it runs into `timeline`, and gives it to `Events`."""

    def __init__(
        self,
        hardware: Feed[Snapshot],
        trends: Feed[Trends],
        usages: Feed[tuple[Usage, ...]],
        sources: Sequence[Source],
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeline = Timeline()
        self._hardware = hardware
        self._trends = trends
        self._usages = usages
        self._sources = sources
        self._events = events
        self._clock = clock

    async def run(self) -> None:
        started = self._clock()
        first = TimelineEntry("AgentStarted", facts={"version": __version__}, subject="agent")
        self.timeline = self.timeline.with_entries([first], started)
        hardware = Snapshot()
        usages = self._usages.value
        values = {feed: feed.value for feed, _ in self._sources}
        async for _ in changes_of(self._hardware, self._usages, *values):
            now = self._clock()
            before = hardware
            used = usages
            hardware = self._hardware.value
            usages = self._usages.value

            cards = tuple(changes.card_changes(before, hardware))
            new = [*changes.card_entries(changes.without_flapping(cards, self._trends.value))]
            if now - started > _SETTLE:
                flapping = self._trends.value.of(TrendKind.FLAPPING)
                given = changes.usage_entries(used, usages, before, hardware)
                new += (entry for entry in given if entry.card and entry.card.id not in flapping)
            for feed, entries in self._sources:
                new += entries(values[feed], feed.value)
                if not _is_retry(values[feed], feed.value):
                    values[feed] = feed.value
            if new:
                self.timeline = self.timeline.with_entries(new, now)
                # A card that left has no usages any more.
                self._events.report(new, (*before.cards, *hardware.cards), {*used, *usages})
            if hardware is not before:
                kinds = (changes.ChangeKind.REMOVED, changes.ChangeKind.EXCHANGED)
                left = [change.before or change.card for change in cards if change.kind in kinds]
                self.timeline = self.timeline.left(left, hardware.cards, now)


def _is_retry(before: object, after: object) -> bool:
    """Whether it says nothing new: a retry that fails again is not written again."""
    return (
        isinstance(before, SessionStatus)
        and isinstance(after, SessionStatus)
        and (before.phase, after.phase) == (SessionPhase.BLOCKED, SessionPhase.REGISTERING)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLimits:
    """How many Events there may be; times in seconds."""

    burst: int = 25
    """Without a pause; then one each `every`."""
    every: float = 10.0
    kept_for: float = 600.0
    """In which the same Event again is counted and not created a second time. Also those that one
    waits for an API server that does not answer; then it counts as lost."""
    most: int = 256
    """That are kept; more are lost."""
    longest_pause: float = 60.0
    """Between two tries."""


class PodRef(NamedTuple):
    """A Pod of this Node."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An entry of the timeline, as an Event of the Node has it."""

    reason: str
    """``NPUUnhealthy``: one word, for programs."""
    message: str
    """For people. Two Events with the same words are one that repeats."""
    warning: bool
    pods: tuple[str, ...] = ()
    """Those that use the card, ``namespace/pod``."""
    about: PodRef | None = None
    """The Pod that it is about; None: the Node."""


def events(
    entries: Iterable[TimelineEntry],
    cards: Iterable[CardState] = (),
    usages: Collection[Usage] = (),
) -> Iterator[Event]:
    """Yields the Events among `entries`; warnings have the users of the card and the remedy.

    `cards` and `usages` are also those that have just left.
    """
    by_id = {state.id: state for state in cards}
    for entry in entries:
        traits = ENTRIES[entry.kind]
        if not traits.is_event:
            continue
        warning = entry.tone in ("bad", "warn")
        state = by_id.get(entry.card.id) if entry.card else None
        pods = _pods(state, usages) if state and warning and not entry.pods else ()
        named = replace(entry, cards=(NamedCard(state.id, _named(state)),)) if state else entry
        message = ENGLISH.text(named)
        if pods:
            message = ENGLISH.used(message, pods)
        if traits.problem:
            message += f": {ENGLISH.remedy(Message(traits.problem, cause=entry.cause))}"
        yield Event(reason=entry.kind, message=message, warning=warning, pods=pods)
        if entry.kind == "PodEvicted":
            namespace, _, pod = entry.pods[0].partition("/")
            ref = PodRef(namespace, pod, str(entry.facts["uid"]))
            reason = ENGLISH.text(Message("EvictedFrom", entry.cards, facts=entry.facts))
            yield Event(reason=entry.kind, message=reason, warning=True, about=ref)


def _pods(card: CardState, usages: Iterable[Usage]) -> tuple[str, ...]:
    names = {usage.assignment.pod_name for usage in usages if usage.card_id == card.id}
    return tuple(sorted(names))


def _named(state: CardState) -> str:
    """``npu0 (UUID, 0000:01:00.0)``: the number may change, the rest identifies the card."""
    aliases = dict.fromkeys(filter(None, (state.id, state.card.pci_bus_id)))
    aliases.pop(state.card.name, None)
    return f"{state.card.name} ({', '.join(aliases)})" if aliases else state.card.name


@dataclass(slots=True)
class _Queued:
    first: str
    last: str = ""
    at: float = 0.0
    count: int = 0
    sent: int = 0
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """The end of its name at the API server."""


class Events:
    """Reports to the API server. `results` counts ``sent``, ``repeated`` and ``lost``.

    What happens while the API server does not answer, or faster than the limits allow, waits, and
    what repeats meanwhile is counted: nothing grows, and no other part waits for it.
    """

    def __init__(
        self,
        *,
        api: Api,
        node_name: str,
        wanted: Feed[bool],
        limits: EventLimits = EventLimits(),
    ) -> None:
        """`wanted` is whether Events are sent; what happens while it is False is dropped."""
        self.results: Counter[str] = Counter()
        self.sending = Reporter(log, "cannot send Events; retrying", "Events can be sent again")
        self._api = api
        self._node_name = node_name
        self._wanted = wanted
        self._limits = limits
        self._queue: dict[Event, _Queued] = {}
        """The next to be sent comes first."""
        self._more = asyncio.Event()

    def report(
        self,
        entries: Iterable[TimelineEntry],
        cards: Iterable[CardState],
        usages: Collection[Usage],
    ) -> None:
        """Has the Events among `entries` sent; cards and usages as `events` has them."""
        for event in events(entries, cards, usages):
            if event.warning and event.pods:
                log.warning(
                    "Pods use a card that fails", event=event.reason, pods=", ".join(event.pods)
                )
            if self._wanted.value:
                self._add(event)

    def _add(self, event: Event) -> None:
        self._forget()
        queued = self._queue.get(event)
        if queued is None:
            if len(self._queue) >= self._limits.most:
                self.results["lost"] += 1
                return
            queued = self._queue[event] = _Queued(first=stamp())
        queued.count += 1
        queued.last = stamp()
        queued.at = time.monotonic()
        self._more.set()

    def _forget(self) -> None:
        oldest = time.monotonic() - self._limits.kept_for
        for event, queued in list(self._queue.items()):
            if queued.at < oldest:
                del self._queue[event]
                if queued.count > queued.sent:
                    self.results["lost"] += 1

    async def run(self) -> None:
        limits = self._limits
        pause = Backoff(longest=limits.longest_pause)
        allowed = float(limits.burst)
        filled = time.monotonic()
        works = False

        while True:
            self._more.clear()
            self._forget()
            unsent = (event for event, queued in self._queue.items() if queued.count > queued.sent)
            event = next(unsent, None)
            if event is None:
                if works:
                    self.sending.works()
                await self._more.wait()
                continue
            now = time.monotonic()
            allowed = min(limits.burst, allowed + (now - filled) / limits.every)
            filled = now

            if allowed < 1:
                await asyncio.sleep((1 - allowed) * limits.every)
                continue
            works = await self._send(event, self._queue[event], pause)
            allowed -= works

    async def _send(self, event: Event, queued: _Queued, pause: Backoff) -> bool:
        """Sends what there is of an Event; more of it may happen meanwhile."""
        count = queued.count
        try:
            await self._api.ask(_request(event, queued, self._node_name))
        except ApiError as error:
            self.sending.failed(error)
            if error.kind is ErrorKind.REFUSED:  # it would be refused again
                if self._queue.pop(event, None):
                    self.results["lost"] += 1
            elif event in self._queue:  # the others first: a webhook may refuse this one only
                self._queue[event] = self._queue.pop(event)
            await asyncio.sleep(pause.next(error.retry_after))
            return False
        self.results["repeated" if queued.sent else "sent"] += 1
        queued.sent = count
        pause.reset()
        return True


def _request(event: Event, queued: _Queued, node: str) -> Request[object]:
    """Creates the Event or counts it up, by server-side apply: once more changes nothing."""
    # A Node's name may have 253 characters, and so may an Event's. What is before a dot ends with
    # a letter or digit.
    about = event.about
    name = f"{(about.name if about else node)[:230].rstrip('.-')}.{queued.name}"
    namespace = about.namespace if about else NAMESPACE
    # The kubelet's Events have the Node's name as its UID too, and kubectl finds both.
    subject = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    if about:
        subject = {"apiVersion": "v1", "kind": "Pod", **about._asdict()}
    message = event.message
    if len(message) > _LONGEST:
        message = message[: _LONGEST - 3] + "..."
    return Request(
        verb="apply",
        kind="Event",
        namespace=namespace,
        name=name,
        answer=object,
        body={
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": namespace, "name": name},
            "involvedObject": subject,
            "reason": event.reason,
            "message": message,
            "type": "Warning" if event.warning else "Normal",
            "count": queued.count,
            "firstTimestamp": queued.first,
            "lastTimestamp": queued.last,
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT,
            "reportingInstance": node[:128],
        },
    )
