"""A vendor's DRA driver on this node: it owns the node, serves the kubelet, publishes the pool.

Start reading at `Driver.run`. The kubelet is served while DRA offers cards here, while a claim is
prepared (else its Pod would stay Terminating), and until the slices have no card that the device
plugin offers now. Where these cannot be seen it is not, so that the kubelet deletes them.

At a rollout the kubelet has this instance before the one before it ends (`Driver._register`): a
claim that finds no driver is late by a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from npu_agent import text
from npu_agent.backoff import Backoff
from npu_agent.core.claim import ClaimRef
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import PreparedClaim, PublishedCard
from npu_agent.core.plan import (
    DraWishes,
    Facts,
    cards_for_claims,
    claim_pool,
    published_by,
    withdrawn,
)
from npu_agent.core.pool import PoolDevice, pool
from npu_agent.core.state import SessionPhase
from npu_agent.core.trends import TrendKind
from npu_agent.core.vendor_spec import VendorSpec
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, resourceclaims
from npu_agent.kubelet.allocation_store import AllocationStore
from npu_agent.kubelet.cordons import CordonStore
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.registration import RegistrationTracker
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.dra import claims, publisher
from npu_agent.outputs.dra.claims import Claims, LocalPool
from npu_agent.outputs.dra.endpoint import PLUGINS, REGISTRY, Endpoint, sweep_all
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.service import DraPlugin, Health, Prepared
from npu_agent.supervise import background
from npu_agent.ticks import until_tick

log = logger(__name__)

_UNKNOWN = "cannot tell yet whether this node supports DRA: the API server has not answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of a driver and its parts, in seconds."""

    look_every: float = 1.0
    linger: float = 30.0
    """To go on after the last claim and slice. A kubelet without our answer to Unprepare asks again
    after 10 to 15 s, and a claim may have been allocated just before its card left the slice."""
    register: float = 5.5
    """For the kubelet to find us while the agent before this one still serves; it waits for 6."""
    collect_every: float = 600.0
    """Pause between searches for claims that ended without an Unprepare."""
    retry_first: float = 0.1
    """Between the first attempts to serve, or to write the record, in directories that cannot be
    used."""
    retry_longest: float = 2.0
    wiped: float = 60.0
    """Unregistered, until the slices of a node that may not list them are gone: a kubelet deletes
    those of a driver that has not been registered for 30 s."""
    claims: claims.Timing = field(default_factory=claims.Timing)
    slices: publisher.Timing = field(default_factory=publisher.Timing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The node and its paths."""

    node_name: str | None
    """None: unknown, and claims cannot be served."""
    kubelet_root: Path
    """``/var/lib/kubelet``, by the kubelet's own path for it."""
    cdi_root: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The objects shared by all that allocate the cards of a node."""

    snapshots: Feed[Snapshot]
    store: AllocationStore
    ownership: Ownership
    cordons: CordonStore
    degraded: Feed[Mapping[str, frozenset[TrendKind]]] = field(default_factory=lambda: Feed({}))
    """Remarks on working cards, by card ID."""


class _Duty(Enum):
    """The current duties of a driver."""

    NONE = "nothing is to be served"
    BLOCKED = "cards are to be offered, and this node cannot do DRA, or it is not known yet"
    SERVE = "the kubelet is served"
    WITHDRAW = "the driver is not registered, so that the kubelet deletes its slices"
    """It may not see them, and serves nothing else: the component of DRA, with that right, was
    removed."""


class Driver:
    """Keeps one driver registered and its pool published; `status` has its state."""

    def __init__(
        self,
        vendor: VendorSpec,
        host: Host,
        shared: Shared,
        wanted: Feed[DraWishes],
        api: Api,
        timing: Timing = Timing(),
    ) -> None:
        """Does nothing yet. A claim can hold a card of a family that is not offered."""
        assert vendor.dra  # noqa: S101 (who calls it has looked)
        self.offered: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """The pool; None: not known yet."""
        self._dra = dra = vendor.dra
        self._families = families = frozenset(vendor.families)
        self._tracker = RegistrationTracker(dra.driver)
        self.status = self._tracker.status
        self._host = host
        self._snapshots, self._store = shared.snapshots, shared.store
        self._ownership = shared.ownership
        self._cordons = shared.cordons
        self._degraded = shared.degraded
        self._wanted = wanted
        self._timing = timing
        self._recorded: Mapping[str, PublishedCard] = self._store.published.value
        """The recorded cards that are, or will be, in slices."""
        self._unwritten: Feed[str] = Feed("")
        """Why the disk could not be written; "": it was."""
        self._again: Feed[int] = Feed(0)
        self._saving = self._backoff()
        self._ours: Feed[bool] = Feed(False)
        self._endpoint: Endpoint | None = None
        """What serves the kubelet. The feed of its health service has None while another agent
        reports."""

        def all_devices(snapshot: Snapshot, wanted: DraWishes) -> tuple[PoolDevice, ...] | None:
            if not snapshot.complete:
                return None
            # A claim can hold a part of a card that is offered whole now.
            by_index = wanted.by_index
            return pool(snapshot, dra=dra, families=families, by_index=by_index, partitions=True)

        self._known = self._snapshots.map_with(wanted, all_devices).map_with(
            self._store.asked, lambda devices, asked: devices if asked else None
        )
        """All devices of the vendor's cards, offered or not; None while these, or who holds them,
        are unknown."""
        self.claims = Claims(
            fetch=lambda namespace, name: resourceclaims.get(api, namespace, name),
            pool=LocalPool(
                dra=dra,
                name=host.node_name or "",
                devices=self._known,
                cordoned=self._cordons.refusal,
            ),
            store=self._store,
            cdi_root=host.cdi_root,
            timing=timing.claims,
        )
        self.counts = self.claims.counts
        self.slices = SlicePublisher(
            api, host.node_name or "", dra.driver, self.offered, timing.slices
        )
        self._uncounted = self.slices.state.map(lambda state: state.uncounted)
        """Whether cards cannot be cut: the API server does not count their cores."""
        self._untainted = self.slices.state.map(lambda state: state.untainted)
        """Whether tainted devices are left out: the API server drops taints."""

    @property
    def directories(self) -> tuple[Path, ...]:
        root = self._host.kubelet_root
        return root / REGISTRY, root / PLUGINS / self._dra.driver

    def prepared(self) -> tuple[PreparedClaim, ...]:
        claims = self._store.prepared.value.values()
        return tuple(one for one in claims if one.driver == self._dra.driver)

    @property
    def needed(self) -> bool:
        return self._duty() is not _Duty.NONE

    def _duty(self) -> _Duty:
        wanted, unrecorded = (
            self._wanted.value,
            self._dra.driver in self._store.drivers_in_recovery.value,
        )
        if self.prepared():
            return _Duty.SERVE
        if wanted.families:
            possible = unrecorded or wanted.impossible == ""
            return _Duty.SERVE if possible else _Duty.BLOCKED
        if unrecorded or self._published():
            return _Duty.WITHDRAW if self.slices.no_access else _Duty.SERVE
        return _Duty.NONE

    def _published(self) -> set[str]:
        return published_by(self._store.states.value, self._dra.driver)

    async def run(self) -> None:
        pause = self._backoff()
        try:
            async with background(self._follow()):
                while True:
                    await self._until_needed()
                    try:
                        async with self._ownership.held(
                            self._tracker.waits_for, self._register
                        ) as still_ours:
                            await self._own(still_ours, pause)
                    except OSError as error:
                        self._tracker.fails(str(error))
                        await asyncio.sleep(pause.next())
                    finally:
                        self._ours.publish(False)
                        await self._close()
        finally:
            self._tracker.becomes(SessionPhase.ENDED)

    async def _until_needed(self) -> None:
        store = self._store
        async for _ in changes_of(
            self._wanted, store.prepared, store.published, store.drivers_in_recovery
        ):
            duty = self._duty()
            if duty is _Duty.NONE:
                self._tracker.becomes(SessionPhase.NO_CARDS)
            elif self._host.node_name is None:
                self._tracker.fails(
                    "the Node's name is unknown: set NODE_NAME, as k8s/daemonset.yaml does"
                )
            elif duty is not _Duty.BLOCKED:
                return
            elif reason := self._wanted.value.impossible:
                self._tracker.fails(reason)
            else:
                self._tracker.becomes(SessionPhase.WAITING, _UNKNOWN)

    async def _own(self, still_ours: Callable[[], bool], pause: Backoff) -> None:
        """Serves and publishes while the node is ours and there is a need; raises OSError."""
        sweep_all(self._dra.driver, self._host.kubelet_root)
        await self._store.renew()
        with contextlib.suppress(OSError):  # then new cards stay out of slices
            await self._store.saved()
        await self.claims.recover()  # before anything is dropped or prepared
        self._ours.publish(True)
        async with background(
            self.slices.run(), self._collect_garbage(), self._keep_specs(), self._confirm()
        ):
            while still_ours() and (duty := self._duty()) in (_Duty.SERVE, _Duty.WITHDRAW):
                try:
                    if duty is _Duty.WITHDRAW:
                        await self._until_wiped(still_ours)
                    else:
                        await self._serve(still_ours)
                        pause.reset()  # those sockets were made
                except OSError as error:
                    self._tracker.fails(str(error))  # slices and claims go on
                    await asyncio.sleep(pause.next())

    async def _follow(self) -> None:
        """Updates the pool after changes of cards, config and ledger."""
        store = self._store
        async for _ in changes_of(
            *(self._known, self._snapshots, self._wanted, self._uncounted, self._untainted),
            *(store.states, store.drivers_in_recovery, self._cordons.cards, self._degraded),
            *(self._again, self._ours),
        ):
            if self._known.value is None or not (self.needed and self._wanted.value.decided):
                continue  # never an empty pool, or one of doubts, before the real one
            if not await self._record_cards():
                continue
            devices = claim_pool(
                self._facts(),
                self._wanted.value,
                self._dra,
                self._families,
                recorded=self._recorded,
                slices=self.slices.state.value,
            )
            if devices or not self._unwritten.value or self.offered.value is not None:
                self.offered.publish(devices)

    async def _record_cards(self) -> bool:
        """Records cards on disk before they are in slices; the others stay out.

        False while the record lacks some and is still another agent's.
        """
        while about := self._cards_to_record():
            if not self._ours.value:
                return False
            published = self._store.published.value
            try:
                await self._store.saved()
            except OSError as error:
                if self._unwritten.publish(why := text.reason(error)):
                    log.warning(
                        "cards stay out of the ResourceSlices until the record can be written",
                        driver=self._dra.driver,
                        cards=", ".join(sorted(about)),
                        reason=why,
                    )
                again = self._again
                asyncio.get_running_loop().call_later(
                    self._saving.next(), again.publish, again.value + 1
                )
                return True
            self._recorded = published
            self._saving.reset()
        self._unwritten.publish("")
        return True

    def _cards_to_record(self) -> set[str]:
        published = self._store.published.value
        self._recorded = {id_: one for id_, one in self._recorded.items() if id_ in published}
        self._store.record_published(
            self._dra.driver, cards_for_claims(self._snapshots.value, self._wanted.value)
        )
        published = self._store.published.value
        return {id_ for id_ in self._published() if self._recorded.get(id_) != published[id_]}

    def _facts(self) -> Facts:
        return replace(self._store.facts(self._cordons.cards.value), degraded=self._degraded.value)

    async def _confirm(self) -> None:
        """Notes which cards have left the slices, once the API server has said so."""
        async for _ in changes_of(self.slices.in_place, self.offered, self._store.published):
            self._store.forget_published(self._left())

    def _left(self) -> set[str]:
        """Returns cards that must leave the slices, once the API server has confirmed it."""
        offered = self.offered.value
        if offered is None or self.slices.in_place.value != offered:
            return set()
        return withdrawn(self._facts(), self._wanted.value, self._dra.driver, offered)

    async def _until_wiped(self, still_ours: Callable[[], bool]) -> None:
        """Waits, no longer registered, until the kubelet has deleted the slices, and notes that.

        Ends before that if they can be seen, or one is needed.
        """
        until = time.monotonic() + self._timing.wiped
        self._tracker.fails(
            "the ResourceSlices cannot be listed: waiting for the kubelet to delete them"
        )
        while still_ours() and self._duty() is _Duty.WITHDRAW:
            if time.monotonic() >= until:
                log.warning(
                    "the ResourceSlices cannot be listed: the kubelet has deleted them by now",
                    driver=self._dra.driver,
                )
                self._store.forget_published(self._published())
                return
            await asyncio.sleep(until_tick(self._timing.look_every))

    async def _collect_garbage(self) -> None:
        while True:
            await self.claims.collect_garbage()
            await asyncio.sleep(self._timing.collect_every)

    async def _keep_specs(self) -> None:
        while True:
            await self.claims.recover()  # if the kubelet had not said before what is in use
            await self.claims.refresh_consumers()
            await self.claims.sync_specs()
            await asyncio.sleep(cdi.LOOK_EVERY)

    def _backoff(self) -> Backoff:
        return Backoff(first=self._timing.retry_first, longest=self._timing.retry_longest)

    async def _register(self) -> None:
        """Lets the kubelet find this instance while the previous one still serves.

        From then on the kubelet calls this one, and each call waits until the node is ours.
        """
        if self._duty() is not _Duty.SERVE or self._endpoint:
            return
        try:
            endpoint = await self._listen()
            async with asyncio.timeout(self._timing.register):
                await endpoint.registered()
        except (OSError, TimeoutError) as error:
            log.warning(
                "not registered until the previous agent has ended",
                driver=self._dra.driver,
                reason=str(error) or "the kubelet has not found it in time",
            )

    async def idle(self) -> None:
        """Waits until no call of the kubelet is under way."""
        if self._endpoint:
            await self._endpoint.plugin.calls.until(lambda calls: not calls)

    async def _listen(self) -> Endpoint:
        endpoint = Endpoint(
            driver=self._dra.driver,
            kubelet_root=self._host.kubelet_root,
            plugin=DraPlugin(self._prepare, self._unprepare),
            health=Health(self._host.node_name or "", Feed(None)),
        )
        await endpoint.start()
        self._endpoint = endpoint
        return endpoint

    async def _close(self) -> None:
        if endpoint := self._endpoint:
            self._endpoint = None
            endpoint.health.devices.close()  # its streams return, and the kubelet sees their end
            await endpoint.close()

    async def _prepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, Prepared]:
        await self._ours.until(bool)
        await self._cordons.settled()
        return await self.claims.prepare(refs)

    async def _unprepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, str | None]:
        await self._ours.until(bool)
        return await self.claims.unprepare(refs)

    async def _serve(self, still_ours: Callable[[], bool]) -> None:
        """Serves the kubelet until its sockets are lost, or nothing is to be served."""
        endpoint = self._endpoint or await self._listen()
        until = 0.0
        try:
            async with background(self._report(endpoint.health), self._registration(endpoint)):
                while still_ours() and (self._duty() is _Duty.SERVE or time.monotonic() < until):
                    if self._duty() is _Duty.SERVE:
                        until = time.monotonic() + self._timing.linger
                    await asyncio.sleep(until_tick(self._timing.look_every))
                    if not endpoint.exists():
                        self._tracker.fails("our socket was removed; registering again")
                        return
        finally:
            await self._close()

    async def _report(self, health: Health) -> None:
        """Publishes the pool, and claimed devices outside it, to the kubelet's health stream."""
        async for _ in changes_of(self.offered, self._known, self._store.prepared):
            offered = self.offered.value
            if offered is not None:
                held = {device.device for claim in self.prepared() for device in claim.devices}
                held -= {one.name for one in offered}
                known = self._known.value or ()
                health.devices.publish((*offered, *(one for one in known if one.name in held)))

    async def _registration(self, endpoint: Endpoint) -> None:
        """Follows the state of the registration, and notices restarts of the kubelet.

        A kubelet from 1.36 on holds the stream of health open for as long as it has us.
        """
        asked, streamed, health = 0, 0, endpoint.health
        async for _ in changes_of(endpoint.registration, health.streams, self._unwritten):
            now = endpoint.registration.value
            if now.asked > asked:
                if asked:
                    log.info("the kubelet has been restarted", driver=self._dra.driver)
                    self._store.kubelet_lost()
                self.slices.ask_now()  # a kubelet that starts deletes the slices of its node
                asked, streamed = now.asked, 0
            streamed = max(streamed, health.streams.value)
            if now.error:
                self._tracker.fails(f"the kubelet refuses: {now.error}")
            elif self._unwritten.value:
                self._tracker.becomes(SessionPhase.BLOCKED, self._unwritten.value)
            elif streamed and not health.streams.value:
                self._tracker.becomes(
                    SessionPhase.REGISTERING, "the kubelet has closed its stream of health"
                )
            elif now.registered:
                self._tracker.registered(now.notifications)
