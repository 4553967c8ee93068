"""A vendor's DRA driver on this node: own the node, serve the kubelet, publish the pool.

Start reading at `Driver.run`. The kubelet is served as long as DRA offers cards here, and also as
long as a claim is prepared: a Pod whose claim nobody unprepares stays Terminating for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from npu_agent.backoff import Backoff
from npu_agent.core.counts import DraCounts
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import PreparedClaim
from npu_agent.core.pool import DraNames, PoolDevice, pool
from npu_agent.core.state import SessionPhase, SessionStatus
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, resourceclaims
from npu_agent.kubelet.ledger import LedgerKeeper
from npu_agent.kubelet.ownership import Ownership
from npu_agent.logs import logger
from npu_agent.outputs.dra.claims import Claims
from npu_agent.outputs.dra.endpoint import Endpoint, instance_of, sweep
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.service import DraPlugin, Health
from npu_agent.ticks import until_tick

log = logger(__name__)

_LOOK_EVERY = 1.0
"""Seconds between checks of our sockets; a stat each."""
_LINGER = 30.0
"""Seconds to go on after the last claim: a kubelet that has not got our answer asks again, after 10
to 15 s, and without a driver its Pod would stay Terminating."""
_SWEEP_EVERY = 600.0
"""Seconds between two searches for claims that ended without our being asked."""
_RETRY_FIRST, _RETRY_LONGEST = 0.1, 2.0
"""Seconds between attempts to serve while the kubelet's directories cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the config says of DRA."""

    families: frozenset[str]
    """Whose cards DRA offers on this node; none: it only serves the claims that there are."""
    disabled: frozenset[str] = frozenset()
    """Names of cards that are not offered, as `pool` takes them."""
    by_index: bool = False
    partitions: bool = False
    """Whether cards are offered in all of their widths, as `pool` takes it."""
    evict: bool = False
    impossible: str = ""
    """Why this node cannot do DRA; "" where it can, or nobody has said otherwise yet."""


