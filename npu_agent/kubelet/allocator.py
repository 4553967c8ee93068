"""The Allocator: the only writer of the ledger, for both APIs that hand out cores.

Start reading at `Allocator.replan`: after any change it plans what each API lists
(`npu_agent.core.plan`), records that on disk, and publishes it. `grant`, `prepare` and `unprepare`
are what the kubelet asks for. Between a decision and the ledger's change is no await.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from npu_agent.core import plan
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Card, Snapshot
from npu_agent.core.ledger import (
    HOLDER_ENDS,
    Allocation,
    Assignment,
    DeviceName,
    Ledger,
    PreparedClaim,
    PublishedCard,
    Usage,
)
from npu_agent.core.offer import Device
from npu_agent.core.plan import DraWishes, Facts, PluginWishes
from npu_agent.core.pool import DraSpec, PoolDevice, pool
from npu_agent.core.state import SlicesState
from npu_agent.core.trends import TrendKind
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.cdi import PluginSpecs
from npu_agent.kubelet.cordons import CordonStore
from npu_agent.kubelet.podresources import Holdings, PodResources
from npu_agent.kubelet.record import RecordFile, encode, recover
from npu_agent.logs import logger
from npu_agent.supervise import background

log = logger(__name__)

_ENDING = "this npu-agent is shutting down: the kubelet asks the next one"
_NOT_OURS = "this npu-agent does not own the node now: it takes over when it can"
_ANSWERED = 0.05
"""Seconds from a change to the plan for it. A Pod waits for the answer of a Prepare, which changes
the ledger: 2 ms of planning on the event loop would delay it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorTiming:
    """Seconds, and the clock. While an Allocate waits, no other Pod of the node starts."""

    grant: float = 30.0
    """Longest that an Allocate takes, whatever it waits for."""
    owned: float = 20.0
    """Longest wait of an Allocate for the node to be ours. The agent before us may take 16 to end
    (`Ownership.hand_over`, then calls under way)."""
    answer: float = 6.0
    """Longest wait for pod-resources: more than `podresources.DEADLINE`."""
    last_answer: float = 0.2
    end: float = 0.3
    """For the end, of which `last_answer` is a part."""
    holder_ends: float = HOLDER_ENDS
    """Longest wait of an Allocate for the previous Pod of a device."""
    holder_ends_every: float = 0.1
    restart: float = 30.0
    """After a restart of the kubelet, which may list fewer Pods than run until it knows its own."""
    clock: Callable[[], float] = time.monotonic
    """The one of `Holdings.asked_at`."""


