"""Prepares claims before a Pod starts, and unprepares them after it has ended.

Start reading at `Claims._prepare`. Its steps leave nothing behind if one of them fails: read the
claim, ask `npu_agent.core.plan` for its devices, hold them in the ledger, write CDI spec and
record, answer. The two files are written at the same time: a spec without a claim in the record is
removed by the next agent, and one that the record's claim lacks is written by it
(`npu_agent.outputs.dra.upkeep`). A refusal's text is in the Pod's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from npu_agent import text
from npu_agent.core import plan
from npu_agent.core.counts import DraCounts
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.ledger import PreparedClaim, PreparedDevice, footprint
from npu_agent.core.offer import Device
from npu_agent.core.pool import AllocatedClaim, AllocatedDevice, ClaimRef
from npu_agent.feed import Feed
from npu_agent.kube import Api
from npu_agent.kube.dra import ClaimReader
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kubelet import cdi
from npu_agent.kubelet.allocator import Allocator, ClaimPool
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.logs import logger
from npu_agent.outputs.dra.upkeep import ClaimUpkeep, is_whole
from npu_agent.ticks import set_within

log = logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTiming:
    """The times of a prepare, in seconds; the kubelet waits 45 s for its answer."""

    ready: float = 15.0
    """Longest wait after the start until cards and holders are known."""
    holder_ends: float = 35.0
    """From the call, for a holder of a device to end. A Pod that was deleted by force may run for
    its terminationGracePeriodSeconds, 30 by default. A kubelet that is refused comes back after 60
    to 90 s (syncFrequency)."""
    identify: float = 2.0
    """Longest wait of an Unprepare for the UID of a Pod that has come to share its claim."""
    containers: float = 2.0
    """Longest wait for the kubelet's answer which containers use a claim of several requests."""


@dataclass(eq=False)
class _Call:
    """A call to prepare claims that is under way."""

    began: float
    unprepared: set[str] = field(default_factory=set)
    """UIDs of claims that were unprepared since it began."""

    def check_not_unprepared(self, claim: AllocatedClaim) -> None:
        if claim.uid in self.unprepared:
            raise RefusalError(
                Refusal.UNFIT, f"{claim} was unprepared meanwhile: its Pod has ended"
            )


