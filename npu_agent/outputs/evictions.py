"""Evicts the Pods of cards that have failed, as `npu_agent.core.evictions` judges.

Pods that name a ResourceClaim are the cluster's to evict: `Evictor.due` has the cards whose taint
is to be ``NoExecute`` (docs/health.md). The others, which no taint reaches, are evicted here, by
the agent as its own Node: the API server lets a Node evict its own Pods and no others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from npu_agent.backoff import Backoff
from npu_agent.core.evictions import Decision, DoomedPod, disturbance, judge, unseen_cards
from npu_agent.core.kinds import Message
from npu_agent.core.plan import Facts
from npu_agent.core.state import EvictedPod, EvictionState, WaitingPod
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.eviction import evict
from npu_agent.kube.objects import HolderPod
from npu_agent.kube.request import AS_NODE, Request
from npu_agent.kube.reviews import allowed
from npu_agent.logs import Reporter, logger
from npu_agent.outputs.condition import Observed
from npu_agent.supervise import background
from npu_agent.ticks import set_within

log = logger(__name__)

RIGHT = f"{AS_NODE}create", "pods/eviction"
"""The verb and the resource of the right to evict this Node's Pods."""
RESULTS = ("evicted", "refused", "left", "failed")
_KEPT = 40
"""Evictions in `EvictionState.evicted`."""


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """What the config asks for."""

    evict: bool
    after: float
    """Seconds for which a card has to have failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionInputs:
    """What is decided from."""

    observed: Observed
    facts: Callable[[], Facts | None]
    """None: the node is another agent's."""
    settings: Feed[EvictionSettings]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionTiming:
    """Seconds."""

    every: float = 20.0
    """Between two Pods: three a minute at most, so that a mistake can be stopped."""
    longest_pause: float = 60.0
    """Between two tries for one Pod."""
    look_again: float = 60.0
    """Between two looks whether a right that was missing is there."""


@dataclass(slots=True)
class _Progress:
    """How far the Evictor is with a doomed Pod."""

    pause: Backoff
    next_at: float = 0.0
    """When it is tried again, by `time.monotonic`."""
    why: Message | None = None
    """Why it is not evicted yet."""
    done: frozenset[str] = frozenset()
    """The UIDs for which nothing is left to do: the Pod was evicted, or is left alone."""


