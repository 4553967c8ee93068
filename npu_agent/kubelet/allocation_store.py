"""Reconciles the ledger with pod-resources, and writes it before devices are offered.

The device plugin and DRA both ask `AllocationStore` before they offer or hand out anything. What it
decides with is `npu_agent.core.ledger`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from npu_agent.core import plan
from npu_agent.core.claim import ClaimUse
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Card, CardState, Snapshot
from npu_agent.core.ledger import (
    HOLDER_ENDS,
    Allocation,
    DeviceName,
    Ledger,
    OrphanedPod,
    PreparedClaim,
    PublishedCard,
    Usage,
)
from npu_agent.core.offer import Device
from npu_agent.core.plan import Facts
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.podresources import Holdings, PodResources
from npu_agent.kubelet.record import RecordFile, encode, recover
from npu_agent.logs import logger

log = logger(__name__)

_ENDING = "this npu-agent is shutting down: the kubelet asks the next one"
_NOT_OURS = "this npu-agent does not own the node now: it takes over when it can"
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The names under which this agent hands out cores."""

    resources: Collection[str]
    drivers: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, and the clock. While an Allocate waits for `holder_ends`, no other Pod starts."""

    answer: float = 6.0
    """Longest wait for pod-resources: more than `podresources.DEADLINE`."""
    last_answer: float = 0.2
    holder_ends: float = HOLDER_ENDS
    """Longest wait of an Allocate for the previous Pod of a device."""
    holder_ends_every: float = 0.1
    restart: float = 30.0
    """After a restart of the kubelet, which may list fewer Pods than run until it knows its own."""
    clock: Callable[[], float] = time.monotonic
    """The one of `Holdings.asked_at`."""


class AllocationStore:
    """Reconciles, persists and changes the ledger for the two APIs that hand out cores.

    `states` has the ledger after each change, and `usages` who holds which cores, for people.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        pod_resources: PodResources,
        served: Served,
        directory: Path,
        ledger: Feed[Ledger],
        timing: Timing | None = None,
    ) -> None:
        """Writes nothing before `renew`; `ledger` has the record of an agent before this one."""
        self.states = ledger
        self.prepared: Feed[Mapping[str, PreparedClaim]] = ledger.map(lambda now: now.prepared)
        self.published: Feed[Mapping[str, PublishedCard]] = ledger.map(lambda now: now.published)
        self.asked: Feed[bool] = Feed(False)
        """Whether pod-resources was asked; it may not have answered."""
        self.usages: Feed[tuple[Usage, ...]] = Feed(())
        self.drivers_in_recovery: Feed[frozenset[str]] = Feed(frozenset())
        """Drivers of claims in use that no record has: until `recovery_done` their cores are
        unknown."""
        self.answers = pod_resources.holdings
        self._snapshots = snapshots
        self._pod_resources = pod_resources
        self._served = served
        self._timing = timing or Timing()
        self._clock = self._timing.clock
        self._record = RecordFile(directory, self._clock)
        self._recorded = Ledger()
        """As the disk has it, if this agent wrote it."""
        self._read = False
        self._applied: tuple[float, list[Card]] = 0.0, []
        """When the ledger's answer was requested, and the cards that it was compared with."""
        self._away = False
        self._owner = False
        self._closed = False
        self._needs_recovery = False
        """Whether the record that was found is still to be compared with what containers use: it
        may be an older one that was put back."""
        self._saving = asyncio.Lock()

    @property
    def owned(self) -> bool:
        """Whether the node is this agent's; only then is its record the one on disk."""
        return self._owner

    @property
    def why_not_owned(self) -> str:
        return _ENDING if self._closed else _NOT_OURS

    @property
    def needs_recovery(self) -> bool:
        """Whether claims may be in use that an earlier agent's record lacks."""
        return self._needs_recovery or self._ledger.unreadable is not None

    def recovery_done(self) -> None:
        self._needs_recovery = False
        self.update()

    def disowned(self) -> None:
        """Called when the node may be another agent's, and the record too."""
        self._owner = False
        self._pod_resources.ask()

    def claim_uses(self) -> tuple[ClaimUse, ...] | None:
        """Returns the containers that use claims; None if pod-resources does not answer."""
        answer = self.answers.value
        return None if answer.error or not answer.asked_at else answer.claim_uses

    async def containers_of(self, namespace: str, claim: str, deadline: float) -> list[set[str]]:
        """Returns the containers that name a claim, by Pod; empty without an answer in time."""
        pods: dict[str, set[str]] = {}
        for use in (await self._answer(deadline)).claim_uses:
            if (use.claim_namespace, use.claim_name) == (namespace, claim):
                pods.setdefault(use.pod, set()).add(use.container)
        return list(pods.values())

    async def run(self) -> None:
        async for _ in changes_of(self._snapshots, self._pod_resources.holdings):
            self.update()

    async def renew(self) -> None:
        """Called by each session and driver when the node is this agent's.

        Another agent may have served it in between: its record is read, unless it is still our own,
        and the kubelet is asked again.
        """
        async with self._saving:  # which would write over what is to be read
            if not self._owner:
                ours = self._record.on_disk
                found = await self._record.read()
                if not self._read or found not in (None, ours):
                    # What was prepared when this agent started may have been unprepared by the
                    # other one.
                    ledger = replace(self._ledger, prepared={})
                    self.states.publish(recover(ledger, found, self._clock()))
                    self._needs_recovery = True
                self._read = True
                self._owner = not self._closed
        await self._answer(self._timing.answer)
        self.update()

    def ask(self) -> None:
        self._pod_resources.ask()

    def facts(self, cordons: Mapping[str, str] = MappingProxyType({})) -> Facts:
        """What decisions are made from, true until the next await."""
        return Facts(
            snapshot=self._snapshots.value,
            ledger=self._ledger,
            cordons=cordons,
            recovering=self.drivers_in_recovery.value,
        )

    def update(self) -> None:
        """Reconciles the ledger with the latest answer of pod-resources."""
        cards = self._cards()
        answer, applicable = self.answers.value, (self.answers.value.asked_at, cards)
        self._away = self._away or answer.error is not None
        # No device ID means anything before the cards are known.
        ready = self._snapshots.value.complete and answer.asked_at and answer.error is None
        if ready and applicable != self._applied:
            self._applied = applicable
            if self._away:  # it may have been restarted
                self._away = False
                self.states.publish(
                    self._ledger.with_grace_period(self._clock() + self._timing.restart)
                )
            ending = self._ledger.orphans
            self.states.publish(
                self._ledger.with_answer(
                    answer.assignments,
                    answer.asked_at,
                    cards=cards,
                    resources=self._served.resources,
                    pods=answer.pods,
                    running=answer.running,
                )
            )
            self._log_ending(ending)
            if self._ledger.pending_release:
                self._pod_resources.ask_soon()
        self.drivers_in_recovery.publish(self._drivers_to_recover(answer.claim_uses))
        self.asked.publish(bool(answer.asked_at))
        self.usages.publish(self._ledger.usages(self._snapshots.value.cards, answer.claim_uses))

    def _drivers_to_recover(self, uses: Iterable[ClaimUse]) -> frozenset[str]:
        if not self._needs_recovery:
            return frozenset()
        ours = [use for use in uses if use.driver in self._served.drivers]
        return frozenset(use.driver for use in ours if not self._ledger.has_claim(use))

    def record_offer(self, devices: Mapping[str, Iterable[Device]]) -> None:
        if self._owner:
            self.states.publish(self._ledger.with_offer(devices, self._snapshots.value.cards))

    async def grant_when_free(self, resource: str, devices: Sequence[Device]) -> None:
        """Grants after the orphaned Pods that had the devices have ended: 10 s at most."""
        names = [DeviceName(resource, device.id) for device in devices]
        living = await self._read_notes(names)
        if self._ledger.has_pods_beyond(self._recorded):
            await self.save()  # the kubelet forgets now who has ended, and this agent may be killed
        self._mark_orphaned(living, self._holds(names))
        now = asyncio.get_running_loop().time
        until = now() + self._timing.holder_ends
        while self._orphans_have(devices) and now() < until:
            self._pod_resources.ask()
            await asyncio.sleep(self._timing.holder_ends_every)
            self.update()
        self.grant(resource, devices)

    async def _read_notes(self, names: Iterable[DeviceName] = ()) -> frozenset[str]:
        """Records who runs by the kubelet's notes, which tell also while pod-resources fails.

        Returns the UIDs of running Pods that no list has, and of those that had these devices.
        """
        pods = await self._pod_resources.pods.device_holders()
        self.states.publish(self._ledger.with_pods(pods))
        candidates = self._pod_resources.orphan_candidates(replace(self.answers.value, pods=pods))
        had = (hold.pod_uids for hold in self._holds(names))
        living = await self.running(candidates.union(*had))
        self.states.publish(
            self._ledger.with_notes(
                pods,
                living,
                self._clock(),
                cards=self._cards(),
                resources=self._served.resources,
            )
        )
        return living

    def _holds(self, names: Iterable[DeviceName]) -> list[Allocation]:
        allocations = self._ledger.allocations
        return [allocations[name] for name in names if name in allocations]

    def _orphans_have(self, devices: Iterable[Device]) -> bool:
        orphans = Ledger(orphans=self._ledger.orphans).conflicts(self._cards())
        return any(orphans.against(None, device) for device in devices)

    def _mark_orphaned(
        self, living: frozenset[str], holds: Iterable[Allocation], *, by_claim: bool = False
    ) -> None:
        """Records those of the living Pods whose devices the kubelet treats as free."""
        now, ledger = self._clock(), self._ledger
        for hold in holds:
            ledger = ledger.with_orphans(living & hold.pod_uids, hold, now, by_claim=by_claim)
        if ledger is not self._ledger:
            self._publish_with_orphans(ledger)

    async def running(self, uids: Collection[str]) -> frozenset[str]:
        return await self._pod_resources.pods.running(uids)

    def _publish_with_orphans(self, ledger: Ledger) -> None:
        before = self._ledger.orphans
        self.states.publish(ledger)
        self._log_ending(before)
        self._pod_resources.ask_soon()

    def _log_ending(self, before: Mapping[str, OrphanedPod]) -> None:
        now = self._ledger.orphans
        for uid in now.keys() - before.keys():
            log.warning(
                "cores withheld: containers of a deleted Pod are still running on them",
                holder=now[uid].by,
                uid=uid,
            )
        for uid in before.keys() - now.keys():
            log.info("cores released: these containers have ended, or are listed again", uid=uid)

    def grant(self, resource: str, devices: Sequence[Device]) -> None:
        """Records that a container is about to get these devices.

        Raises:
            RefusalError: another holder has cores or nodes of one of them, or the agent ends.
        """
        if self._closed:
            raise RefusalError(Refusal.UNFIT, self.why_not_owned)
        plan.check_grant(self.facts(), resource, devices)
        self.states.publish(self._ledger.with_grant(resource, devices, self._clock()))
        self._pod_resources.ask_soon()

    async def before_preparing(self, claim: PreparedClaim) -> None:
        """Records which Pods run on, without a claim or with what this one had before."""
        await self._read_notes()
        before = self._ledger.prepared.get(claim.uid)
        if before and before != claim:
            living = await self.running(before.pod_uids)
            ledger = self._ledger.before_replacing(claim, living, self._clock())
            if ledger is not self._ledger:
                self._publish_with_orphans(ledger)

    def prepare(self, claim: PreparedClaim, devices: Collection[Device]) -> None:
        """Records that a claim is prepared; to be `saved` before its Pods get anything.

        `devices` are those that are for the claim's Pods alone.

        Raises:
            RefusalError: another holder has cores or nodes of one of them.
        """
        if devices and not self._owner:
            raise RefusalError(Refusal.UNFIT, self.why_not_owned)
        plan.check_prepare(self.facts(), claim, devices)
        self.states.publish(self._ledger.with_claim(claim))

    async def mark_claim_orphans(self, uid: str) -> None:
        claim = self._ledger.prepared.get(uid)
        if claim and (hold := claim.allocation()):
            self._mark_orphaned(await self.running(hold.pod_uids), [hold], by_claim=True)

    def unprepare(self, uid: str) -> None:
        self.states.publish(self._ledger.without_claim(uid))

    def record_published(self, driver: str, cards: Iterable[CardState]) -> bool:
        """Records cards for slices, to be `saved` first; returns whether any is new."""
        return self.states.publish(self._ledger.with_published(driver, cards))

    def forget_published(self, ids: Collection[str]) -> None:
        self.states.publish(self._ledger.without_published(ids))

    def held_by(self, cards: Iterable[CardState]) -> dict[str, str]:
        """Returns the possible holders of these cards, by ID; free cards are left out."""
        return plan.holders(self.facts(), cards)

    def kubelet_lost(self) -> None:
        """Called when the kubelet dropped our devices: it may have restarted."""
        self._pod_resources.ask_soon()
        self.states.publish(self._ledger.with_grace_period(self._clock() + self._timing.restart))

    def close(self) -> None:
        """Ends all grants and writes from now on; takes no lock, which may wait for a disk."""
        self._owner, self._closed = False, True

    async def end(self) -> bool:
        """Removes the record if nothing is held; returns whether it did.

        A node whose agent was removed is as clean as before. Takes 0.2 s, and what the disk takes.
        """
        if not self._owner:
            return False
        now = self._clock()
        answer = await self._answer(self._timing.last_answer)
        async with self._saving:  # which would write it again
            self.close()
            holds, ours = self._ledger.allocations, self._served.resources
            # What is held may also have the name of a resource that is not served any more.
            held = any(one.name in holds or one.resource in ours for one in answer.assignments)
            starting = any(hold.kept_until > now for hold in holds.values())
            ledger = self._ledger
            unsure = answer.error or answer.asked_at < now or ledger.unreadable
            # The slices stay for the next agent, which has to know of them.
            kept = ledger.prepared or ledger.published or answer.running
            if held or starting or kept or unsure:
                return False
            await self._record.remove()
            return True

    async def save(self) -> None:
        async with self._saving:
            if self._owner:
                ledger = self._ledger
                await self._record.write(encode(ledger))
                if not self._record.error:
                    self._recorded = ledger

    async def saved(self) -> None:
        """Waits until the disk has the current state.

        Raises:
            OSError: it cannot be written, or the node is no longer this agent's.
        """
        self._record.try_now()
        await self.save()
        if not self._owner:
            raise OSError(self.why_not_owned)
        if self._record.error:
            raise OSError(self._record.error)

    @property
    def _ledger(self) -> Ledger:
        return self.states.value

    def _cards(self) -> list[Card]:
        return [state.card for state in self._snapshots.value.cards]

    async def _answer(self, deadline: float) -> Holdings:
        now, holdings = self._clock(), self._pod_resources.holdings
        self._pod_resources.ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await holdings.until(lambda answer: answer.asked_at >= now)
        return holdings.value
