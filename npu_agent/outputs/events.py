"""Events on the Node: what `kubectl describe node` shows of cards that fail, recover, come or go.

Format: core/v1 Event. Those about a Node live in the namespace ``default``, as the kubelet's do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_agent.backoff import ApiBackoff
from npu_agent.core.changes import ChangeKind, card_changes
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, Kind
from npu_agent.kube import event as events
from npu_agent.kube import node as nodes
from npu_agent.logs import Reporter, logger

log = logger(__name__)

NAMESPACE = "default"
COMPONENT = "npu-agent"
_LONGEST = 1024
"""Characters of a message: the API server's limit."""
_KEPT_FOR = 600.0
"""Seconds in which the same Event again is counted and not created a second time. Also those that
one waits for an API server that does not answer; then it counts as lost."""
_MOST = 256
"""Events that wait, at most."""
_BURST, _EVERY = 25, 10.0
"""So many Events without a pause, and then one each so many seconds."""
_OF_ONE = (Kind.FORBIDDEN, Kind.CONFLICT, Kind.GARBAGE)
"""What may be wrong with one Event alone: a webhook refuses it, or repeats need a right that is
missing. The others go before it then."""
_now = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a card, to the config or to a DRA driver."""

    reason: str
    """``NPUUnhealthy``: one word, for programs."""
    message: str
    """For people. Two Events with the same words are one that repeats."""
    warning: bool


_CARD_EVENTS = {
    ChangeKind.REMOVED: ("NPURemoved", "{card} is gone", True),
    ChangeKind.ADDED: ("NPUAdded", "{card} is there: {title}", False),
    ChangeKind.UNHEALTHY: ("NPUUnhealthy", "{card} is unhealthy: {reason}", True),
    ChangeKind.RECOVERED: ("NPURecovered", "{card} can be used again: {reason}", False),
}
"""For each change of a card that is an Event: its reason, its message, and whether it warns."""


def card_events(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    """What happened to the cards from one Snapshot to the next."""
    for change in card_changes(before, after):
        if change.kind in _CARD_EVENTS:
            reason, message, warning = _CARD_EVENTS[change.kind]
            state = change.card
            message = message.format(
                card=_named(state), title=state.card.title, reason=state.health.reason
            )
            yield Event(reason=reason, message=message, warning=warning)


def config_events(before: ConfigState, after: ConfigState) -> Iterator[Event]:
    """What happened to the config file."""
    if after.error is not None and after.error != before.error:
        message = f"the config file is refused and the last good one stays: {after.error}"
        yield Event(reason="ConfigRejected", message=message, warning=True)


def driver_events(before: SessionStatus, after: SessionStatus) -> Iterator[Event]:
    """What happened to a DRA driver: that something keeps it from being served."""
    if after.phase is SessionPhase.BLOCKED and after.reason != before.reason:
        message = f"the DRA driver {after.resource} does not serve: {after.reason}"
        yield Event(reason="DRANotServed", message=message, warning=True)


def _named(state: CardState) -> str:
    """``npu0 (UUID, 0000:01:00.0)``: the number may change, the rest identifies the card."""
    known = dict.fromkeys(filter(None, (state.id, state.card.pci_bus_id)))
    known.pop(state.card.name, None)
    return f"{state.card.name} ({', '.join(known)})" if known else state.card.name


@dataclass(slots=True)
class _Record:
    """How often an Event has happened, as far as the API server has it and beyond that."""

    unsent: int = 0
    first: float = 0.0
    """When the first of the unsent ones happened, by `time.monotonic`: the wall clock may jump."""
    last: float = 0.0
    """When it happened last, sent or not."""
    name: str = ""
    """Its name at the API server; empty while there is none."""
    uid: str = ""
    """The Node that it is about there."""
    sent: int = 0
    refused: int = 0
    """How often in a row it could not be sent for what may be its own fault."""


class Events:
    """Reports to the API server. `results` counts ``sent``, ``repeated`` and ``lost``.

    What happens while the API server does not answer, or faster than the limit allows, waits, and
    what repeats meanwhile is counted: nothing grows, and nobody waits for it.
    """

    def __init__(
        self,
        *,
        api: Api,
        node_name: str | None,
        snapshots: Feed[Snapshot],
        configs: Feed[ConfigState],
        wanted: Feed[bool],
        drivers: Sequence[Feed[SessionStatus]] = (),
    ) -> None:
        """`wanted` is whether Events are sent; what happens while it is False is dropped."""
        self.results: Counter[str] = Counter()
        self.sending = Reporter(
            log, "events cannot be sent: trying again", "events can be sent again"
        )
        """Whether Events can be sent."""
        self._api = api
        self._node_name = node_name
        self._snapshots = snapshots
        self._configs = configs
        self._wanted = wanted
        self._drivers = tuple(drivers)
        self._records: dict[Event, _Record] = {}
        """The one that has waited for longest comes first."""
        self._sending: Event | None = None
        """The one that is under way."""
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Follows hardware, config and DRA drivers until cancelled."""
        if not self._node_name:
            await asyncio.Event().wait()  # the labeller reports that NODE_NAME is missing
            return
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._follow())
            await self._send_all(self._node_name)

    async def _follow(self) -> None:
        snapshot, config = Snapshot(), self._configs.value
        drivers = {
            feed: SessionStatus(resource=feed.value.resource, phase=SessionPhase.REGISTERING)
            for feed in self._drivers
        }
        async for _ in changes_of(self._snapshots, self._configs, *self._drivers):
            happened = [
                *card_events(snapshot, self._snapshots.value),
                *config_events(config, self._configs.value),
                *(one for feed in drivers for one in driver_events(drivers[feed], feed.value)),
            ]
            drivers = {
                # What is tried again and fails again is no news.
                feed: before if feed.value.phase is SessionPhase.REGISTERING else feed.value
                for feed, before in drivers.items()
            }
            snapshot, config = self._snapshots.value, self._configs.value
            for event in happened if self._wanted.value else ():
                self._add(event)

    def _add(self, event: Event) -> None:
        self._forget()
        now = _now()
        event = replace(event, message=_cut(event.message))
        record = self._records.get(event)
        if record is None or not record.unsent:
            if sum(each.unsent > 0 for each in self._records.values()) >= _MOST:
                self.results["lost"] += 1
                return
            record = self._records.pop(event, None) or _Record()
            record.first = now
            self._records[event] = record
        record.unsent += 1
        record.last = now
        self._more.set()

    def _forget(self) -> None:
        """Drops what is too old to be sent, or to be counted as a repetition.

        But what is under way: it may arrive.
        """
        now = _now()
        for event, record in list(self._records.items()):
            if now - record.last > _KEPT_FOR and event != self._sending:
                del self._records[event]
                if record.unsent:
                    self.results["lost"] += 1

    async def _send_all(self, node: str) -> None:
        pause = ApiBackoff()
        allowed, filled = float(_BURST), _now()
        works = False
        while True:
            self._more.clear()
            self._forget()
            waiting = {event: one for event, one in self._records.items() if one.unsent}
            if works and not any(one.refused for one in waiting.values()):
                self.sending.works()
            if not waiting:
                await self._more.wait()
                continue
            now = _now()
            allowed, filled = min(_BURST, allowed + (now - filled) / _EVERY), now
            if allowed < 1:
                await asyncio.sleep((1 - allowed) * _EVERY)
                continue
            # Of those that were refused as often as each other, the oldest.
            event, record = min(waiting.items(), key=lambda each: each[1].refused)
            try:
                await self._send(node, event, record)
            except ApiError as error:
                again = record.refused > 0 and error.kind in _OF_ONE
                if error.kind is Kind.REFUSED:  # it would be refused again
                    self.results["lost"] += 1
                    self._records.pop(event, None)
                elif error.kind in _OF_ONE:
                    record.refused += 1
                if not again:
                    works = False
                    self.sending.failed(error)
                await asyncio.sleep(pause.next(error.retry_after))
                continue
            allowed -= 1
            pause.reset()
            record.refused, works = 0, True

    async def _send(self, node: str, event: Event, record: _Record) -> None:
        """Sends what is unsent of one Event; more of it may happen meanwhile."""
        self._sending = event
        try:
            self.results[await self._put(node, event, record)] += 1
        finally:
            self._sending = None

    async def _put(self, node: str, event: Event, record: _Record) -> str:
        """Does it; returns what it was, for `results`."""
        unsent, result = record.unsent, "repeated"
        # A Node may be created again by its old name: whoever describes it sees what is about it,
        # and not what was about the one before.
        uid = (await nodes.read(self._api, node)).uid
        if record.uid != uid:
            record.name, record.uid, record.sent = "", uid, 0
        if record.name:
            patch = {"count": record.sent + unsent, "lastTimestamp": _stamp(record.last)}
            try:
                await events.patch(self._api, NAMESPACE, record.name, patch)
            except ApiError as error:
                if error.kind is not Kind.NOT_FOUND:
                    raise
                # It was deleted, or its hour was over: it is created again.
                record.name, record.sent = "", 0
        if not record.name:
            body = _as_object(event, replace(record, unsent=unsent), node, uid)
            record.name = await events.create(self._api, NAMESPACE, body)
            result = "sent"
        record.sent += unsent
        record.unsent -= unsent
        return result


def _as_object(event: Event, record: _Record, node: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # A Node's name may have 253 characters, and so may an Event's.
        "metadata": {"namespace": NAMESPACE, "name": f"{node[:230]}.{secrets.token_hex(8)}"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.warning else "Normal",
        "count": record.unsent,
        "firstTimestamp": _stamp(record.first),
        "lastTimestamp": _stamp(record.last),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node[:128],
    }


def _stamp(at: float) -> str:
    """By the wall clock as it goes now, as RFC 3339 in whole seconds: Kubernetes' `Time`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - (_now() - at)))


def _cut(message: str) -> str:
    return message if len(message) <= _LONGEST else message[: _LONGEST - 3] + "..."
