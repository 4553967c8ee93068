"""A vendor's DRA driver on this node: own the node, serve the kubelet, publish the pool.

Start reading at `Driver.run`. The kubelet is served as long as DRA offers cards here, and also as
long as a claim is prepared: a Pod whose claim nobody unprepares stays Terminating for ever. It is
served, too, until the last card that goes to the device plugin has left the slices; where these
cannot be seen it is not, so that the kubelet deletes them.

At a rollout the kubelet has this instance before the one before it ends (`Driver._register`): a
claim that finds no driver is late by a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.backoff import Backoff
from npu_agent.core.api_mode import ApiMode
from npu_agent.core.claim import ClaimRef
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import PreparedClaim
from npu_agent.core.pool import DraNames, Effect, PoolDevice, Taint, pool
from npu_agent.core.state import SessionPhase
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, resourceclaims
from npu_agent.kubelet.allocation_store import AllocationStore
from npu_agent.kubelet.api_modes import ApiModes
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.registration import Standing
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.dra.claims import Claims, LocalPool
from npu_agent.outputs.dra.endpoint import Endpoint, instance_of, sweep_all
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.service import DraPlugin, Health, Prepared
from npu_agent.ticks import until_tick

log = logger(__name__)

_LOOK_EVERY = 1.0
"""Seconds between checks of our sockets; a stat each."""
_LINGER = 30.0
"""Seconds to go on after the last claim: a kubelet that has not got our answer to Unprepare asks
again, after 10 to 15 s, and without a driver its Pod would stay Terminating."""
_REGISTERED = 5.5
"""Seconds for which the kubelet may take to find us while the agent before this one still serves;
that one waits for 6."""
_SWEEP_EVERY = 600.0
"""Seconds between two searches for claims that ended without our being asked."""
_RETRY_FIRST, _RETRY_LONGEST = 0.1, 2.0
"""Seconds between attempts to serve, or to write the record, while the kubelet's directories cannot
be used."""
_GRACE = 5.0
"""Seconds from the API server's word that the slices are without a card until the device plugin may
list it: a claim that the scheduler has allocated just before that is prepared."""
_CONFIRM_EVERY = 0.2
"""Seconds between two checks meanwhile."""
_UNKNOWN = "it is not known yet whether this node can do DRA: the API server has not said"
_WIPED = 60.0
"""Seconds without being registered after which there are no slices on a node whose driver may not,
or cannot, list them: a kubelet deletes those of a driver that has not been registered for 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the config says of DRA."""

    families: frozenset[str]
    """Whose cards DRA offers on this node; none: it only serves the claims that there are."""
    by_index: bool = False
    partitions: bool = False
    """Whether cards are offered in all of their widths, as `pool` takes it."""
    evict: bool = False
    impossible: str | None = ""
    """Why this node cannot do DRA; "" where it can, None as long as the API server has not said."""


@dataclass(frozen=True, slots=True)
class _Listening:
    """What serves the kubelet on one pair of sockets."""

    endpoint: Endpoint
    plugin: DraPlugin
    health: Health
    served: Feed[tuple[PoolDevice, ...] | None]
    """The devices whose health is reported; None as long as another agent reports it."""


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
        store: AllocationStore,
        snapshots: Feed[Snapshot],
        wanted: Feed[Wanted],
        modes: ApiModes,
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
            store: the ledger.
            snapshots: the cards.
            wanted: what to offer.
            modes: which cards are offered here.
            api: for claims and slices.
            cdi_root: where container runtimes read CDI specs.
        """
        self._standing = Standing(dra.driver)
        self.status = self._standing.status
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
        self._store = store
        self._snapshots = snapshots
        self._wanted = wanted
        self._modes = modes
        self._unsaved: frozenset[str] = frozenset()
        """The IDs of cards that are about to be in slices, and that the disk does not know yet."""
        self._unwritten: Feed[str] = Feed("")
        """Why the disk could not be made to know them; "" where it was, or there are none."""
        self._again: Feed[int] = Feed(0)
        """How often that was to be tried again."""
        self._ours: Feed[bool] = Feed(False)
        """Whether the node is ours; calls of the kubelet wait for it."""
        self._listening: _Listening | None = None
        """What serves the kubelet."""
        self._beside: list[asyncio.Task[None]] = []
        """What runs beside the serving; none of it ends by itself."""
        pool_name = node_name or ""
        self.claims = Claims(
            fetch=lambda namespace, name: resourceclaims.get(api, namespace, name),
            pool=LocalPool(dra=dra, name=pool_name, devices=self._known, refusal=modes.refusal),
            store=store,
            cdi_root=cdi_root,
        )
        self.counts = self.claims.counts
        self.slices = SlicePublisher(
            api=api, node_name=pool_name, driver=dra.driver, devices=self.offered
        )
        self._uncounted = self.slices.state.map(lambda state: state.uncounted)
        """Whether cards cannot be cut, as the API server does not count their cores."""
        self._untainted = self.slices.state.map(lambda state: state.untainted)
        """Whether devices with a taint are left out, as the API server drops taints."""

    def prepared(self) -> tuple[PreparedClaim, ...]:
        """The claims of this driver that are prepared."""
        claims = self._store.prepared.value.values()
        return tuple(one for one in claims if one.driver == self._dra.driver)

    @property
    def needed(self) -> bool:
        """Whether there is anything to serve."""
        return bool(self._wanted.value.families) or self._in_use

    @property
    def _in_use(self) -> bool:
        """Whether there is anything to serve although the config does not ask for DRA."""
        if self._dra.driver in self._store.unrecorded.value:
            return True
        if self._wanted.value.families:
            return bool(self.prepared())
        return bool(self.prepared()) or bool(self._sliced())

    @property
    def _serves(self) -> bool:
        """Whether there is anything to serve, and somebody to serve it to."""
        return self._in_use or (self.needed and self._wanted.value.impossible == "")

    @property
    def _leaves_slices(self) -> bool:
        """Whether the slices are the kubelet's to delete: they cannot be seen, nor is one needed.

        So it is where the component of DRA was removed: the right to see them goes with it.
        """
        needed = self._wanted.value.families or self.prepared()
        return self.slices.no_access and not needed

    @property
    def _registers(self) -> bool:
        """Whether the kubelet is to have us: as long as it does, it deletes no slices."""
        return self._serves and not self._leaves_slices

    def _sliced(self) -> set[str]:
        """The IDs of the cards that our slices may have."""
        sliced = self._store.published.value
        return {id_ for id_, one in sliced.items() if one.driver == self._dra.driver}

    async def run(self) -> None:
        """Serves until cancelled."""
        pause = Backoff(first=_RETRY_FIRST, longest=_RETRY_LONGEST)
        self._beside = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(self._save_again()),
        ]
        try:
            while True:
                await self._until_it_serves()
                try:
                    async with self._ownership.held(
                        self._standing.waits_for, self._register
                    ) as still_ours:
                        sweep_all(self._dra.driver, self._kubelet_root)
                        await self._store.renew()
                        with contextlib.suppress(OSError):  # then new cards stay out of slices
                            await self._store.saved()
                        await self.claims.recover()  # before anything is swept or prepared
                        self._ours.publish(True)
                        async with self._publishing():
                            while still_ours() and self._serves:
                                try:
                                    if self._leaves_slices:
                                        await self._until_wiped(still_ours)
                                        continue
                                    await self._serve(still_ours)
                                    pause.reset()  # those sockets were made
                                except OSError as error:
                                    self._standing.fails(str(error))  # slices and claims go on
                                    await asyncio.sleep(pause.next())
                except OSError as error:
                    self._standing.fails(str(error))
                    await asyncio.sleep(pause.next())
                finally:
                    self._ours.publish(False)
                    await self._close()
        finally:
            await _ended(self._beside)
            self._standing.becomes(SessionPhase.ENDED)

    async def _until_it_serves(self) -> None:
        async for _ in changes_of(
            *(self._wanted, self._store.prepared, self._store.published, self._store.unrecorded)
        ):
            if not self.needed:
                self._standing.becomes(SessionPhase.NO_CARDS)
            elif self._node_name is None:
                self._standing.fails(
                    "the Node's name is unknown: set NODE_NAME, as k8s/daemonset.yaml does"
                )
            elif not self._serves:
                if reason := self._wanted.value.impossible:
                    self._standing.fails(reason)
                else:
                    self._standing.becomes(SessionPhase.WAITING, _UNKNOWN)
            else:
                return

    async def _follow(self) -> None:
        """Keeps the pool true to cards, config and ledger."""
        store, seen = self._store, None
        async for _ in changes_of(
            *(self._snapshots, self._wanted, self._uncounted, self._untainted),
            *(store.states, store.asked, store.unrecorded),
            *(*self._modes.feeds, self._again),
        ):
            snapshot, wanted = self._snapshots.value, self._wanted.value
            if not self.needed or not snapshot.complete or not store.asked.value:
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
            failed = False
            while self._notes() and not failed:
                failed = not await self._saves()
            if not self._unsaved:
                self._unwritten.publish("")
            placed = self._placed()
            if placed or not self._unsaved or self.offered.value is not None:  # as above
                self.offered.publish(placed)

    def _notes(self) -> bool:
        """Notes the cards that are about to be in slices.

        Returns whether there are any that the disk does not know. The answer holds until the next
        await.
        """
        modes, before = self._modes.now(), self._store.published.value
        self._store.slicing(
            self._dra.driver,
            (
                state
                for state in self._snapshots.value.cards
                if state.card.family in self._vendor_families and modes[state.id].published
            ),
        )
        now = self._store.published.value
        fresh = {id_ for id_, one in now.items() if one != before.get(id_)}
        self._unsaved = (self._unsaved | fresh) & now.keys()
        return bool(self._unsaved)

    async def _saves(self) -> bool:
        """Has the disk know of the cards that are about to be in slices; returns whether it does.

        While it does not they stay out: the next agent would not know that they are in slices. All
        others go on, with their taints.
        """
        about = self._unsaved
        try:
            await self._store.saved()
        except OSError as error:
            if self._unwritten.publish(str(error)):
                log.warning(
                    "cards stay out of the ResourceSlices until the record can be written",
                    driver=self._dra.driver,
                    cards=", ".join(sorted(about)),
                    reason=str(error),
                )
            return False
        self._unsaved -= about
        return True

    async def _save_again(self) -> None:
        """Has it tried again, with pauses, what `_saves` could not do."""
        async for _ in changes_of(self._unwritten):
            pause = Backoff(first=_RETRY_FIRST, longest=_RETRY_LONGEST)
            while self._unwritten.value:
                await asyncio.sleep(pause.next())
                self._again.publish(self._again.value + 1)

    def _placed(self) -> tuple[PoolDevice, ...]:
        """The devices whose cards are to be in slices."""
        modes, wanted = self._modes.now(), self._wanted.value
        cut = wanted.partitions and not self._uncounted.value
        here = {id_ for id_, place in modes.items() if place.published} - self._unsaved
        # The scheduler counts the cores of claims for devices that it sees, and of no others.
        seen = {
            one.name
            for one in self._known.value or ()
            if one.device.card_id in here
            and (cut or not one.is_part)
            and not (one.taints and self._untainted.value)
        }
        devices = pool(
            self._snapshots.value,
            dra=self._dra,
            families=self._vendor_families,
            by_index=wanted.by_index,
            partitions=cut,
            evict=wanted.evict,
            held=self._store.held_by_containers(seen),
        )
        leaving = Taint(key=f"{self._dra.driver}/moving", effect=Effect.NO_SCHEDULE)
        return tuple(
            replace(one, taints=(*one.taints, leaving))
            if modes[one.device.card_id] is ApiMode.DRAINING_FROM_DRA
            else one
            for one in devices
            if one.device.card_id in here
        )

    async def _confirm(self) -> None:
        """Notes which cards have left the slices, some seconds after the API server said so."""
        since: dict[str, float] = {}
        async for _ in changes_of(self.slices.in_place, self.offered, self._store.published):
            while leaving := self._leaving():
                left, now = leaving if self._in_place() else set(), time.monotonic()
                since = {id_: since.get(id_, now) for id_ in leaving if id_ in since or id_ in left}
                self._store.unsliced({id_ for id_ in left if now - since[id_] >= _GRACE})
                if not since:
                    break
                await asyncio.sleep(_CONFIRM_EVERY)

    def _leaving(self) -> set[str]:
        """The cards that are not to be in slices any more."""
        stay = {one.device.card_id for one in self.offered.value or ()}
        stay |= {id_ for id_, place in self._modes.now().items() if place.published}
        return self._sliced() - stay

    def _in_place(self) -> bool:
        """Whether the API server has confirmed what is offered, and nothing else."""
        return self.offered.value is not None and self.slices.in_place.value == self.offered.value

    async def _until_wiped(self, still_ours: Callable[[], bool]) -> None:
        """Waits, no longer registered, until the kubelet has deleted the slices, and notes that.

        Ends before that if they can be seen, or one is needed.
        """
        since = time.monotonic()
        self._standing.fails(
            "the ResourceSlices cannot be listed: waiting for the kubelet to delete them"
        )
        while still_ours() and self._leaves_slices:
            if time.monotonic() - since >= _WIPED:
                log.warning(
                    "the ResourceSlices cannot be listed: the kubelet has deleted them by now",
                    driver=self._dra.driver,
                )
                self._store.unsliced(self._sliced())
                return
            await asyncio.sleep(until_tick(_LOOK_EVERY))
            _check(*self._beside)

    @contextlib.asynccontextmanager
    async def _publishing(self) -> AsyncIterator[None]:
        """Publishes the pool and sweeps claims while the context is open."""
        tasks = [
            asyncio.create_task(self.slices.run()),
            asyncio.create_task(self._collect_garbage()),
            asyncio.create_task(self._keep_specs()),
            asyncio.create_task(self._confirm()),
        ]
        self._beside += tasks
        try:
            yield
        finally:
            self._beside = [task for task in self._beside if task not in tasks]
            await _ended(tasks)

    async def _collect_garbage(self) -> None:
        while True:
            await self.claims.collect_garbage()
            await asyncio.sleep(_SWEEP_EVERY)

    async def _keep_specs(self) -> None:
        while True:
            await self.claims.recover()  # if the kubelet had not said before what is in use
            await self.claims.refresh_consumers()
            await self.claims.sync_specs()
            await asyncio.sleep(cdi.LOOK_EVERY)

    async def _register(self) -> None:
        """Has the kubelet find this instance while the one before it still serves.

        From then on the kubelet calls this one, and each call waits until the node is ours.
        """
        if not self._registers or self._listening:
            return
        try:
            endpoint = (await self._listen()).endpoint
            async with asyncio.timeout(_REGISTERED):
                await endpoint.registered()
        except (OSError, TimeoutError) as error:
            log.warning(
                "not registered while the agent before this one serves",
                driver=self._dra.driver,
                reason=str(error) or "the kubelet has not found it in time",
            )

    async def idle(self) -> None:
        """Returns when no call of the kubelet is under way."""
        if self._listening:
            await self._listening.plugin.calls.until(lambda calls: not calls)

    async def _listen(self) -> _Listening:
        """Serves the kubelet on new sockets."""
        served: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        health = Health(self._node_name or "", served)
        plugin = DraPlugin(self._prepare, self._unprepare)
        endpoint = Endpoint(
            driver=self._dra.driver,
            kubelet_root=self._kubelet_root,
            instance=self._instance,
            plugin=plugin,
            health=health,
        )
        await endpoint.start()
        self._listening = _Listening(endpoint, plugin, health, served)
        return self._listening

    async def _close(self) -> None:
        """Ends what `_listen` began."""
        if listening := self._listening:
            self._listening = None
            listening.served.close()  # the streams return, and the kubelet sees their end
            await listening.endpoint.close()

    async def _prepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, Prepared]:
        await self._ours.until(bool)
        return await self.claims.prepare(refs)

    async def _unprepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, str | None]:
        await self._ours.until(bool)
        return await self.claims.unprepare(refs)

    async def _serve(self, still_ours: Callable[[], bool]) -> None:
        """Serves the kubelet until its sockets are lost, or nothing is to be served."""
        listening = self._listening or await self._listen()
        endpoint = listening.endpoint
        tasks = [
            asyncio.create_task(self._report(listening.served)),
            asyncio.create_task(self._registration(endpoint, listening.health)),
        ]
        until = 0.0
        try:
            while still_ours() and (self._registers or time.monotonic() < until):
                if self.prepared():
                    until = time.monotonic() + _LINGER
                await asyncio.sleep(until_tick(_LOOK_EVERY))
                if not endpoint.exists():
                    self._standing.fails("our socket was removed: registering again")
                    return
                _check(*self._beside, *tasks)
        finally:
            try:
                await self._close()
            finally:
                await _ended(tasks)

    async def _report(self, served: Feed[tuple[PoolDevice, ...] | None]) -> None:
        """Hands the pool to the kubelet's health stream, and what claims hold and is not in it."""
        async for _ in changes_of(self.offered, self._known, self._store.prepared):
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
                self._standing.fails(f"the kubelet refuses: {now.error}")
            elif self._unwritten.value:
                self._standing.becomes(SessionPhase.BLOCKED, self._unwritten.value)
            elif streamed and not health.streams.value:
                self._standing.becomes(
                    SessionPhase.REGISTERING, "the kubelet has closed its stream of health"
                )
            elif now.registered:
                self._standing.registered(now.notifications)


def _check(*tasks: asyncio.Task[None]) -> None:
    """Raises what one of them has failed with: the whole part is started again."""
    for task in tasks:
        if task.done():
            task.result()


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits for their end, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
