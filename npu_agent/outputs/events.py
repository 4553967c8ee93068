"""Events on the Node: what `kubectl describe node` shows of cards that fail, recover, come or go.

Format: core/v1 Event. Those about a Node live in the namespace ``default``, as the kubelet's do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.state import ConfigState
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, Kind
from npu_agent.kube import event as events
from npu_agent.kube import node as nodes
from npu_agent.logs import logger

log = logger(__name__)

NAMESPACE = "default"
COMPONENT = "npu-agent"
_LONGEST = 1024
"""Characters of a message: the API server's limit."""
_SAME_FOR = 600.0
"""Seconds in which the same Event again is counted and not created a second time."""
_KEPT_FOR = 600.0
"""Seconds that an Event waits for an API server that does not answer; then it counts as lost."""
_MOST = 256
"""Events that wait, at most."""
_BURST, _EVERY = 25, 10.0
"""So many Events without a pause, and then one each so many seconds."""
_RETRY_FIRST, _RETRY_LONGEST = 1.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a card or to the config."""

    reason: str
    """``NPUUnhealthy``: one word, for programs."""
    message: str
    """For people. Two Events with the same words are one that repeats."""
    warning: bool


def card_events(before: Snapshot, after: Snapshot) -> Iterator[Event]:
    """What happened to the cards from one Snapshot to the next.

    The first complete Snapshot adds no card, as they were there before; one that is unhealthy in it
    is an Event.
    """
    if not after.complete:
        return
    old = {state.id: state for state in before.cards}
    new = {state.id: state for state in after.cards}
    for id_, state in old.items():
        if id_ not in new:
            yield Event(reason="NPURemoved", message=f"{_named(state)} is gone", warning=True)
    for id_, state in new.items():
        previous = old.get(id_)
        if previous is None and before.complete:
            title = state.card.title
            yield Event(
                reason="NPUAdded", message=f"{_named(state)} is there: {title}", warning=False
            )
        was = previous.health.state if previous else HealthState.HEALTHY
        now = state.health.state
        if now is HealthState.UNHEALTHY and was is not HealthState.UNHEALTHY:
            message = f"{_named(state)} is unhealthy: {state.health.reason}"
            yield Event(reason="NPUUnhealthy", message=message, warning=True)
        elif was is HealthState.UNHEALTHY and now is not HealthState.UNHEALTHY:
            message = f"{_named(state)} can be used again: {state.health.reason}"
            yield Event(reason="NPURecovered", message=message, warning=False)


def config_events(before: ConfigState, after: ConfigState) -> Iterator[Event]:
    """What happened to the config file."""
    if after.error is not None and after.error != before.error:
        message = f"the config file is refused and the last good one stays: {after.error}"
        yield Event(reason="ConfigRejected", message=message, warning=True)


def _named(state: CardState) -> str:
    """``npu0 (UUID, 0000:01:00.0)``: the number may change, the rest identifies the card."""
    known = dict.fromkeys(filter(None, (state.id, state.card.pci_bus_id)))
    known.pop(state.card.name, None)
    return f"{state.card.name} ({', '.join(known)})" if known else state.card.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An Event to be sent: how often it has happened since it was sent last, and when."""

    count: int
    first: float
    last: float


