"""A vendor's DRA driver on this node: own the node, serve the kubelet, publish the pool.

Start reading at `Driver.run`. The kubelet is served as long as DRA offers cards here, and also as
long as a claim is prepared: a Pod whose claim nobody unprepares stays Terminating for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
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
_SWEEP_EVERY = 600.0
"""Seconds between two searches for claims that ended without our being asked."""
_RETRY_FIRST, _RETRY_LONGEST = 0.1, 2.0
"""Seconds between attempts to serve while the kubelet's directories cannot be used."""
_WAITING = {SessionPhase.REGISTERING, SessionPhase.STANDBY, SessionPhase.BLOCKED}
"""Phases that never end on a node that cannot do DRA; its own words are clearer than theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the config says of DRA."""

    families: frozenset[str]
    """Whose cards DRA offers on this node; none: it only serves the claims that there are."""
    impossible: str = ""
    """Why this node cannot do DRA; empty if it can, or as long as that is not known."""
    disabled: frozenset[str] = frozenset()
    """Names of cards that are not offered, as `pool` takes them."""
    by_index: bool = False
    evict: bool = False


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
        self._logged = ""
        """The trouble that was logged last."""
        self._said = (SessionPhase.NO_CARDS, "")
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

    def prepared(self) -> tuple[PreparedClaim, ...]:
        """The claims of this driver that are prepared."""
        claims = self._keeper.prepared.value.values()
        return tuple(one for one in claims if one.driver == self._dra.driver)

    @property
    def needed(self) -> bool:
        """Whether there is anything to serve."""
        return bool(self._wanted.value.families) or bool(self.prepared())

    async def run(self) -> None:
        """Serves until cancelled."""
        pause = Backoff(first=_RETRY_FIRST, longest=_RETRY_LONGEST)
        following = asyncio.create_task(self._follow())
        try:
            while True:
                await self._until_needed()
                try:
                    self._say(SessionPhase.REGISTERING)
                    async with self._ownership.held(self._standby) as still_ours:
                        sweep(self._dra.driver, self._kubelet_root)
                        await self._keeper.renew()
                        async with self._publishing():
                            while still_ours() and self.needed:
                                await self._serve(still_ours)
                                pause.reset()
                except OSError as error:
                    self._trouble(str(error))
                    await asyncio.sleep(pause.next())
        finally:
            following.cancel()
            self._say(SessionPhase.ENDED)

    async def _until_needed(self) -> None:
        async for _ in changes_of(self._wanted, self._keeper.prepared):
            if not self.needed:
                self._say(SessionPhase.NO_CARDS)
            elif self._node_name is None:
                self._trouble(
                    "the Node's name is unknown: set NODE_NAME, as k8s/daemonset.yaml does"
                )
            else:
                return

    async def _follow(self) -> None:
        """Keeps the pool true to cards, config and ledger."""
        async for _ in changes_of(self._snapshots, self._wanted, self._keeper.states):
            if self._wanted.value.impossible:
                self._say(*self._said)
            snapshot, wanted = self._snapshots.value, self._wanted.value
            if not snapshot.complete or not self._keeper.answered:
                continue  # never an empty pool, or one of doubts, before the real one
            held = self._keeper.held_by_containers()
            self._known.publish(
                pool(
                    snapshot,
                    dra=self._dra,
                    families=self._vendor_families,
                    by_index=wanted.by_index,
                )
            )
            self.offered.publish(
                pool(
                    snapshot,
                    dra=self._dra,
                    families=wanted.families,
                    disabled=wanted.disabled,
                    by_index=wanted.by_index,
                    evict=wanted.evict,
                    held=held,
                )
            )

    @contextlib.asynccontextmanager
    async def _publishing(self) -> AsyncIterator[None]:
        """Publishes the pool and sweeps claims while the context is open."""
        tasks = [
            asyncio.create_task(self.slices.run()),
            asyncio.create_task(self._sweep_claims()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep_claims(self) -> None:
        while True:
            await self.claims.sweep()
            await asyncio.sleep(_SWEEP_EVERY)

    async def _serve(self, still_ours: Callable[[], bool]) -> None:
        """Serves the kubelet on new sockets until they are lost, or nothing is to be served."""
        await self.claims.rebuild()
        served: Feed[tuple[PoolDevice, ...]] = Feed(self.offered.value or ())
        endpoint = Endpoint(
            driver=self._dra.driver,
            kubelet_root=self._kubelet_root,
            instance=self._instance,
            plugin=DraPlugin(self.claims.prepare, self.claims.unprepare),
            health=Health(self._node_name or "", served),
        )
        await endpoint.start()
        tasks = [
            asyncio.create_task(self._report(served)),
            asyncio.create_task(self._registration(endpoint)),
        ]
        try:
            while still_ours() and self.needed:
                await asyncio.sleep(until_tick(_LOOK_EVERY))
                if not endpoint.exists():
                    self._trouble("our socket was removed: registering again")
                    return
        finally:
            for task in tasks:
                task.cancel()
            served.close()  # the streams return, and the kubelet sees their end
            await endpoint.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self, served: Feed[tuple[PoolDevice, ...]]) -> None:
        """Hands the pool to the kubelet's health stream."""
        async for devices in self.offered.watch():
            if devices is not None:
                served.publish(devices)

    async def _registration(self, endpoint: Endpoint) -> None:
        """Follows what the kubelet makes of us, and notices its restarts."""
        asked = 0
        async for now in endpoint.registration.watch():
            if now.asked > asked:
                if asked:
                    log.info("the kubelet has been restarted", driver=self._dra.driver)
                    self._keeper.kubelet_lost()
                self.slices.ask_now()  # a kubelet that starts deletes the slices of its node
                asked = now.asked
            if now.registered:
                self._registrations = now.notifications
                self._logged = ""
                self._say(SessionPhase.REGISTERED)
            elif now.error:
                self._trouble(f"the kubelet refuses: {now.error}")

    def _standby(self, owner: str | None) -> None:
        if owner is None:
            self._say(SessionPhase.REGISTERING)
        else:
            self._say(SessionPhase.STANDBY, f"served by {owner}")

    def _trouble(self, reason: str) -> None:
        """As `_say`, for what keeps us from serving; logged once, however often it is tried."""
        self._say(SessionPhase.BLOCKED, reason)

    def _say(self, phase: SessionPhase, reason: str = "") -> None:
        self._said = (phase, reason)
        wanted = self._wanted.value
        if wanted.families and wanted.impossible and phase in _WAITING:
            # Also where another agent still serves: the rollout stops, and that one goes on.
            phase, reason = SessionPhase.BLOCKED, wanted.impossible
        if phase is SessionPhase.BLOCKED and reason != self._logged:
            self._logged = reason
            log.warning("the DRA driver does not serve", driver=self._dra.driver, reason=reason)
        self.status.publish(
            SessionStatus(
                resource=self._dra.driver,
                phase=phase,
                reason=reason,
                registrations=self._registrations,
            )
        )