class Evictor:
    """Evicts Pods of one Node, one at a time; `state` has what became of them."""

    def __init__(
        self,
        *,
        api: Api,
        own_pod: str,
        inputs: EvictionInputs,
        due: Feed[frozenset[str]],
        timing: EvictionTiming = EvictionTiming(),
    ) -> None:
        """Does nothing yet.

        Args:
            api: the API server.
            own_pod: the agent's Pod, ``namespace/name``; empty: it runs in none, and may evict
                none.
            inputs: what is decided from.
            due: gets the IDs of the cards whose Pods are to end.
            timing: all times.
        """
        self.due = due
        self.state: Feed[EvictionState] = Feed(EvictionState())
        self._api = api
        self._own_pod = own_pod
        self._inputs = inputs
        self._settings = inputs.settings
        self._timing = timing
        self._now = asyncio.Event()
        self._progress: dict[str, _Progress] = {}
        """Of the Pods that are doomed, by name. Pods that share a claim have each other's UIDs."""
        self._unseen: dict[str, float] = {}
        """When each of the `unseen_cards` was noticed."""
        self._disturbed = False
        """Whether there was a `disturbance` at the last look."""
        self._calm_since = -math.inf
        self._results: dict[str, int] = {}
        self._next_at = 0.0
        """When the next Pod may be evicted."""
        self._right: str | None = None
        """Why no Pod can be evicted; empty: some can; None: not known."""
        self._right_at = -math.inf
        """When that was looked at last."""
        self._asking = Reporter(log, "cannot evict Pods of failed cards", "Pods can be evicted")

    async def run(self) -> None:
        async with background(self._follow()):
            while True:
                self._now.clear()
                await set_within(self._now, await self._step())

    async def _follow(self) -> None:
        async for _ in changes_of(*self._inputs.observed.changes, self._settings):
            self._now.set()

    async def _step(self) -> float | None:
        """Does what is to be done now; returns the seconds until there is more to do."""
        if not self._settings.value.evict:
            self._right = None
            self._right_at = -math.inf
            self._publish(Decision())
            return None
        # From 0 on: `increase` of Prometheus does not see a counter's first step.
        self._results = self._results or dict.fromkeys(RESULTS, 0)
        await self._look_at_right()
        decision = self._judged()
        self._forget(decision)
        doomed = self._next(decision)
        if doomed:
            await self._try(doomed)
            decision = self._judged()
        self._publish(decision)
        return self._wait(decision)

    def _judged(self) -> Decision:
        facts = self._inputs.facts()
        settings = self._settings.value
        if facts is None or not settings.evict:
            return Decision()
        state = self._inputs.observed.state()
        now = time.monotonic()
        self._unseen = {id_: self._unseen.get(id_, now) for id_ in unseen_cards(state)}
        was_disturbed = self._disturbed
        self._disturbed = disturbance(state) is not None
        if was_disturbed and not self._disturbed:
            self._calm_since = now
        return judge(state, facts, settings.after, self._unseen, self._calm_since)

    def _forget(self, decision: Decision) -> None:
        """Forgets the Pods that are doomed no more."""
        names = {doomed.name for doomed in decision.pods}
        self._progress = {name: of for name, of in self._progress.items() if name in names}

    def _next(self, decision: Decision) -> DoomedPod | None:
        now = time.monotonic()
        if decision.withheld or self._right or now < self._next_at:
            return None
        left = self._left(decision)
        return next((doomed for doomed, progress in left if progress.next_at <= now), None)

    def _left(self, decision: Decision) -> Iterator[tuple[DoomedPod, _Progress]]:
        """Yields the Pods for which there is something left to do."""
        for doomed in decision.pods:
            progress = self._progress_of(doomed)
            if not doomed.uids or not doomed.uids <= progress.done:
                yield doomed, progress

    def _progress_of(self, doomed: DoomedPod) -> _Progress:
        pause = Backoff(first=1.0, longest=self._timing.longest_pause, least=0.5)
        return self._progress.setdefault(doomed.name, _Progress(pause))

    def _wait(self, decision: Decision) -> float | None:
        times = [] if decision.next_at is None else [decision.next_at]
        if self._right:
            times.append(self._right_at + self._timing.look_again)
        elif not decision.withheld:
            left = self._left(decision)
            times += (max(self._next_at, progress.next_at) for _, progress in left)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _publish(self, decision: Decision) -> None:
        self.due.publish(decision.cards)
        waiting = (
            WaitingPod(doomed.name, doomed.failed.card, why)
            for doomed, progress in self._left(decision)
            if (why := decision.withheld or progress.why)
        )
        self.state.publish(
            replace(
                self.state.value,
                waiting=tuple(waiting),
                refusal=self._right or "",
                results=dict(self._results),
            )
        )

    # --- one Pod --------------------------------------------------------------------------------

    async def _try(self, doomed: DoomedPod) -> None:
        """Evicts a Pod, if it is one that holds the card and may be evicted."""
        if not doomed.uids:
            self._postpone(doomed, Message("EvictionInDoubt"))
            return
        try:
            pod = await self._read(doomed.name)
            if pod.uid not in doomed.uids:
                # Another Pod has this name by now; the kubelet's next answer says so, too.
                self._postpone(doomed, None)
            elif pod.metadata.deletion_timestamp or pod.status.phase in ("Succeeded", "Failed"):
                self._finish(doomed)
            elif doomed.by_taint and doomed.claims <= {*pod.named_claims}:
                # It tolerates the taint, or the cluster's controller comes to it in its own time.
                self._finish(doomed)
            elif pod.stays:
                self._leave(doomed, pod)
            elif self._is_doomed(doomed):  # time has passed, and its card may have recovered
                await evict(self._api, pod, as_node=True)
                self._evicted(doomed, pod)
        except ApiError as error:
            self._failed(doomed, error)
        else:
            self._asking.works()

    async def _read(self, name: str) -> HolderPod:
        namespace, _, pod = name.partition("/")
        request = Request("get", "Pod", HolderPod, namespace=namespace, name=pod, as_node=True)
        return await self._api.ask(request)

    def _is_doomed(self, doomed: DoomedPod) -> bool:
        decision = self._judged()
        return decision.withheld is None and doomed in decision.pods

    def _evicted(self, doomed: DoomedPod, pod: HolderPod) -> None:
        now = time.monotonic()
        seconds = round(now - doomed.failed.since)
        self._results["evicted"] += 1
        self._next_at = now + self._timing.every
        self._remember(doomed, EvictedPod(doomed.name, pod.uid, doomed.failed.card, seconds))
        log.warning(
            "evicted a Pod because its card has failed",
            pod=doomed.name,
            uid=pod.uid,
            card=doomed.failed.card.name,
            seconds=seconds,
        )

    def _leave(self, doomed: DoomedPod, pod: HolderPod) -> None:
        """Leaves a Pod that its owner would start again on this very Node."""
        self._results["left"] += 1
        card = doomed.failed.card
        daemon = pod.of_daemon_set
        left = EvictedPod(doomed.name, pod.uid, card, 0, left=True, of_daemon_set=daemon)
        self._remember(doomed, left)
        log.warning(
            "a Pod keeps a card that has failed: an eviction would bring it back",
            pod=doomed.name,
            card=card.name,
            reason=pod.stays,
        )

    def _remember(self, doomed: DoomedPod, evicted: EvictedPod) -> None:
        self._finish(doomed)
        state = self.state.value
        self.state.publish(replace(state, evicted=(*state.evicted, evicted)[-_KEPT:]))

    def _finish(self, doomed: DoomedPod) -> None:
        """Has the Pod left alone from now on, unless another one comes to have its name."""
        self._progress.pop(doomed.name, None)
        self._progress_of(doomed).done = doomed.uids

    def _failed(self, doomed: DoomedPod, error: ApiError) -> None:
        match error.kind:
            case ErrorKind.NOT_FOUND | ErrorKind.CONFLICT | ErrorKind.UNRELATED:
                # It is gone; until the kubelet's next answer another one may have its name.
                self._postpone(doomed, None)
            case ErrorKind.FORBIDDEN:
                self._results["failed"] += 1
                self._refused(str(error))
                # It may be a webhook's refusal of this Pod: the others come first.
                self._postpone(doomed, None)
            case ErrorKind.TOO_MANY if budget := error.causes.get("DisruptionBudget"):
                self._results["refused"] += 1
                why = Message("EvictionBudget", facts={"budget": budget})
                self._postpone(doomed, why, error.retry_after)
            case _:
                self._results["failed"] += 1
                self._asking.failed(error)
                why = Message("EvictionFailed", facts={"error": str(error)})
                self._postpone(doomed, why, error.retry_after)

    def _postpone(
        self, doomed: DoomedPod, why: Message | None, retry_after: float | None = None
    ) -> None:
        progress = self._progress_of(doomed)
        progress.next_at = time.monotonic() + progress.pause.next(retry_after)
        progress.why = why

    # --- the right to do it ---------------------------------------------------------------------

    async def _look_at_right(self) -> None:
        """Finds out whether Pods can be evicted, before the first one has to be."""
        now = time.monotonic()
        if self._right == "" or now < self._right_at + self._timing.look_again:
            return
        self._right_at = now
        try:
            await self._read(self._own_pod or "default/npu-agent")
            verb, resource = RIGHT
            namespace = self._own_pod.partition("/")[0]
            if not await allowed(self._api, verb, resource, namespace=namespace):
                self._refused(f"the account has no right to {verb} {resource}")
                return
        except ApiError as error:
            if error.kind is ErrorKind.FORBIDDEN:
                self._refused(str(error))
            # Else the API server is away, or its answer is no proof: the first Pod will show.
            return
        self._right = ""

    def _refused(self, reason: str) -> None:
        if self._right != reason:
            log.warning("Pods of failed cards cannot be evicted", reason=reason)
        self._right = reason
        self._right_at = time.monotonic()
