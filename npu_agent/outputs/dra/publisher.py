"""Keeps the node's ResourceSlices up to date.

The kubelet deletes its node's slices when it starts, a Node's go with it, and other clients may
change one: they are watched, and put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.core.plan import expressible
from npu_agent.core.state import COUNTERS
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, ErrorKind, dra, follow, node
from npu_agent.kube.client import WatchEvent
from npu_agent.kubelet.allocator import ClaimPool
from npu_agent.logs import Reporter, logger
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.slices import Slice, Writes
from npu_agent.text import listed
from npu_agent.ticks import set_within

log = logger(__name__)

_CALLS = ("write", "list", "watch")
"""Operations that can fail; the trouble of the first that does is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTiming:
    """Seconds."""

    retry_longest: float = 60.0
    """Between attempts to write: at most, and at random."""
    watch: follow.WatchTiming = field(default_factory=follow.WatchTiming)
    gap_first: float = 0.1
    """Between two rounds of writes: another client may write the same slices."""
    gap_longest: float = 1.0
    """Between rounds that follow each other."""
    calm: float = 10.0
    """Without a write after which the gap is short again."""


class SlicePublisher:
    """Publishes what a pool offers as ResourceSlices; `state` has the result.

    None in `ClaimPool.offered`, or the agent's end, leaves the slices as they are.

    Level-driven: a change of the devices, an unknown event of the watch, and a write of its own all
    have the slices listed and compared.
    """

    def __init__(
        self,
        api: Api,
        node_name: str,
        pool: ClaimPool,
        timing: SliceTiming = SliceTiming(),
    ) -> None:
        self.state = pool.slices
        self.confirmed = pool.confirmed
        self.live: Feed[Mapping[str, Slice] | None] = Feed(None)
        """The slices of the last listing, by name; None before the first."""
        self._api = api
        self._node_name = node_name
        self._driver = pool.dra.driver
        self._devices = pool.offered
        self._timing = timing
        self._dirty = self._clean = 0
        """Reasons so far to list the slices, and how many of them the last list has settled."""
        self._checks: Feed[int] = Feed(0)
        """The number of requested comparisons."""
        self._kubelets: Feed[int] = Feed(0)
        """Restarts of the kubelet: each ends every pause."""
        self._listing = asyncio.Lock()
        self._uid: str | None = None
        self._generation = 1
        self._dropped: frozenset[str] = frozenset()
        """Fields that this API server has not kept: they are not sent again."""
        self._logged: set[str] = set()
        self._restarted = False
        """Whether the API server may have restarted since the last listing."""
        self._errors: dict[str, ApiError] = {}
        self._reporter = Reporter(
            log, "cannot update the ResourceSlices", "the ResourceSlices can be updated again"
        )

    def ask_now(self) -> None:
        """Lists the slices now: the kubelet has restarted and may have deleted them."""
        self._kubelets.publish(self._kubelets.value + 1)
        self._check()

    @property
    def no_access(self) -> bool:
        """Whether the API server has no slices for us, or we have no right to list them."""
        error = self._errors.get("list")
        return error is not None and error.kind in (ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._follow())
                parts.create_task(self._write())
        finally:
            self.confirmed.publish(None)

    # --- what there is --------------------------------------------------------------------------

    async def _follow(self) -> None:
        await follow.follow(
            self._api,
            dra.watch_slices(self._node_name, self._driver),
            follow.WatchHooks(
                list_=self._list,
                see=self._see,
                opened=self._opened,
                failed=self._failed,
                hurry=lambda: self._kubelets.changed,
            ),
            self._timing.watch,
        )

    def _failed(self, doing: str, error: ApiError, trouble: bool) -> None:
        self._restarted |= error.kind in follow.BROKEN
        if trouble:
            self._set_error(doing, error)

    def _opened(self) -> None:
        self._set_error("watch", None)
        if not self._restarted:
            return
        # It may be another one now, with other features: what it drops is found again.
        self._restarted = False
        if self._dropped:
            self._dropped = frozenset()
            self._checks.publish(self._checks.value + 1)

    async def _list(self) -> str:
        """Lists the slices; returns the version to watch from."""
        async with self._listing:
            return await self._read()

    async def _read(self) -> str:
        """Lists the slices, one list at a time, so that the last one is the newest."""
        dirty = self._dirty
        try:
            listing = await dra.list_slices(self._api, self._node_name, self._driver)
        except ApiError:
            self._dirty += 1
            raise
        self._clean = dirty
        self.live.publish(listing.slices)
        self._set_error("list", None)
        foreign = listed(sorted(listing.foreign))
        if foreign and foreign != self.state.value.foreign:
            log.warning("ResourceSlices of another pool are ignored", slices=foreign)
        self._change(incomplete=slices.is_incomplete(listing.slices), foreign=foreign)
        return listing.resource_version

    def _see(self, event: WatchEvent) -> None:
        if event.object.spec.pool.name != self._node_name:
            if event.type != "MODIFIED":
                self._check()
            return

        known = (self.live.value or {}).get(event.object.metadata.name)
        version = known and known["metadata"].get("resourceVersion")
        if known if event.type == "DELETED" else version != event.version:
            self._check()

    @property
    def _stale(self) -> bool:
        """Whether the slices may differ from those that were listed last."""
        return self._dirty != self._clean

    def _check(self) -> None:
        self._dirty += 1
        self._checks.publish(self._checks.value + 1)

    # --- what there should be -------------------------------------------------------------------

    async def _write(self) -> None:
        timing = self._timing
        retry = Backoff(longest=timing.retry_longest)
        first = timing.gap_first
        gap = Backoff(first=first, longest=timing.gap_longest, least=first)
        loop = asyncio.get_running_loop()
        wrote_at = -timing.calm
        async for _ in changes_of(self._devices, self.live, self._checks):
            writes = self.state.value.writes
            await self._until_written(retry)
            if self.state.value.writes > writes:
                if loop.time() - wrote_at > timing.calm:
                    gap.reset()
                wrote_at = loop.time()
                await asyncio.sleep(gap.next())

    async def _until_written(self, retry: Backoff) -> None:
        while True:
            restarted = self._kubelets.changed
            try:
                await self._reconcile()
            except ApiError as error:
                self._dirty += 1  # it may still have taken effect
                self._change(published=False)
                self._set_error("write", error)
                if await set_within(restarted, retry.next(error.retry_after)):
                    retry.reset()
            else:
                retry.reset()
                self._set_error("write", None)
                return

    async def _reconcile(self) -> None:
        """Writes what differs; if nothing does, all is in place. Raises ApiError."""
        if self.live.value is None or self._devices.value is None:
            return
        async with self._listing:
            if self._stale:
                await self._read()
        live = self.live.value
        names = {item["metadata"]["name"] for item in self._writes().apply}
        if self._uid is None or names - live.keys():
            # One that has vanished may have done so with its Node, which was created again.
            self._uid = (await node.read(self._api, self._node_name)).uid
        writes = self._writes()
        if writes.delete or writes.apply:
            self.confirmed.publish(None)
            await self._execute(writes)
            self._check()
        elif not self._stale:
            self.confirmed.publish(self._devices.value)
            self._change(
                published=True,
                generation=self._generation,
                slices=len(live),
                devices=sum(len(item["spec"].get("devices") or ()) for item in live.values()),
                dropped=tuple(sorted(self._dropped)),
            )

    def _writes(self) -> Writes:
        live = self.live.value or {}
        self._generation = slices.newest(live, self._generation)
        return slices.writes(live, self._wanted, generation=self._generation)

    def _wanted(self, generation: int) -> Sequence[Slice]:
        return slices.slices(
            expressible(self._devices.value or (), self._dropped),
            driver=self._driver,
            node=self._node_name,
            uid=self._uid or "",
            generation=generation,
        )

    async def _execute(self, writes: Writes) -> None:
        before = self.live.value or {}
        for name in writes.delete:
            if await dra.delete_slice(self._api, name):
                self._change(writes=self.state.value.writes + 1)
        for wanted in writes.apply:
            sent = slices.keeping_times(wanted, before)
            try:
                reply = await dra.apply_slice(self._api, sent)
            except ApiError as error:
                # Kubernetes 1.34 and 1.35 have had other forms of counters, and no effect None.
                if error.status != 422 or not (fields := slices.newer(sent)):
                    raise
                log.warning("the API server refuses newer fields", error=error)
                self._drop(fields)
                return  # the rest has them too: it is planned again without
            self._change(writes=self.state.value.writes + 1)
            fields = slices.dropped(sent, reply)
            self._drop(fields)
            if not COUNTERS.isdisjoint(fields):
                return  # with the rest the pool would be complete, and its devices overlap
        log.info(
            "ResourceSlices written",
            node=self._node_name,
            slices=len(writes.apply),
            deleted=len(writes.delete),
            devices=sum(len(item["spec"].get("devices", ())) for item in writes.apply),
            generation=slices.newest({item["metadata"]["name"]: item for item in writes.apply}),
        )

    def _drop(self, fields: tuple[str, ...]) -> None:
        self._dropped |= set(fields)
        if unknown := set(fields) - self._logged:
            self._logged |= unknown
            log.warning(
                "the API server drops fields of ResourceSlices: a feature gate is off there",
                fields=", ".join(sorted(unknown)),
            )

    def _set_error(self, doing: str, error: ApiError | None) -> None:
        if error:
            self._errors[doing] = error
        else:
            self._errors.pop(doing, None)
        first = next((self._errors[call] for call in _CALLS if call in self._errors), None)
        if first:
            self._reporter.failed(first)
        else:
            self._reporter.works()
        self._change(trouble=first and str(first))

    def _change(self, **changes: Any) -> None:
        self.state.publish(replace(self.state.value, **changes))
