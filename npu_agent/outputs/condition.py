"""The Node condition: what it is (`condition`), and since when (`ConditionWriter`).

Repair systems act on the status and on how long it has lasted; people read the message. So the
status changes for what takes work away from the node, and never for what one should only know.
They wait for a status to last, counted from lastTransitionTime. So that never moves while
the status stays, and a status is not written before it has lasted a moment: a restart of kubelet or
agent is not a fault, and a card that comes and goes is one throughout.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from npu_agent import files, typedjson
from npu_agent.backoff import Backoff, spread
from npu_agent.core.changes import trend_entry
from npu_agent.core.hardware import CardState
from npu_agent.core.kinds import Message, NamedCard
from npu_agent.core.problems import problems
from npu_agent.core.problems.cards import by_cause, named
from npu_agent.core.state import AgentState, ConditionState, is_fenced
from npu_agent.core.trends import TrendKind
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, ErrorKind, node
from npu_agent.kube.objects import Condition
from npu_agent.logs import Reporter, logger
from npu_agent.ticks import set_within, stamp
from npu_agent.wording import ENGLISH

log = logger(__name__)

SEEN = ".npu-agent.seen.json"
"""In the plugin directory: what a restart must not forget, a `_Seen`."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NO_CARDS = "NoCards"
_TOO_FEW = "TooFewCards"
_LONGEST = 1000
"""Characters of a message."""
_SERVICES = {"resource": "NotRegistered", "dra": "DRANotServed", "cdi": "CDINotWritten"}
"""By the subject of a problem that keeps Pods from getting their cards: its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """A condition of the Node, as the agent sees it now."""

    status: bool
    reason: str
    """In CamelCase: ``CardUnhealthy``."""
    message: str
    transient: bool = False
    """Whether it may be over in seconds: a restart of kubelet or agent looks the same."""


def usable(state: AgentState) -> int:
    """How many cards are healthy, or out of service because a person wants that."""
    return sum(_excused(card, state) or not is_fenced(card) for card in state.snapshot.cards)


def condition(state: AgentState, seen: int) -> NodeCondition | None:
    """The condition; None before the cards are known.

    `seen` is the most cards that were `usable` at a time since the Node booted.
    """
    if not state.snapshot.complete:
        return None
    healthy = usable(state)
    expected = state.expected_cards
    wanted = seen if expected is None else expected
    fenced = [*_fenced(state)]
    gone = [NamedCard.of(card.state) for card in state.missing] if healthy < wanted else []
    services = [
        problem for problem in problems(state) if problem.unready and problem.subject in _SERVICES
    ]
    degraded = [
        trend_entry(kind, state.trends.found[kind, card.id])
        for card in state.snapshot.cards
        for kind in TrendKind
        if (kind, card.id) in state.trends.found and not is_fenced(card)
    ]
    if expected is None and not wanted:
        reason = NO_CARDS
    elif healthy < wanted:
        reason = "CardUnhealthy" if fenced else "CardMissing" if gone else _TOO_FEW
    elif services:
        reason = _SERVICES[services[0].subject]
    else:
        reason = "NPUsDegraded" if fenced or degraded else "NPUsReady"
    counts = Message("CardsHealthy", facts={"healthy": healthy, "wanted": wanted})
    work = {"reason": state.maintenance}
    said: list[Message] = [
        Message("NoCardSeen") if reason == NO_CARDS else counts,
        *fenced,
        *([Message("CardsGone", tuple(gone))] if gone else []),
        *services,
        *([Message("TooFewCards", facts={"seen": seen})] if reason == _TOO_FEW else []),
        *degraded,
        *(
            Message("CardCordoned", named([card]), facts={"reason": state.cordons[card.id]})
            for card in state.snapshot.cards
            if card.id in state.cordons
        ),
        *([Message("UnderMaintenance", facts=work)] if state.maintenance else []),
    ]
    message = "; ".join(map(ENGLISH.text, said))
    return NodeCondition(
        status=reason in ("NPUsReady", "NPUsDegraded"),
        reason=reason,
        message=message if len(message) <= _LONGEST else message[: _LONGEST - 1] + "…",
        transient=reason in _SERVICES.values(),
    )


def _fenced(state: AgentState) -> Iterator[Message]:
    """Yields the cards out of service, each cause once, with their Pods."""
    fenced = (card for card in state.snapshot.cards if is_fenced(card))
    for cards in by_cause(card for card in fenced if not _excused(card, state)):
        pods = state.pods_of(cards)
        facts = {"why": cards[0].health, "held": bool(pods)}
        yield Message("CardsFenced", named(cards), pods, facts)


def _excused(card: CardState, state: AgentState) -> bool:
    """Whether a person has taken the card out of service: that is nothing to repair."""
    return state.is_disabled(card) or card.id in state.cordons


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionTiming:
    """Seconds."""

    settle: float = 1.0
    """Shortest fault that makes the condition False."""
    transient: float = 15.0
    """The same for faults that a restart of kubelet or agent causes too."""
    recovered: float = 20.0
    """Shortest time without faults before the condition is True again."""
    gap: float = 10.0
    """Pause between writes that only change reason or message."""
    heartbeat: float = 300.0
    """Pause between writes without a change, about."""
    longest_pause: float = 30.0
    """Pause between attempts."""


class _Seen(msgspec.Struct, frozen=True):
    boot: str
    cards: int
    """The most that were healthy at a time since the Node booted."""
    type: str = ""
    """The type of the condition that was written last, and not removed since."""


@dataclass(frozen=True, slots=True)
class _Live:
    """The live condition."""

    type: str
    """Empty: none is ours."""
    condition: Condition | None = None
    """None: there is none of this type."""
    at: float = 0.0
    """When it was read or written, by `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The state, and the feeds whose changes may change it."""

    state: Callable[[], AgentState]
    changes: tuple[Feed[Any], ...]


class ConditionWriter:
    """Keeps the condition of one Node; `state` has the result. At the end it stays."""

    def __init__(
        self,
        *,
        api: Api,
        node_name: str,
        observed: Observed,
        type_: Feed[str],
        directory: Path,
        timing: ConditionTiming = ConditionTiming(),
    ) -> None:
        """Starts nothing yet; an empty `type_` removes the condition."""
        self.state: Feed[ConditionState | None] = Feed(None)
        self._api = api
        self._node_name = node_name
        self._observed = observed
        self._type = type_
        self._file = directory / SEEN
        self._timing = timing
        self._seen = _Seen("", 0)
        self._judged: Feed[NodeCondition | None] = Feed(None)
        """None: not known yet, or not wanted."""
        self._target = type_.map_with(self._judged, lambda type_, judged: (type_, judged))
        self._since = -math.inf
        """The start of the wanted status, by `time.monotonic`."""
        self._fault = 0.0
        """When the first of the faults began between which all was not well for long."""
        self._writing = Reporter(
            log, "the Node's condition cannot be written", "the Node's condition can be written"
        )
        self._keeping = Reporter(log, "cannot note on disk how many cards were healthy")

    async def run(self) -> None:
        await self._recall()
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._follow())
            await self._keep()

    # --- what should be there -------------------------------------------------------------------

    async def _recall(self) -> None:
        """Reads what the agent before this one has noted."""
        try:
            boot = (await files.read(BOOT_ID, 100)).decode("ascii").strip()
            self._seen = _Seen(boot, 0)
            recalled = typedjson.decode(await files.read(self._file, 1000), _Seen)
        except (OSError, ValueError) as error:
            log.debug("the cards are counted from now on", reason=error)
            return
        self._seen = recalled if recalled.boot == boot else _Seen(boot, 0, recalled.type)

    async def _follow(self) -> None:
        async for _ in changes_of(*self._observed.changes, self._type):
            if not self._type.value:
                self._judged.publish(None)
                continue
            state = self._observed.state()
            if state.snapshot.complete and (cards := usable(state)) > self._seen.cards:
                await self._save(cards=cards)
            before = self._judged.value
            at = time.monotonic()

            now = condition(state, self._seen.cards)
            if now and (before is None or before.status != now.status):
                if not now.status and at - self._since > self._timing.recovered:
                    self._fault = at
                self._since = at
            self._judged.publish(now)

    async def _save(self, **seen: Any) -> None:
        self._seen = msgspec.structs.replace(self._seen, **seen)
        try:
            await files.replace(self._file, msgspec.json.encode(self._seen))
        except OSError as error:
            self._keeping.failed(f"{self._file}: {error.strerror or error}")

    # --- what is there --------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = Backoff(longest=self._timing.longest_pause)
        live: _Live | None = None
        """None: it has to be read."""
        while True:
            changed = self._target.changed
            type_, wanted = self._target.value
            try:
                if live is None or live.type != type_:
                    live = await self._find(type_)
                wait = self._wait(live, wanted)
                if wanted is None or wait is None or wait > 0:
                    self._works(live)
                    await set_within(changed, wait)
                    continue
                live = await self._write(live, wanted)
            except ApiError as error:
                live = None  # it may still have taken effect
                self._failed(type_, error)
                await asyncio.sleep(pause.next(error.retry_after))
            else:
                pause.reset()

    async def _find(self, wanted: str) -> _Live:
        """Reads the condition of this type, or removes the one that is not wanted any more."""
        if wanted:
            return _Live(wanted, await self._read(wanted), time.monotonic())
        if type_ := self._seen.type:  # it may be an earlier agent's
            if await self._read(type_):
                await self._remove(type_)
            await self._save(type="")
        return _Live("")

    async def _remove(self, type_: str) -> None:
        name = self._node_name
        try:
            await node.apply_conditions(self._api, name)
        except ApiError as error:
            if error.kind is not ErrorKind.FORBIDDEN:
                raise
            # The right is for the condition, and may have gone with it.
            patch = {"status": {"conditions": [{"type": type_, "$patch": "delete"}]}}
            raise ApiError(
                f"{type_} cannot be removed: {error.what}",
                f"remove it: `kubectl patch node {name} --subresource=status --type=strategic "
                f"-p '{json.dumps(patch)}'`",
                kind=error.kind,
            ) from error
        log.info("the Node's condition is removed", node=name)

    async def _read(self, type_: str) -> Condition | None:
        own = await node.read_whole(self._api, self._node_name, fresh=True)
        return next((row for row in own.status.conditions if row.type == type_), None)

    def _wait(self, live: _Live, wanted: NodeCondition | None) -> float | None:
        """The seconds until it has to be written; None: until something changes."""
        current = live.condition
        timing = self._timing
        now = time.monotonic()

        if not live.type or wanted is None:
            return None
        if current is None and wanted.reason == NO_CARDS:
            return None  # a node without NPUs: a False would have it repaired
        if current is None and wanted.status:
            return 0.0
        if current is None or (current.status == "True") != wanted.status:
            if wanted.status:
                return self._since + timing.recovered - now
            if wanted.transient:
                return self._since + timing.transient - now
            return self._fault + timing.settle - now
        changed = (current.reason, current.message) != (wanted.reason, wanted.message)
        beat = spread(timing.heartbeat)
        return live.at + (timing.gap if changed else beat) - now

    async def _write(self, live: _Live, wanted: NodeCondition) -> _Live:
        current = live.condition
        now = stamp()
        status = str(wanted.status)

        if current is None or current.status != status:
            current = await self._read(live.type)  # another agent may have written it
        since = current.last_transition_time if current and current.status == status else None
        written = Condition(
            type=live.type,
            status=status,
            reason=wanted.reason,
            message=wanted.message,
            last_heartbeat_time=now,
            last_transition_time=since or now,
        )
        if self._seen.type != written.type:
            await self._save(type=written.type)
        await node.apply_conditions(self._api, self._node_name, written)
        if not since:
            log.info(
                "the Node's condition changed",
                type=written.type,
                status=status,
                reason=written.reason,
                message=written.message,
            )
        return _Live(live.type, written, time.monotonic())

    def _works(self, live: _Live) -> None:
        self._writing.works()
        state = ConditionState(type=live.type) if live.type else None
        if current := live.condition:
            state = ConditionState(
                type=live.type,
                status=current.status == "True",
                reason=current.reason,
                message=current.message,
            )
        self.state.publish(state)

    def _failed(self, type_: str, error: ApiError) -> None:
        self._writing.failed(error)
        state = self.state.value or ConditionState(type=type_)
        self.state.publish(replace(state, error=str(error)))