class Claims:
    """Prepares claims for this node's Pods, one change at a time, and counts them in `counts`."""

    def __init__(
        self,
        api: Api,
        pool: ClaimPool,
        allocator: Allocator,
        node_name: str,
        cdi_root: Path,
        timing: PrepareTiming = PrepareTiming(),
    ) -> None:
        """Writes nothing yet."""
        self.counts = DraCounts()
        self.ready: Feed[bool] = Feed(False)
        """Whether the node is this agent's and its claims are known; calls wait for it."""
        self._pool = pool
        self._node_name = node_name
        self._allocator = allocator
        self._reader = ClaimReader(api, pool.dra.driver)
        self._specs = cdi.ClaimSpecs(cdi_root, pool.dra.claim_kind)
        self._timing = timing
        self.upkeep = ClaimUpkeep(
            self._reader, pool, allocator, node_name, self._specs, ready=timing.ready
        )
        self._changes: set[asyncio.Task[Any]] = set()
        self._calls: WeakSet[_Call] = WeakSet()

    async def prepare(self, refs: Sequence[ClaimRef]) -> dict[str, tuple[v1.Device, ...] | str]:
        """Returns each claim's devices by UID, or why it cannot be prepared."""
        call = _Call(time.monotonic())
        self._calls.add(call)
        outcomes = await asyncio.gather(*(self._outcome(ref, call) for ref in refs))
        return {ref.uid: outcome for ref, outcome in zip(refs, outcomes, strict=True)}

    async def unprepare(self, refs: Sequence[ClaimRef]) -> str:
        """Ends the claims; returns why not, and "" if it did. The Pod stays Terminating until then.

        So it needs no card, no API server and no claim; `ClaimUpkeep.sync_specs` removes what stays
        on the disk. The API server is asked, for 2 s, only if the UID of a Pod is missing. Only an
        agent that does not own the node refuses: its owner would treat the claims as prepared.
        """
        await self.ready.until(bool)
        for ref in refs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.identify):
                    await self.upkeep.identify(ref.uid)
        if not await self._uncancellable(self._end_all(refs)):
            return self._allocator.why_not_owned
        self.counts.unprepares["unprepared"] += len(refs)
        return ""

    async def _outcome(self, ref: ClaimRef, call: _Call) -> tuple[v1.Device, ...] | str:
        result = "failed"
        try:
            prepared = await self._prepare(ref, call)
        except RefusalError as error:
            result = "refused"
            return str(error)
        except ApiError as error:
            return f"{ref} cannot be read: {error}"
        except OSError as error:
            return f"{ref} cannot be prepared: {text.reason(error)}"
        else:
            result = "prepared"
            return prepared
        finally:
            self.counts.prepared(result, time.monotonic() - call.began)

    async def _prepare(self, ref: ClaimRef, call: _Call) -> tuple[v1.Device, ...]:
        """Prepares a claim; while a device is held, it tries again after each change of the ledger.

        Raises:
            ApiError: it cannot be read.
            RefusalError: it is not to be prepared.
            OSError: the disk cannot be written; then all is as it was before.
        """
        await self._until_node_is_known()
        # An API server takes longer than the kubelet's checkpoint: both are read at the same time.
        claim, _ = await asyncio.gather(self._read(ref), self._allocator.read_checkpoint())
        joined: bool | None = None
        while True:
            changed = self._allocator.states.changed  # before it is tried: no change is missed
            try:
                self._devices(ref, claim)  # refuses before what the kubelet may be slow to answer
                if joined is None:
                    joined = await self._is_single_container(claim)
                change = self._hold_and_write(ref, claim, call, joined=joined)
                return await self._uncancellable(change)
            except RefusalError as error:
                if error.kind is not Refusal.HELD:
                    raise
                if not await self._until_holders_change(changed, call):
                    raise

    async def _hold_and_write(
        self, ref: ClaimRef, claim: AllocatedClaim, call: _Call, *, joined: bool
    ) -> tuple[v1.Device, ...]:
        """Holds a claim's devices, in ledger and files; `joined` is as `PreparedClaim.joined`."""
        async with self.upkeep.changing:
            call.check_not_unprepared(claim)
            devices = self._devices(ref, claim)
            previous = self._allocator.prepared.value.get(claim.uid)
            prepared = self._prepared(claim, devices, joined=joined)
            await self._hold(prepared, devices)
            try:
                await self._write_spec_and_record(prepared, devices)
            except OSError:
                await self._undo(claim.uid, previous)
                raise
        return self._answer(prepared)

    async def _until_node_is_known(self) -> None:
        """Waits until the node is ours, and it is known what is out of service, held or lost."""
        await self.ready.until(bool)
        await self._allocator.cordons.settled()
        await self._allocator.until_known(self._timing.ready)
        if self._allocator.drivers_in_recovery.value:
            await self.upkeep.recover()

    async def _read(self, ref: ClaimRef) -> AllocatedClaim:
        """Reads the claim, from the record if the API server fails and it is prepared."""
        prepared = self._allocator.prepared.value.get(ref.uid)
        try:
            return await self._reader.read(ref.namespace, ref.name)
        except ApiError as error:
            if error.kind is ErrorKind.NOT_FOUND or not is_whole(prepared):
                raise
            log.warning("prepared again from the record: the claim cannot be read", claim=ref.name)
            return _claim_from_record(prepared)
        except ValueError as error:
            raise RefusalError(
                Refusal.INVALID, f"the API server's {ref} cannot be used: {error}"
            ) from error

    def _devices(self, ref: ClaimRef, claim: AllocatedClaim) -> tuple[Device, ...]:
        """Returns a claim's devices; raises RefusalError if its Pods must not have one of them."""
        return plan.claim_devices(
            self._allocator.facts(),
            ref,
            claim,
            driver=self._pool.dra.driver,
            pool=self._node_name,
            devices=self._pool.by_name.value,
        )

    async def _is_single_container(self, claim: AllocatedClaim) -> bool:
        """Whether all requests of a claim are of one container.

        A container has the variables of the last CDI device that the runtime applies, so each of
        its requests needs those of all. A container that names one of several requests must not
        have the others'.
        """
        requests = {device.request for device in claim.devices}
        if len(requests) == 1 or all(map(cdi.EXTENDED.fullmatch, requests)):
            return True  # and the spec tells those of extended resources apart
        containers = await self._allocator.containers_of(
            claim.namespace, claim.name, self._timing.containers
        )
        if not containers:
            prepared = self._allocator.prepared.value.get(claim.uid)
            return prepared is not None and prepared.joined
        return all(len(of_pod) == 1 for of_pod in containers)

    async def _until_holders_change(self, changed: asyncio.Event, call: _Call) -> bool:
        """Waits for a change of the ledger; returns whether one came in time."""
        self._allocator.pod_resources.ask()
        until = call.began + self._timing.holder_ends
        if not await set_within(changed, until - time.monotonic()):
            return False
        await self._allocator.read_checkpoint()
        return True

    def _prepared(
        self, claim: AllocatedClaim, devices: Sequence[Device], *, joined: bool
    ) -> PreparedClaim:
        return PreparedClaim(
            driver=self._pool.dra.driver,
            uid=claim.uid,
            namespace=claim.namespace,
            name=claim.name,
            pods=claim.pods,
            pod_uids=claim.pod_uids,
            joined=joined,
            devices=tuple(
                PreparedDevice(
                    request=allocated.request,
                    pool=allocated.pool,
                    device=allocated.name,
                    admin=allocated.admin,
                    footprint=footprint(device),
                )
                for allocated, device in zip(claim.devices, devices, strict=True)
            ),
        )

    async def _hold(self, prepared: PreparedClaim, devices: Sequence[Device]) -> None:
        """Holds in the ledger what is for the claim's Pods alone; raises RefusalError."""
        pairs = zip(prepared.devices, devices, strict=True)
        await self._allocator.prepare(prepared, [device for use, device in pairs if not use.admin])

    async def _write_spec_and_record(
        self, prepared: PreparedClaim, devices: Sequence[Device]
    ) -> None:
        written = await asyncio.gather(
            self._specs.write(prepared, devices),
            self._allocator.saved(),
            return_exceptions=True,  # both have come to their end before one is undone
        )
        for error in filter(None, written):
            raise error

    async def _undo(self, uid: str, previous: PreparedClaim | None) -> None:
        """Puts ledger and record back as they were."""
        if previous:  # its Pods still run
            self._allocator.put_back(previous)
        else:
            await self.upkeep.end(uid)
        with contextlib.suppress(OSError):  # logged; it is tried again
            await self._allocator.saved()

    def _answer(self, prepared: PreparedClaim) -> tuple[v1.Device, ...]:
        return tuple(
            v1.Device(
                request_names=[device.request],
                pool_name=device.pool,
                device_name=device.device,
                cdi_device_ids=[self._specs.device_name(prepared.uid, device.request)],
            )
            for device in prepared.devices
        )

    async def _uncancellable(self, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change to its end, also if the caller is cancelled."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _end_all(self, refs: Sequence[ClaimRef]) -> bool:
        """Saves the record; returns whether the next agent will know of the change."""
        uids = {ref.uid for ref in refs}
        async with self.upkeep.changing:
            if not self._allocator.owned:
                return False
            for uid in uids:
                await self.upkeep.end(uid)
            for call in self._calls:
                call.unprepared |= uids
            if self._allocator.needs_recovery:
                self.upkeep.unprepared |= uids
            try:
                await self._allocator.saved()
            except OSError:  # logged; it is tried again
                return self._allocator.owned
            return True


def _claim_from_record(prepared: PreparedClaim) -> AllocatedClaim:
    return AllocatedClaim(
        namespace=prepared.namespace,
        name=prepared.name,
        uid=prepared.uid,
        pods=prepared.pods,
        pod_uids=prepared.pod_uids,
        devices=tuple(
            AllocatedDevice(
                request=device.request,
                pool=device.pool,
                name=device.device,
                admin=device.admin,
            )
            for device in prepared.devices
        ),
    )