class ClaimPool:
    """The devices of one DRA driver, as the Allocator publishes them."""

    def __init__(
        self,
        dra: DraSpec,
        families: Collection[str],
        wishes: Feed[DraWishes],
        snapshots: Feed[Snapshot],
    ) -> None:
        """`families` are all of the vendor's: a claim can hold a card that is not offered."""

        def all_devices(snapshot: Snapshot, wishes: DraWishes) -> tuple[PoolDevice, ...] | None:
            if not snapshot.complete:
                return None
            # A claim can hold a part of a card that is offered whole now.
            by_index = wishes.by_index
            return pool(snapshot, dra=dra, families=families, by_index=by_index, partitions=True)

        self.dra = dra
        self.families = families
        self.wishes = wishes
        self.known = snapshots.map_with(wishes, all_devices)
        """All devices, offered or not; None while the cards are unknown."""
        self.by_name: Feed[Mapping[str, Device]] = self.known.map(
            lambda devices: {listed.name: listed.device for listed in devices or ()}
        )
        """The same, by their names in the pool."""
        self.offered: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """What is to be in the slices; None: not known yet."""
        self.slices: Feed[SlicesState] = Feed(SlicesState())
        """What the API server has, and can express."""
        self.confirmed: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """The devices that it has confirmed, and no others; None: not known."""
        self.unwritten: Feed[str] = Feed("")
        """Why the record could not be written with all cards; "": it was."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanInputs:
    """What the Allocator plans from, and follows."""

    snapshots: Feed[Snapshot]
    wishes: Feed[PluginWishes]
    """Of the device plugin; the names of its resources do not change."""
    pool: ClaimPool
    cordons: CordonStore
    degraded: Feed[Mapping[str, frozenset[TrendKind]]] = field(default_factory=lambda: Feed({}))
    """Remarks on working cards, by ID."""


class _Plan(NamedTuple):
    """What is written to disk before it is published."""

    lists: Mapping[str, tuple[Device, ...]]
    """By resource."""
    held: set[str] | None
    """IDs of devices that containers hold; None: unknown."""
    published: Mapping[str, PublishedCard]


class Allocator:
    """Plans, records and publishes what is handed out, and hands it out.

    `states` has the ledger after each change, and `usages` who holds which cores, for people.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        *,
        pod_resources: PodResources,
        specs: PluginSpecs,
        directory: Path,
        timing: AllocatorTiming | None = None,
    ) -> None:
        """Writes and publishes nothing before `run` or `renew`.

        Args:
            inputs: what is decided from, in addition to the ledger.
            pod_resources: the kubelet's answers; its ledger has the record of an agent before this
                one.
            specs: CDI specs, written before the devices in them are offered.
            directory: where the record is.
            timing: all times.
        """
        ledger = pod_resources.ledger
        self.devices: Mapping[str, Feed[tuple[Device, ...]]] = {
            resource.name: Feed(()) for resource in inputs.wishes.value.resources
        }
        """What the device plugin lists, by resource."""
        self.asked: Feed[bool] = Feed(False)
        """Whether pod-resources was asked; it may not have answered."""
        self.pool = inputs.pool
        self.states = ledger
        self.prepared: Feed[Mapping[str, PreparedClaim]] = ledger.map(lambda now: now.prepared)
        self.published: Feed[Mapping[str, PublishedCard]] = ledger.map(lambda now: now.published)
        self.usages: Feed[tuple[Usage, ...]] = Feed(())
        self.drivers_in_recovery: Feed[frozenset[str]] = Feed(frozenset())
        """Drivers of claims in use that no record has: until `recovery_done` their cores are
        unknown."""
        self.pod_resources = pod_resources
        self._snapshots = inputs.snapshots
        self.wishes = inputs.wishes
        self.cordons = inputs.cordons
        self.degraded = inputs.degraded
        self.evicting: Feed[frozenset[str]] = Feed(frozenset())
        """The unhealthy cards whose Pods are to end now, by ID; the `Evictor` publishes them."""
        self.specs = specs
        self._timing = timing or AllocatorTiming()
        self._clock = self._timing.clock
        self._record = RecordFile(directory)
        self._recorded = ledger.value.for_successor()
        """What the disk surely has."""
        self._read = False
        self._applied: tuple[float, list[Card]] = 0.0, []
        """When the ledger's answer was requested, and the cards that it was compared with."""
        self._planned: tuple[
            Facts | None, PluginWishes | None, Mapping[str, tuple[Device, ...]]
        ] = (None, None, {})
        """The lists that were planned last, and what from."""
        self._away = False
        self.owned = False
        """Whether the node is this agent's; only then is its record the one on disk."""
        self._closed = False
        self._taking_over = False
        """Whether `renew` has begun, and has not come to its end since."""
        self._ready: Feed[bool] = Feed(False)
        """Whether the node is this agent's and earlier grants are known."""
        self._needs_recovery = False
        """Whether the record that was found is still to be compared with what containers use: it
        may be an older one that was put back."""
        self._saving = asyncio.Lock()
        self._replanning = asyncio.Lock()

    # --- the node's owner -----------------------------------------------------------------------

    @property
    def why_not_owned(self) -> str:
        return _ENDING if self._closed else _NOT_OURS

    async def renew(self) -> None:
        """Called by each session and driver when the node is this agent's, before it offers.

        Another agent may have served it in between: its record is read, unless it is still our own,
        and the kubelet is asked again.
        """
        self._taking_over = True
        async with self._saving:  # which would write over what is to be read
            if not self.owned:
                ours = self._record.on_disk
                record = await self._record.read()
                if not self._read or record not in (None, ours):
                    # What was prepared when this agent started may have been unprepared by the
                    # other one.
                    ledger = replace(self._ledger, prepared={})
                    self.states.publish(recover(ledger, record, self._clock()))
                    self._needs_recovery = True
                self._recorded = recover(Ledger(), record, self._clock()).for_successor()
                self._read = True
                self.owned = not self._closed
        await self._answer(self._timing.answer)
        await self.replan()
        self._taking_over = False
        self._ready.publish(self.owned)

    def disowned(self) -> None:
        """Called when the node may be another agent's, and the record too."""
        self.owned = False
        self._ready.publish(False)
        self.pod_resources.ask()

    def kubelet_lost(self) -> None:
        """Called when the kubelet dropped our devices: it may have restarted."""
        self.pod_resources.ask_soon()
        self.states.publish(self._ledger.with_grace_period(self._clock() + self._timing.restart))

    def close(self) -> None:
        """Ends all grants and writes from now on; takes no lock, which may wait for a disk."""
        self.owned = False
        self._closed = True

    async def end(self) -> None:
        """Removes record and CDI specs if nothing is held; the next agent may.

        A node whose agent was removed is as clean as before. Takes 0.3 s at most.
        """
        try:
            async with asyncio.timeout(self._timing.end), self._replanning:
                await self.specs.end(remove=await self._remove_record())
        except TimeoutError:
            log.warning("skipping cleanup: the file system did not respond in time")
        finally:
            self.close()

    async def _remove_record(self) -> bool:
        """Removes the record if nothing is held; returns whether it did."""
        if not self.owned:
            return False
        now = self._clock()
        answer = await self._answer(self._timing.last_answer)
        async with self._saving:  # which would write it again
            self.close()
            ledger = self._ledger
            # What is held may also have the name of a resource that is not served any more.
            held = any(
                assignment.name in ledger.allocations or assignment.resource in self.devices
                for assignment in answer.assignments
            )
            starting = any(hold.kept_until > now for hold in ledger.allocations.values())
            unsure = answer.error or answer.asked_at < now or ledger.unreadable
            # The slices stay for the next agent, which has to know of them.
            kept = ledger.prepared or ledger.published or ledger.orphans or answer.cgroups
            if held or starting or kept or unsure:
                return False
            await self._record.remove()
            return True

    # --- plan, record, publish ------------------------------------------------------------------

    async def run(self) -> None:
        """Plans after each change, and after each answer of the kubelet: files are tried again."""
        async with background(self._withhold_first(), self._log_orphans()):
            async for _ in changes_of(*self._planned_from(), self.prepared):
                await asyncio.sleep(_ANSWERED)
                await self.replan()

    async def _withhold_first(self) -> None:
        """Publishes what gets worse before a disk is waited for, which may hang.

        It keeps the ledger and `usages` up to date meanwhile, too. A claim that is prepared makes
        nothing worse before it is on the disk: Allocate and other claims are compared with the
        ledger itself.
        """
        async for _ in changes_of(*self._planned_from()):
            self.withhold()

    def _planned_from(self) -> tuple[Feed[Any], ...]:
        return (
            *(self._snapshots, self.wishes, self.cordons.cards, self.degraded, self.evicting),
            *(self.pod_resources.holdings, self.drivers_in_recovery),
            self.published,
            *(self.pool.wishes, self.pool.slices, self.pool.confirmed),
        )

    async def _log_orphans(self) -> None:
        logged: frozenset[str] = frozenset()
        async for ledger in self.states.watch():
            for uid in ledger.orphans.keys() - logged:
                log.warning(
                    "cores withheld: containers of a deleted Pod are still running on them",
                    holder=ledger.orphans[uid].by,
                    uid=uid,
                )
            logged = frozenset(ledger.orphans)

    async def replan(self) -> None:
        """Plans what each API lists, records it, and publishes it."""
        async with self._replanning:
            planned = self._plan()
            while planned is not None:
                await self._save()
                await self.specs.write(
                    [device for devices in planned.lists.values() for device in devices],
                    planned.held,
                    owned=self.owned,
                    cards=bool(self._snapshots.value.cards),
                )
                # A grant, or other cards, may come while a file is written: then all is planned
                # again. Each answer of the kubelet changes the ledger, and most of them none of it.
                written = planned
                planned = self._plan()
                if planned == written:
                    self._publish(written.lists)
                    break

    def withhold(self) -> None:
        """Publishes what gets worse: it needs no disk, as the record may have more than is offered.

        What gets better is published by `replan`, when it is on the disk.
        """
        self.reconcile()
        if not self._can_plan:
            return
        for name, devices in self._device_lists().items():
            self.devices[name].publish(plan.withheld(self.devices[name].value, devices))
        if self.pool.offered.value is not None and self._is_pool_planned:
            self._publish_pool()  # which leaves out what is not on the disk

    def _device_lists(self) -> Mapping[str, tuple[Device, ...]]:
        """Plans what the device plugin lists, once for the same facts: 512 cores take 14 ms."""
        facts = self.facts()
        wishes = self.wishes.value
        if self._planned[:2] != (facts, wishes):
            self._planned = facts, wishes, plan.device_lists(facts, wishes)
        return self._planned[2]

    @property
    def _can_plan(self) -> bool:
        """Whether cards and holders are known.

        Never is an empty list, or a list of doubts, offered before the real one.
        """
        return self._snapshots.value.complete and self.asked.value

    def _plan(self) -> _Plan | None:
        """Returns what is to be recorded; None: nothing should be offered yet."""
        self.reconcile()
        snapshot = self._snapshots.value
        if not self._can_plan:
            return None
        driver = self.pool.dra.driver
        wishes = self.pool.wishes.value
        confirmed = self.pool.confirmed.value
        if self._is_pool_planned:
            cards = plan.cards_for_claims(snapshot, wishes)
            self.states.publish(self._ledger.with_published(driver, cards))
        if confirmed is not None and confirmed == self.pool.offered.value:
            left = plan.withdrawn(self.facts(), wishes, driver, confirmed)
            self.states.publish(self._ledger.without_published(left))
        lists = self._device_lists()
        if self.owned:
            self.states.publish(self._ledger.with_offer(lists, snapshot.cards))
        known = self.pod_resources.holdings.value.error is None
        held = {name.device for name in self._ledger.allocations} if known else None
        return _Plan(lists, held, self._ledger.published)

    def _publish(self, lists: Mapping[str, tuple[Device, ...]]) -> None:
        """Publishes, without an await since the last use of the ledger."""
        self.specs.published()
        for name, devices in lists.items():
            self.devices[name].publish(
                plan.without_specs(devices, self.specs.unwritten, self.specs.error)
            )
        if self._is_pool_planned:
            self._publish_pool()

    @property
    def _is_pool_planned(self) -> bool:
        wishes = self.pool.wishes.value
        return wishes.decided and plan.is_needed(self.facts(), wishes, self.pool.dra.driver)

    def _publish_pool(self) -> None:
        """Publishes what claims can get; cards that are not on disk yet stay out."""
        claims = self.pool
        recorded = self._recorded.published
        unwritten = plan.unwritten(self._ledger, claims.dra.driver, recorded)
        reason = self._record.error or ""
        if unwritten and not self.owned:
            return  # the record is another agent's
        claims.unwritten.publish(reason if unwritten else "")
        devices = plan.claim_pool(
            self.facts(),
            claims.wishes.value,
            claims.dra,
            claims.families,
            unwritten=unwritten,
            slices=claims.slices.value,
        )
        if devices or not unwritten or claims.offered.value is not None:
            claims.offered.publish(devices)

    def withdrawn(self, driver: str) -> None:
        """Called when a driver's slices were deleted."""
        left = plan.published_by(self._ledger, driver)
        self.states.publish(self._ledger.without_published(left))

    async def _save(self) -> None:
        async with self._saving:
            if self.owned:
                ledger = self._ledger
                record = ledger.for_successor()
                # Until the write has come to its end, or if it fails or is cancelled, the disk may
                # have either: only what both have is surely there.
                self._recorded = self._recorded.in_both(record)
                await self._record.write(encode(ledger))
                if not self._record.error:
                    self._recorded = record

    async def saved(self) -> None:
        """Waits until the disk has the current state.

        Raises:
            OSError: it cannot be written, or the node is no longer this agent's.
        """
        await self._save()
        if not self.owned:
            raise OSError(self.why_not_owned)
        if self._record.error:
            raise OSError(self._record.error)

    # --- what the kubelet asks for --------------------------------------------------------------

    def facts(self) -> Facts:
        """What decisions are made from, true until the next await."""
        return Facts(
            snapshot=self._snapshots.value,
            ledger=self._ledger,
            cordons=self.cordons.cards.value,
            recovering=self.drivers_in_recovery.value,
            degraded=self.degraded.value,
            evicting=self.evicting.value,
        )

    async def grant(self, resource: str, devices: Sequence[Device]) -> None:
        """Records that a container is about to get these devices, before its Allocate is answered.

        Waits for the node to be ours, and 10 s at most for orphaned Pods that had the devices; 30 s
        in all.

        Raises:
            RefusalError: a device is out of service or no longer listed, another holder has cores
                or nodes of one of them, the agent ends, or what is waited for takes too long.
        """
        try:
            async with asyncio.timeout(self._timing.grant):
                await self._until_ready()
                await self.cordons.settled()
                await self._orphans_end(resource, devices)
                self._check_grant(resource, devices)
                self.states.publish(self._ledger.with_grant(resource, devices, self._clock()))
                if not self._recorded.covers(resource, devices):
                    # They were listed by another plan than that on the disk.
                    await self._save()
                    self._check_grant(resource, devices)
        except TimeoutError:
            self._check_grant(resource, devices)  # which names a holder
            why = f"no answer within {self._timing.grant:g} s: {self._own_files}"
            raise RefusalError(Refusal.UNFIT, why) from None
        self.pod_resources.ask_soon()

    def _check_grant(self, resource: str, devices: Sequence[Device]) -> None:
        """Raises RefusalError if a container must not get these devices at this moment."""
        if not self.owned:
            raise RefusalError(Refusal.UNFIT, self.why_not_owned)
        plan.check_grant(self.facts(), resource, devices, self.devices[resource].value)

    async def _until_ready(self) -> None:
        if self._closed:
            raise RefusalError(Refusal.UNFIT, self.why_not_owned)
        try:
            async with asyncio.timeout(self._timing.owned):
                await self._ready.until(bool)
        except TimeoutError:
            another = "another agent serves this node and does not end"
            why = self._own_files if self._taking_over else another
            raise RefusalError(Refusal.UNFIT, why) from None

    @property
    def _own_files(self) -> str:
        paths = f"{self._record.path} and the specs in {self.specs.path}"
        return f"this agent's own files do not answer ({paths}): check their file systems"

    async def until_known(self, deadline: float) -> None:
        """Waits until the cards and their holders are known.

        Raises:
            RefusalError: they are not within `deadline` seconds.
        """
        try:
            async with asyncio.timeout(deadline):
                await self.asked.until(bool)
                await self.pool.known.until(lambda devices: devices is not None)
        except TimeoutError:
            raise RefusalError(
                Refusal.UNFIT,
                "npu-agent has just started, and is still reading cards and who holds them; the "
                "kubelet tries again",
            ) from None

    async def prepare(self, claim: PreparedClaim, devices: Collection[Device]) -> None:
        """Records that a claim is prepared; to be `saved` before its Pods get anything.

        Who asks for it has called `read_checkpoint`. Of the Pods that had the claim before, those
        that run on keep what they had.

        Args:
            claim: as it is to be.
            devices: those that are for the claim's Pods alone.

        Raises:
            RefusalError: another holder has cores or nodes of one of them.
        """
        before = self._ledger.prepared.get(claim.uid)
        if before and before != claim:
            living = await self.pod_resources.pods.running(before.pod_uids)
            self.states.publish(self._ledger.before_replacing(claim, living, self._clock()))
        if devices and not self.owned:
            raise RefusalError(Refusal.UNFIT, self.why_not_owned)
        plan.check_prepare(self.facts(), claim, devices)
        self.states.publish(self._ledger.with_claim(claim))
        self.pod_resources.ask_soon()  # other Pods may share it, and start now, too

    def put_back(self, claim: PreparedClaim) -> None:
        """Undoes a `prepare` that could not be saved: the claim is as it was."""
        self.states.publish(self._ledger.with_claim(claim))

    async def unprepare(self, uid: str) -> None:
        """Forgets a claim; to be `saved`. Pods that may run on keep its cores."""
        claim = self._ledger.prepared.get(uid)
        if claim and claim.footprints:
            living = await self.pod_resources.pods.running(claim.pod_uids)
            self._mark_orphaned(living, [claim])
        claim = self._ledger.prepared.get(uid)  # a Pod may have come to share it meanwhile
        if claim:
            self.states.publish(self._ledger.with_unidentified(claim, self._clock()))
        self.states.publish(self._ledger.without_claim(uid))

    # --- the kubelet's answers ------------------------------------------------------------------

    @property
    def needs_recovery(self) -> bool:
        """Whether claims may be in use that an earlier agent's record lacks."""
        return self._needs_recovery or self._ledger.unreadable is not None

    def recovery_done(self) -> None:
        self._needs_recovery = False
        self.reconcile()

    def claim_uses(self) -> tuple[Assignment, ...] | None:
        """Returns the containers that use claims; None if pod-resources does not answer."""
        answer = self.pod_resources.holdings.value
        return None if answer.error or not answer.asked_at else answer.claim_uses

    async def containers_of(self, namespace: str, claim: str, deadline: float) -> list[set[str]]:
        """Returns the containers that name a claim, by Pod; empty without an answer in time."""
        pods: dict[str, set[str]] = {}
        for use in (await self._answer(deadline)).claim_uses:
            if (use.namespace, use.claim) == (namespace, claim):
                pods.setdefault(use.pod, set()).add(use.container)
        return list(pods.values())

    def reconcile(self) -> None:
        """Reconciles the ledger with the latest answer of pod-resources."""
        cards = self.facts().cards
        answer = self.pod_resources.holdings.value
        applicable = answer.asked_at, cards
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
            self.states.publish(
                self._ledger.with_answer(
                    answer.assignments,
                    answer.asked_at,
                    cards=cards,
                    resources=self.devices,
                    pods=answer.pods,
                    cgroups=answer.cgroups,
                ).with_uses(answer.claim_uses)
            )
        if ready and self._ledger.pending_release:
            self.pod_resources.ask_soon()
        self.drivers_in_recovery.publish(self._drivers_to_recover(answer.claim_uses))
        self.asked.publish(bool(answer.asked_at))
        self.usages.publish(self._ledger.usages(self._snapshots.value.cards, answer.claim_uses))

    def _drivers_to_recover(self, uses: Iterable[Assignment]) -> frozenset[str]:
        if not self._needs_recovery:
            return frozenset()
        ours = [use for use in uses if use.resource == self.pool.dra.driver]
        return frozenset(use.resource for use in ours if not self._ledger.has_claim(use))

    async def _orphans_end(self, resource: str, devices: Sequence[Device]) -> None:
        """Waits until the orphaned Pods that had the devices have ended: 10 s at most."""
        names = [DeviceName(resource, device.id) for device in devices]
        living = await self.read_checkpoint(names)
        if self._ledger.has_pods_beyond(self._recorded):
            # The kubelet forgets now who has ended, and this agent may be killed.
            await self._save()
        self._mark_orphaned(living, self._holds(names))
        now = asyncio.get_running_loop().time
        until = now() + self._timing.holder_ends
        if not self._orphans_have(devices):
            return
        while self._orphans_have(devices) and now() < until:
            self.pod_resources.ask()
            await asyncio.sleep(self._timing.holder_ends_every)
            self.reconcile()
        # What gets better is listed once it is on the disk, and what is granted has to be listed.
        await self.replan()

    async def read_checkpoint(self, names: Iterable[DeviceName] = ()) -> frozenset[str]:
        """Records who has what by the kubelet's checkpoint, also while pod-resources fails.

        Returns the UIDs of running Pods that no list has, and of those that had these devices.
        """
        pods = await self.pod_resources.pods.device_holders()
        self.states.publish(self._ledger.with_pods(pods))
        listed = {use.name for use in self.pod_resources.holdings.value.assignments}
        candidates = self._ledger.orphan_candidates(listed, pods)
        had = (hold.pod_uids for hold in self._holds(names))
        cgroups = await self.pod_resources.pods.cgroups(candidates.union(*had))
        self.states.publish(
            self._ledger.with_checkpoint(
                {name: uids for name, uids in pods.items() if name not in listed},
                cgroups.keys(),
                self._clock(),
                cards=self.facts().cards,
                resources=self.devices,
            )
        )
        return frozenset(uid for uid, populated in cgroups.items() if populated)

    def _holds(self, names: Iterable[DeviceName]) -> list[Allocation]:
        allocations = self._ledger.allocations
        return [allocations[name] for name in names if name in allocations]

    def _orphans_have(self, devices: Iterable[Device]) -> bool:
        if not self._ledger.orphans:
            return False
        orphans = Ledger(orphans=self._ledger.orphans).conflicts(self.facts().cards)
        return any(orphans.against(None, device) for device in devices)

    def _mark_orphaned(
        self, living: frozenset[str], holds: Iterable[Allocation | PreparedClaim]
    ) -> None:
        """Records those of the living Pods whose devices the kubelet treats as free."""
        now = self._clock()
        ledger = self._ledger
        for hold in holds if living else ():
            ledger = ledger.with_orphans(living.intersection(hold.pod_uids), hold, now)
        self.states.publish(ledger)

    @property
    def _ledger(self) -> Ledger:
        return self.states.value

    async def _answer(self, deadline: float) -> Holdings:
        now = self._clock()
        holdings = self.pod_resources.holdings
        self.pod_resources.ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await holdings.until(lambda answer: answer.asked_at >= now)
        return holdings.value