@dataclass(slots=True, kw_only=True)
class _Sent:
    """An Event that the API server has."""

    name: str
    count: int
    last: float


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
    ) -> None:
        """`wanted` is whether Events are sent; what happens while it is False is dropped."""
        self.results: Counter[str] = Counter()
        self.error: str | None = None
        """Why Events cannot be sent; None while nothing is wrong."""
        self._api = api
        self._node_name = node_name
        self._snapshots = snapshots
        self._configs = configs
        self._wanted = wanted
        self._waiting: dict[Event, _Waiting] = {}
        self._sent: dict[Event, _Sent] = {}
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Follows hardware and config until cancelled."""
        if not self._node_name:
            await asyncio.Event().wait()  # the labeller reports that NODE_NAME is missing
            return
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._follow())
            await self._send_all(self._node_name)

    async def _follow(self) -> None:
        snapshot, config = Snapshot(), self._configs.value
        async for _ in changes_of(self._snapshots, self._configs):
            happened = [
                *card_events(snapshot, self._snapshots.value),
                *config_events(config, self._configs.value),
            ]
            snapshot, config = self._snapshots.value, self._configs.value
            for event in happened if self._wanted.value else ():
                self._add(event, time.time())

    def _add(self, event: Event, now: float) -> None:
        event = replace(event, message=_cut(event.message))
        before = self._waiting.get(event)
        if before is None and len(self._waiting) >= _MOST:
            self.results["lost"] += 1
            return
        self._waiting[event] = _Waiting(
            count=before.count + 1 if before else 1, first=before.first if before else now, last=now
        )
        self._more.set()

    async def _send_all(self, node: str) -> None:
        pause = Backoff(first=_RETRY_FIRST, longest=_RETRY_LONGEST)
        allowed, filled = float(_BURST), time.monotonic()
        while True:
            self._more.clear()
            while self._waiting:
                self._forget(time.time())
                now = time.monotonic()
                allowed, filled = min(_BURST, allowed + (now - filled) / _EVERY), now
                if allowed < 1:
                    await asyncio.sleep((1 - allowed) * _EVERY)
                    continue
                event = next(iter(self._waiting), None)
                if event is None:
                    break
                waiting = self._waiting.pop(event)
                try:
                    await self._send(node, event, waiting)
                except ApiError as error:
                    if error.kind is Kind.REFUSED:
                        self.results["lost"] += 1  # it would be refused again
                    else:
                        self._put_back(event, waiting)
                    self._trouble(error)
                    await asyncio.sleep(max(pause.next(), error.retry_after or 0.0))
                    continue
                allowed -= 1
                pause.reset()
                if self.error:
                    self.error = None
                    log.info("events can be sent again")
            await self._more.wait()

    def _put_back(self, event: Event, waiting: _Waiting) -> None:
        """It was not sent: it goes back to the head, with what happened meanwhile."""
        since = self._waiting.pop(event, None)
        if since:
            waiting = replace(waiting, count=waiting.count + since.count, last=since.last)
        self._waiting = {event: waiting, **self._waiting}

    def _forget(self, now: float) -> None:
        """Drops what is too old to be sent, or to be counted as a repetition."""
        for event, waiting in list(self._waiting.items()):
            if now - waiting.last > _KEPT_FOR:
                del self._waiting[event]
                self.results["lost"] += 1
        for event, sent in list(self._sent.items()):
            if now - sent.last > _SAME_FOR:
                del self._sent[event]

    def _trouble(self, error: ApiError) -> None:
        if str(error) != self.error:
            self.error = str(error)
            log.warning("events cannot be sent: trying again", reason=error)

    async def _send(self, node: str, event: Event, waiting: _Waiting) -> None:
        sent = self._sent.get(event)
        if sent:
            sent = replace(sent, count=sent.count + waiting.count, last=waiting.last)
            patch = {"count": sent.count, "lastTimestamp": _stamp(sent.last)}
            try:
                await events.patch(self._api, NAMESPACE, sent.name, patch)
            except ApiError as error:
                if error.kind is not Kind.NOT_FOUND:
                    raise
                del self._sent[event]  # it was deleted, or its hour was over: it is created again
            else:
                self._sent[event] = sent
                self.results["repeated"] += 1
                return
        uid = (await nodes.read(self._api, node)).uid  # a Node may be created again by its old name
        name = await events.create(self._api, NAMESPACE, _as_object(event, waiting, node, uid))
        self._sent[event] = _Sent(name=name, count=waiting.count, last=waiting.last)
        self.results["sent"] += 1


def _as_object(event: Event, waiting: _Waiting, node: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # A Node's name may have 253 characters, and so may an Event's.
        "metadata": {"namespace": NAMESPACE, "name": f"{node[:230]}.{secrets.token_hex(8)}"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.warning else "Normal",
        "count": waiting.count,
        "firstTimestamp": _stamp(waiting.first),
        "lastTimestamp": _stamp(waiting.last),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node[:128],
    }


def _stamp(seconds: float) -> str:
    """Wall clock as RFC 3339 in whole seconds: Kubernetes' `Time`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _cut(message: str) -> str:
    return message if len(message) <= _LONGEST else message[: _LONGEST - 3] + "..."
