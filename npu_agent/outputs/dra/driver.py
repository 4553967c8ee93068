"""A vendor's DRA driver on this node: it owns the node, serves the kubelet, publishes the pool.

Start reading at `Driver.run`. The kubelet is served while DRA offers cards here, while a claim is
prepared (else its Pod would stay Terminating), and until the slices have no card that the device
plugin offers now. Where these cannot be seen it is not, so that the kubelet deletes them.

At a rollout the kubelet has this instance before the one before it ends (`Driver._register`): a
claim that finds no driver is late by a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from npu_agent.backoff import Backoff
from npu_agent.core import plan
from npu_agent.core.ledger import PreparedClaim
from npu_agent.core.state import SessionPhase
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api
from npu_agent.kubelet import cdi
from npu_agent.kubelet.allocator import Allocator, ClaimPool
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.registration import RegistrationTracker
from npu_agent.logs import logger
from npu_agent.outputs.dra import claims, publisher
from npu_agent.outputs.dra.claims import Claims
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.service import (
    PLUGINS,
    REGISTRY,
    DraPlugin,
    Endpoint,
    HealthStream,
    sweep_all,
)
from npu_agent.supervise import background
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)

_UNKNOWN = "cannot tell yet whether this node supports DRA: the API server has not answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverTiming:
    """The times of a driver and its parts, in seconds."""

    socket_check: float = 1.0
    linger: float = 30.0
    """To go on after the last claim and slice. A kubelet without our answer to Unprepare asks again
    after 10 to 15 s, and a claim may have been allocated just before its card left the slice."""
    register: float = 5.5
    """For the kubelet to find us while the agent before this one still serves; it waits for 6."""
    collect_every: float = 600.0
    """Pause between searches for claims that ended without an Unprepare."""
    withdraw_timeout: float = 60.0
    """Unregistered, until the slices of a node that may not list them are gone: a kubelet deletes
    those of a driver that has not been registered for 30 s."""
    claims: claims.PrepareTiming = field(default_factory=claims.PrepareTiming)
    slices: publisher.SliceTiming = field(default_factory=publisher.SliceTiming)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverHost:
    """The node and its paths."""

    node_name: str | None
    """None: unknown, and claims cannot be served."""
    kubelet_root: Path
    """``/var/lib/kubelet``, by the kubelet's own path for it."""
    cdi_root: Path


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
        pool: ClaimPool,
        host: DriverHost,
        allocator: Allocator,
        ownership: Ownership,
        api: Api,
        timing: DriverTiming = DriverTiming(),
    ) -> None:
        """Does nothing yet."""
        self.pool = pool
        self._driver = pool.dra.driver
        self._allocator = allocator
        self._tracker = RegistrationTracker(self._driver)
        self.status = self._tracker.status
        self._host = host
        self._ownership = ownership
        self._timing = timing
        self._endpoint: Endpoint | None = None
        """What serves the kubelet. The feed of its health service has None while another agent
        reports."""
        self.claims = Claims(
            api, pool, allocator, host.node_name or "", host.cdi_root, timing.claims
        )
        self.counts = self.claims.counts
        self.slices = SlicePublisher(api, host.node_name or "", pool, timing.slices)

    @property
    def directories(self) -> tuple[Path, ...]:
        root = self._host.kubelet_root
        return root / REGISTRY, root / PLUGINS / self._driver

    def prepared(self) -> tuple[PreparedClaim, ...]:
        claims = self._allocator.prepared.value.values()
        return tuple(claim for claim in claims if claim.driver == self._driver)

    @property
    def needed(self) -> bool:
        return self._duty() is not _Duty.NONE

    def _duty(self) -> _Duty:
        wishes = self.pool.wishes.value
        facts = self._allocator.facts()

        if not plan.is_needed(facts, wishes, self._driver):
            return _Duty.NONE
        if self.prepared():
            return _Duty.SERVE
        if wishes.families:
            possible = self._driver in facts.recovering or wishes.impossible == ""
            return _Duty.SERVE if possible else _Duty.BLOCKED
        return _Duty.WITHDRAW if self.slices.no_access else _Duty.SERVE

    async def run(self) -> None:
        pause = Backoff(first=0.1, longest=2.0)  # while directories cannot be used
        try:
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
                    self.claims.ready.publish(False)
                    await self._close()
        finally:
            self._tracker.becomes(SessionPhase.ENDED)

    async def _until_needed(self) -> None:
        allocator = self._allocator
        async for _ in changes_of(
            self.pool.wishes,
            *(allocator.prepared, allocator.published, allocator.drivers_in_recovery),
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
            elif reason := self.pool.wishes.value.impossible:
                self._tracker.fails(reason)
            else:
                self._tracker.becomes(SessionPhase.WAITING, _UNKNOWN)

    async def _own(self, still_ours: Callable[[], bool], pause: Backoff) -> None:
        """Serves and publishes while the node is ours and there is a need; raises OSError."""
        sweep_all(self._driver, self._host.kubelet_root)
        await self._allocator.renew()
        await self.claims.upkeep.recover()  # before anything is dropped or prepared
        self.claims.ready.publish(True)
        async with background(
            self.slices.run(), self._collect_garbage(), self._keep_specs(), self._identify_pods()
        ):
            while still_ours() and (duty := self._duty()) in (_Duty.SERVE, _Duty.WITHDRAW):
                try:
                    if duty is _Duty.WITHDRAW:
                        await self._wait_for_slice_deletion(still_ours)
                    else:
                        await self._serve(still_ours)
                        pause.reset()  # those sockets were made
                except OSError as error:
                    self._tracker.fails(str(error))  # slices and claims go on
                    await asyncio.sleep(pause.next())

    async def _wait_for_slice_deletion(self, still_ours: Callable[[], bool]) -> None:
        """Waits, no longer registered, until the kubelet has deleted the slices, and notes that.

        Ends before that if they can be seen, or one is needed.
        """
        until = time.monotonic() + self._timing.withdraw_timeout
        self._tracker.fails(
            "the ResourceSlices cannot be listed: waiting for the kubelet to delete them"
        )
        while still_ours() and self._duty() is _Duty.WITHDRAW:
            if time.monotonic() >= until:
                log.warning(
                    "the ResourceSlices cannot be listed: the kubelet has deleted them by now",
                    driver=self._driver,
                )
                self._allocator.withdrawn(self._driver)
                return
            await asyncio.sleep(until_tick(self._timing.socket_check))

    async def _collect_garbage(self) -> None:
        while True:
            await self.claims.upkeep.collect_garbage()
            await asyncio.sleep(self._timing.collect_every)

    async def _keep_specs(self) -> None:
        while True:
            await self.claims.upkeep.recover()  # if the kubelet had not said before what is in use
            await self.claims.upkeep.sync_specs()
            await asyncio.sleep(cdi.RESYNC_INTERVAL)

    async def _identify_pods(self) -> None:
        """Finds the UID of each Pod that comes to share a claim, while the API server has it."""
        pause = Backoff(first=1.0, longest=30.0)
        while True:
            changed = self._allocator.prepared.changed
            if await self.claims.upkeep.identify_pods():
                pause.reset()
                await changed.wait()
            else:
                await set_within(changed, pause.next())

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
                driver=self._driver,
                reason=str(error) or "the kubelet has not found it in time",
            )

    async def idle(self) -> None:
        """Waits until no call of the kubelet is under way."""
        if self._endpoint:
            await self._endpoint.plugin.calls.until(lambda calls: not calls)

    async def _listen(self) -> Endpoint:
        endpoint = Endpoint(
            driver=self._driver,
            kubelet_root=self._host.kubelet_root,
            plugin=DraPlugin(self.claims),
            health=HealthStream(self._host.node_name or "", Feed(None)),
        )
        await endpoint.start()
        self._endpoint = endpoint
        return endpoint

    async def _close(self) -> None:
        if endpoint := self._endpoint:
            self._endpoint = None
            endpoint.health.devices.close()  # its streams return, and the kubelet sees their end
            await endpoint.close()

    async def _serve(self, still_ours: Callable[[], bool]) -> None:
        """Serves the kubelet until its sockets are lost, or nothing is to be served."""
        endpoint = self._endpoint or await self._listen()
        until = 0.0
        try:
            async with background(self._report(endpoint.health), self._registration(endpoint)):
                while still_ours() and (self._duty() is _Duty.SERVE or time.monotonic() < until):
                    if self._duty() is _Duty.SERVE:
                        until = time.monotonic() + self._timing.linger
                    await asyncio.sleep(until_tick(self._timing.socket_check))
                    if not endpoint.exists():
                        self._tracker.fails("our socket was removed; registering again")
                        return
        finally:
            await self._close()

    async def _report(self, health: HealthStream) -> None:
        """Publishes the pool, and claimed devices outside it, to the kubelet's health stream."""
        async for _ in changes_of(self.pool.offered, self.pool.known, self._allocator.prepared):
            offered = self.pool.offered.value
            if offered is not None:
                held = {device.device for claim in self.prepared() for device in claim.devices}
                held -= {device.name for device in offered}
                known = self.pool.known.value or ()
                health.devices.publish(
                    (*offered, *(device for device in known if device.name in held))
                )

    async def _registration(self, endpoint: Endpoint) -> None:
        """Follows the state of the registration, and notices restarts of the kubelet.

        A kubelet from 1.36 on holds the stream of health open for as long as it has us.
        """
        asked = 0
        streamed = 0
        health = endpoint.health

        async for _ in changes_of(endpoint.registration, health.streams, self.pool.unwritten):
            now = endpoint.registration.value
            if now.asked > asked:
                if asked:
                    log.info("the kubelet has been restarted", driver=self._driver)
                    self._allocator.kubelet_lost()
                self.slices.ask_now()  # a kubelet that starts deletes the slices of its node
                asked = now.asked
                streamed = 0
            streamed = max(streamed, health.streams.value)
            if now.error:
                self._tracker.fails(f"the kubelet refuses: {now.error}")
            elif self.pool.unwritten.value:
                self._tracker.becomes(SessionPhase.BLOCKED, self.pool.unwritten.value)
            elif streamed and not health.streams.value:
                self._tracker.becomes(
                    SessionPhase.REGISTERING, "the kubelet has closed its stream of health"
                )
            elif now.registered:
                self._tracker.registered(now.notifications)