class Driver:
    """Keeps one driver registered and its pool published; `status` says how it stands."""

    def __init__(
        self,
        *,
        dra: DraNames,
        vendor_families: frozenset[str],
        node_name: str | None,
        pod_uid: str | None,
        kubelet_root: Path,
        ownership: Ownership,
        keeper: LedgerKeeper,
        snapshots: Feed[Snapshot],
        wanted: Feed[Wanted],
        api: Api,
        cdi_root: Path,
    ) -> None:
        """A driver that does nothing yet.

        Args:
            dra: the vendor's names.
            vendor_families: all families of the vendor: a claim can hold a card that is no longer
                offered.
            node_name: the Node's name; None: unknown, and then it cannot be served.
            pod_uid: the agent's Pod's.
            kubelet_root: ``/var/lib/kubelet``, by the very path that the kubelet has for it.
            ownership: the agent's.
            keeper: the ledger.
            snapshots: the cards.
            wanted: what to offer.
            api: for claims and slices.
            cdi_root: where container runtimes read CDI specs.
        """
        self.counts = DraCounts()
        self.status: Feed[SessionStatus] = Feed(
            SessionStatus(resource=dra.driver, phase=SessionPhase.NO_CARDS)
        )
        self.offered: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """The pool; None as long as it is not known."""
        self._known: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """All devices of the vendor's cards, offered or not."""
        self._dra = dra
        self._vendor_families = vendor_families
        self._node_name = node_name
        self._instance = instance_of(pod_uid)
        self._kubelet_root = kubelet_root
        self._ownership = ownership
        self._keeper = keeper
        self._snapshots = snapshots
        self._wanted = wanted
        self._registrations = 0
        self._beside: list[asyncio.Task[None]] = []
        """What runs beside the serving; none of it ends by itself."""
        self._logged = ""
        """The trouble that was logged last."""
        pool_name = node_name or ""
        self.claims = Claims(
            fetch=lambda namespace, name: resourceclaims.get(api, namespace, name),
            dra=dra,
            pool=pool_name,
            devices=self._known,
            keeper=keeper,
            cdi_root=cdi_root,
            counts=self.counts,
        )
        self.slices = SlicePublisher(
            api=api, node_name=pool_name, driver=dra.driver, devices=self.offered
        )
        self._uncounted = self.slices.state.map(lambda state: state.uncounted)
        """Whether cards cannot be cut, as the API server does not count their cores."""

    def prepared(self) -> tuple[PreparedClaim, ...]:
        """The claims of this driver that are prepared."""
        claims = self._keeper.prepared.value.values()
        return tuple(one for one in claims if one.driver == self._dra.driver)

    @property
    def needed(self) -> bool:
        """Whether there is anything to serve."""
        return bool(self._wanted.value.families) or bool(self.prepared())

    @property
    def _serves(self) -> bool:
        """Whether there is anything to serve, and somebody to serve it to."""
        return self.needed and not (self._wanted.value.impossible and not self.prepared())

    async def run(self) -> None:
        """Serves until cancelled."""
        pause = Backoff(first=_RETRY_FIRST, longest=_RETRY_LONGEST)
        self._beside = [asyncio.create_task(self._follow())]
        try:
            while True:
                await self._until_it_serves()
                try:
                    self._say(SessionPhase.REGISTERING)
                    async with self._ownership.held(self._standby) as still_ours:
                        sweep(self._dra.driver, self._kubelet_root)
                        await self._keeper.renew()
                        await self.claims.rebuild()  # before anything is swept or prepared
                        async with self._publishing():
                            while still_ours() and self._serves:
                                await self._serve(still_ours)
                                pause.reset()  # those sockets were made
                except OSError as error:
                    self._trouble(str(error))
                    await asyncio.sleep(pause.next())
        finally:
            await _ended(self._beside)
            self._say(SessionPhase.ENDED)

    async def _until_it_serves(self) -> None:
        async for _ in changes_of(self._wanted, self._keeper.prepared):
            if not self.needed:
                self._say(SessionPhase.NO_CARDS)
            elif self._node_name is None:
                self._trouble(
                    "the Node's name is unknown: set NODE_NAME, as k8s/daemonset.yaml does"
                )
            elif not self._serves:
                self._trouble(self._wanted.value.impossible)
            else:
                return

    async def _follow(self) -> None:
        """Keeps the pool true to cards, config and ledger."""
        keeper, seen = self._keeper, None
        async for _ in changes_of(
            *(self._snapshots, self._wanted, self._uncounted),
            *(keeper.holds, keeper.prepared, keeper.asked),
        ):
            snapshot, wanted = self._snapshots.value, self._wanted.value
            if not self.needed or not snapshot.complete or not keeper.asked.value:
                continue  # never an empty pool, or one of doubts, before the real one
            if seen is None or seen[0] is not snapshot or seen[1] != wanted.by_index:
                seen = (snapshot, wanted.by_index)
                families = self._vendor_families
                self._known.publish(
                    pool(
                        snapshot,
                        dra=self._dra,
                        families=families,
                        by_index=wanted.by_index,
                        partitions=True,  # a claim can hold a part of a card that is whole now
                    )
                )
            offered = partial(
                pool,
                snapshot,
                dra=self._dra,
                families=wanted.families,
                disabled=wanted.disabled,
                by_index=wanted.by_index,
                partitions=wanted.partitions and not self._uncounted.value,
                evict=wanted.evict,
            )
            listed = {one.name for one in offered()}
            self.offered.publish(offered(held=keeper.held_by_containers(listed)))

    @contextlib.asynccontextmanager
    async def _publishing(self) -> AsyncIterator[None]:
        """Publishes the pool and sweeps claims while the context is open."""
        tasks = [
            asyncio.create_task(self.slices.run()),
            asyncio.create_task(self._sweep_claims()),
        ]
        self._beside += tasks
        try:
            yield
        finally:
            self._beside = [task for task in self._beside if task not in tasks]
            await _ended(tasks)

    async def _sweep_claims(self) -> None:
        while True:
            await self.claims.rebuild()  # if the kubelet had not said before what is in use
            await self.claims.sweep()
            await asyncio.sleep(_SWEEP_EVERY)

    async def _serve(self, still_ours: Callable[[], bool]) -> None:
        """Serves the kubelet on new sockets until they are lost, or nothing is to be served."""
        served: Feed[tuple[PoolDevice, ...]] = Feed(self.offered.value or ())
        health = Health(self._node_name or "", served)
        endpoint = Endpoint(
            driver=self._dra.driver,
            kubelet_root=self._kubelet_root,
            instance=self._instance,
            plugin=DraPlugin(self.claims.prepare, self.claims.unprepare),
            health=health,
        )
        await endpoint.start()
        tasks = [
            asyncio.create_task(self._report(served)),
            asyncio.create_task(self._registration(endpoint, health)),
        ]
        until = 0.0
        try:
            while still_ours() and (self._serves or time.monotonic() < until):
                if self.prepared():
                    until = time.monotonic() + _LINGER
                await asyncio.sleep(until_tick(_LOOK_EVERY))
                if not endpoint.exists():
                    self._trouble("our socket was removed: registering again")
                    return
                for task in (*self._beside, *tasks):
                    if task.done():
                        task.result()  # raises: the whole part is started again
        finally:
            served.close()  # the streams return, and the kubelet sees their end
            await endpoint.close()
            await _ended(tasks)

    async def _report(self, served: Feed[tuple[PoolDevice, ...]]) -> None:
        """Hands the pool to the kubelet's health stream, and what claims hold and is not in it."""
        async for _ in changes_of(self.offered, self._known, self._keeper.prepared):
            offered = self.offered.value
            if offered is not None:
                held = {device.device for claim in self.prepared() for device in claim.devices}
                held -= {one.name for one in offered}
                known = self._known.value or ()
                served.publish((*offered, *(one for one in known if one.name in held)))

    async def _registration(self, endpoint: Endpoint, health: Health) -> None:
        """Follows what the kubelet makes of us, and notices its restarts.

        A kubelet from 1.36 on holds the stream of health open for as long as it has us.
        """
        asked = streamed = 0
        async for _ in changes_of(endpoint.registration, health.streams):
            now = endpoint.registration.value
            if now.asked > asked:
                if asked:
                    log.info("the kubelet has been restarted", driver=self._dra.driver)
                    self._keeper.kubelet_lost()
                self.slices.ask_now()  # a kubelet that starts deletes the slices of its node
                asked, streamed = now.asked, 0
            streamed = max(streamed, health.streams.value)
            if now.error:
                self._trouble(f"the kubelet refuses: {now.error}")
            elif streamed and not health.streams.value:
                self._say(SessionPhase.REGISTERING, "the kubelet has closed its stream of health")
            elif now.registered:
                self._registrations = now.notifications
                self._logged = ""
                self._say(SessionPhase.REGISTERED)

    def _standby(self, owner: str | None) -> None:
        if owner is None:
            self._say(SessionPhase.REGISTERING)
        else:
            self._say(SessionPhase.STANDBY, f"served by {owner}")

    def _trouble(self, reason: str) -> None:
        """As `_say`, for what keeps us from serving; logged once, however often it is tried."""
        self._say(SessionPhase.BLOCKED, reason)
        if reason != self._logged:
            self._logged = reason
            log.warning("the DRA driver does not serve", driver=self._dra.driver, reason=reason)

    def _say(self, phase: SessionPhase, reason: str = "") -> None:
        self.status.publish(
            SessionStatus(
                resource=self._dra.driver,
                phase=phase,
                reason=reason,
                registrations=self._registrations,
            )
        )


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits for their end, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
