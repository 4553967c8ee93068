"""Prepares claims before a Pod starts, and unprepares them after it has ended.

Start reading at `Claims.prepare`. Its order leaves nothing behind if a step fails: read the claim,
ask the ledger, write CDI spec and record, answer. The two files are written at the same time: a
spec without a claim in the record is removed by the next agent, and one that the record's claim
lacks is written by it (`sync_specs`). A refusal's text is in the Pod's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from weakref import WeakSet

from npu_agent import text
from npu_agent.core import plan
from npu_agent.core.counts import DraCounts
from npu_agent.core.grant import Refusal, RefusalError, grant
from npu_agent.core.ledger import Assignment, PreparedClaim, PreparedDevice, footprint
from npu_agent.core.offer import Device
from npu_agent.core.pool import ClaimRef
from npu_agent.feed import Feed
from npu_agent.kube import Api, dra, objects
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.objects import ResourceClaim, Result
from npu_agent.kubelet import cdi
from npu_agent.kubelet.allocator import Allocator, ClaimPool
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.logs import Reporter, logger
from npu_agent.ticks import set_within

log = logger(__name__)

T = TypeVar("T")

_CONCURRENT_READS = 8
"""As many as `Api` makes: waiting there counts for a call's deadline."""
_EXTENDED = re.compile(r"(container-\d+)-request-\d+")
"""Requests of a claim that the scheduler made for a Pod with extended resources; group 1 is the
container (k8s.io/kubernetes, extendeddynamicresources.go)."""


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
        self._api = api
        self._pool = pool
        self._devices = pool.known.map(
            lambda devices: {listed.name: listed.device for listed in devices or ()}
        )
        """All devices of this node, by name."""
        self._dra = pool.dra
        self._node_name = node_name
        self._allocator = allocator
        self._specs = cdi.SpecDirectory(cdi_root)
        self._timing = timing
        self._changing = asyncio.Lock()
        self._reading = asyncio.Semaphore(_CONCURRENT_READS)
        self._changes: set[asyncio.Task[Any]] = set()
        self._calls: WeakSet[_Call] = WeakSet()
        self._unprepared: set[str] = set()
        """UIDs of claims that were unprepared before the recovery of others has ended."""
        self._orphans: set[str] = set()
        """UIDs of claims that the last `collect_garbage` found gone and unused."""
        self._recovering = Reporter(log, "cannot read a claim that is in use and not recorded")
        self._syncing = Reporter(log, "cannot repair the CDI specs of claims")

    async def prepare(self, refs: Sequence[ClaimRef]) -> dict[str, tuple[v1.Device, ...] | str]:
        """Returns each claim's devices by UID, or why it cannot be prepared."""
        call = _Call(time.monotonic())
        self._calls.add(call)
        outcomes = await asyncio.gather(*(self._outcome(ref, call) for ref in refs))
        return {ref.uid: outcome for ref, outcome in zip(refs, outcomes, strict=True)}

    async def unprepare(self, refs: Sequence[ClaimRef]) -> str:
        """Ends the claims; returns why not, and "" if it did. The Pod stays Terminating until then.

        So it needs no card, no API server and no claim; `sync_specs` removes what stays on the
        disk. The API server is asked, for 2 s, only if the UID of a Pod is missing. Only an agent
        that does not own the node refuses: its owner would treat the claims as prepared.
        """
        await self.ready.until(bool)
        for ref in refs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.identify):
                    await self._identify(ref.uid)
        if not await self._uncancellable(self._end_all(refs)):
            return self._allocator.why_not_owned
        self.counts.unprepares["unprepared"] += len(refs)
        return ""

    async def recover(self) -> None:
        """Finds claims in use that the record lacks: it may be lost, or an older one put back.

        To be called before anything is prepared. The API server knows the claim, and pod-resources
        its devices: until both have answered, `Allocator.drivers_in_recovery` stops grants.
        """
        in_use = self._allocator.claim_uses()
        if not self._allocator.needs_recovery or in_use is None:
            return
        uses: dict[tuple[str, str], list[Assignment]] = {}
        for use in in_use:
            if use.resource == self._dra.driver:
                uses.setdefault((use.namespace, use.claim), []).append(use)
        for (namespace, name), of_claim in uses.items():
            if not self._lacks(of_claim):
                continue
            try:
                await self._ready()  # else the cores that it has are not known
                claim = await self._read(namespace, name)
            except (RefusalError, ApiError, ValueError) as error:
                self._recovering.failed(f"{namespace}/{name}: {error}")
                return  # it is tried again
            async with self._changing:
                entry = self._allocator.prepared.value.get(claim.uid)
                devices = {device.device for device in entry.devices} if entry else set()
                # A kubelet lists the devices of a claim's earlier allocations too.
                is_known = entry and devices.issuperset(result.device for result in claim.results)
                if is_known or claim.uid in self._unprepared or not self._lacks(of_claim):
                    continue
                prepared = self._recovered(claim, of_claim)
                log.warning(
                    "found a claim that is in use and not recorded",
                    claim=f"{namespace}/{name}",
                    devices=",".join(device.device for device in prepared.devices),
                )
                await self._record(prepared)
        self._recovering.works()
        self._unprepared.clear()
        self._allocator.recovery_done()

    def _lacks(self, uses: Iterable[Assignment]) -> bool:
        """Whether any of these uses is by a claim, or for a device, that is not prepared."""
        return not all(map(self._allocator.states.value.has_claim, uses))

    def _recovered(self, claim: ResourceClaim, uses: Iterable[Assignment]) -> PreparedClaim:
        used = {use.device for use in uses}
        pods = {use.pod for use in uses}
        here = self._devices.value
        requests = {result.device: result.request for result in claim.results}
        return replace(
            self._prepared(claim, ()),
            pods=tuple(sorted(pods)),
            unidentified=tuple(sorted(pods.difference(claim.users))),
            devices=tuple(
                PreparedDevice(
                    request=requests.get(device, ""),
                    pool=self._node_name,
                    device=device,
                    footprint=footprint(here[device]),
                )
                for device in sorted(used & here.keys())
            ),
        )

    async def _record(self, claim: PreparedClaim) -> None:
        """Adopts a claim whose Pods run; needs the lock."""
        await self._allocator.prepare(claim, ())
        with contextlib.suppress(OSError):  # logged; it is tried again
            await self._allocator.saved()

    async def collect_garbage(self) -> None:
        """Drops claims that no Pod uses and that are gone, or have lost their devices.

        An API server that does not answer ends nothing. It takes two calls to end a claim: a Pod
        that was deleted by force is in no list while its containers end.
        """
        orphans, self._orphans = self._orphans, set()
        for claim in tuple(self._allocator.prepared.value.values()):
            if self._used(claim) or not await self._gone(claim):
                continue
            self._orphans.add(claim.uid)
            async with self._changing:
                if claim.uid in orphans and not self._used(claim):
                    log.warning(
                        "the claim no longer has its devices, and no Pod uses it; dropped",
                        claim=f"{claim.namespace}/{claim.name}",
                        uid=claim.uid,
                    )
                    await self._end(claim.uid)
                    with contextlib.suppress(OSError):
                        await self._allocator.saved()

    async def identify_pods(self) -> bool:
        """Reads claims with `unidentified` Pods again; returns whether all Pods are known now."""
        for uid in tuple(self._allocator.prepared.value):
            await self._identify(uid)
        return not any(claim.unidentified for claim in self._allocator.prepared.value.values())

    async def _identify(self, uid: str) -> None:
        """Finds the UIDs of later Pods of a claim, for which the kubelet prepares it no more."""
        claim = self._allocator.prepared.value.get(uid)
        if not (claim and claim.unidentified):
            return
        try:
            current = await self._read(claim.namespace, claim.name)
        except (ApiError, ValueError):
            return  # it is tried again
        async with self._changing:
            claim = self._allocator.prepared.value.get(current.uid)
            if claim and current.users:
                strangers = set(claim.unidentified).difference(current.users)
                identified = replace(
                    claim,
                    pods=current.users,
                    pod_uids=current.pod_uids or claim.pod_uids,
                    unidentified=tuple(sorted(strangers)),
                )
                if identified != claim:
                    await self._record(identified)

    async def sync_specs(self) -> None:
        """Removes specs of claims that are not prepared; writes those that are missing or changed.

        A container that is started again needs its claim's spec, without another prepare. So
        nothing is removed while it is not sure which claims are prepared.
        """
        allocator = self._allocator
        if allocator.needs_recovery or not allocator.asked.value or self._pool.known.value is None:
            return
        troubles = []
        try:
            async with self._changing:
                prepared = self._allocator.prepared.value
                kept = set(map(self._spec_name, prepared))
                for name in await self._specs.list(self._spec_name("*")) - kept:
                    await self._specs.write(name, None)
                for uid, claim in prepared.items():
                    if not _is_whole(claim):
                        continue
                    try:
                        await self._specs.write(self._spec_name(uid), self._spec_from_record(claim))
                    except RefusalError as error:
                        troubles.append(str(error))
        except OSError as error:
            troubles = [f"{self._specs.path}: {text.reason(error)}"]
        if troubles:
            self._syncing.failed("; ".join(troubles))
        else:
            self._syncing.works()

    def _spec_from_record(self, known: PreparedClaim) -> bytes:
        """The spec that the Pods of a claim were given.

        Raises:
            RefusalError: its cards are gone, or have other nodes now.
        """
        claim = _claim_from_record(known)
        devices = [self._device(claim, result) for result in claim.results]
        given = [device.footprint for device in known.devices]
        if given != [footprint(device) for device in devices]:
            raise RefusalError(
                Refusal.UNFIT, f"{claim} has other device nodes than its cards have now"
            )
        return self._spec(known, devices)

    def _spec(self, claim: PreparedClaim, devices: Iterable[Device]) -> bytes:
        """The spec with a CDI device for each request of a claim that has these devices, in order.

        Each has the nodes of its request, and the environment of all requests of its container.
        """
        by_request: dict[str, list[Device]] = {}
        by_container: dict[str, list[Device]] = {}
        for prepared, device in zip(claim.devices, devices, strict=True):
            by_request.setdefault(prepared.request, []).append(device)
            by_container.setdefault(_container(claim, prepared.request), []).append(device)
        environments = {name: grant(of).environment for name, of in by_container.items()}
        grants = {
            request: replace(grant(of), environment=environments[_container(claim, request)])
            for request, of in by_request.items()
        }
        return cdi.claim_spec(self._dra.claim_kind, claim.uid, grants)

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
        await self.ready.until(bool)
        await self._allocator.cordons.settled()
        await self._ready()
        if self._allocator.drivers_in_recovery.value:
            await self.recover()
        # An API server takes longer than the kubelet's checkpoint: both are read at the same time.
        claim, _ = await asyncio.gather(self._checked(ref), self._allocator.read_checkpoint())
        single_container = None
        while True:
            changed = self._allocator.states.changed  # before it is tried: no change is missed
            try:
                self._usable(claim)  # before what the kubelet may be slow to answer
                if single_container is None:
                    single_container = await self._is_single_container(claim)
                return await self._uncancellable(
                    self._grant(claim, call, single_container=single_container)
                )
            except RefusalError as error:
                if error.kind is not Refusal.HELD:
                    raise
                self._allocator.pod_resources.ask()
                until = call.began + self._timing.holder_ends
                if not await set_within(changed, until - time.monotonic()):
                    raise
                await self._allocator.read_checkpoint()

    async def _ready(self) -> None:
        """Waits for the cards and their holders to be known; raises RefusalError."""
        try:
            async with asyncio.timeout(self._timing.ready):
                await self._allocator.asked.until(bool)
                await self._pool.known.until(lambda devices: devices is not None)
        except TimeoutError:
            raise RefusalError(
                Refusal.UNFIT,
                "npu-agent has just started, and is still reading cards and who holds them; the "
                "kubelet tries again",
            ) from None

    async def _read(self, namespace: str, name: str) -> ResourceClaim:
        """Fetches a claim from the API server; raises ApiError, or ValueError if malformed."""
        async with self._reading:
            answer = await dra.read_claim(self._api, namespace, name)
        return dra.claim_of(answer, self._dra.driver)

    async def _checked(self, ref: ClaimRef) -> ResourceClaim:
        """Returns the claim that the kubelet means; raises ApiError or RefusalError."""
        prepared = self._allocator.prepared.value.get(ref.uid)
        try:
            claim = await self._read(ref.namespace, ref.name)
        except ApiError as error:
            if error.kind is ErrorKind.NOT_FOUND or not _is_whole(prepared):
                raise
            log.warning("prepared again from the record: the claim cannot be read", claim=ref.name)
            return _claim_from_record(prepared)
        except ValueError as error:
            raise RefusalError(
                Refusal.INVALID, f"the API server's {ref} cannot be used: {error}"
            ) from error
        if claim.uid != ref.uid:
            raise RefusalError(
                Refusal.UNKNOWN,
                f"{ref} has the UID {claim.uid} and not {ref.uid}: it was deleted and made again; "
                "delete the Pod",
            )
        if not claim.results:
            raise RefusalError(
                Refusal.UNFIT,
                f"no device of the driver {self._dra.driver} is allocated to {ref} (any more)",
            )
        if claim.parameters and prepared is None:  # Pods that were given their devices keep them
            sources = ", ".join(parameters.source for parameters in claim.parameters)
            raise RefusalError(
                Refusal.INVALID,
                f"{ref} has opaque parameters ({sources}) for the driver {self._dra.driver}, "
                "which takes none: remove them from spec.devices.config of the ResourceClaim or "
                "its ResourceClaimTemplate, or from spec.config of the DeviceClass, and create "
                "the claim and its Pod again",
            )
        if not claim.users:
            raise RefusalError(
                Refusal.UNFIT, f"{ref} is reserved for no Pod: its Pod has ended, or was deleted"
            )
        return claim

    async def _is_single_container(self, claim: ResourceClaim) -> bool:
        """Whether all requests of a claim are of one container.

        A container has the variables of the last CDI device that the runtime applies, so each of
        its requests needs those of all. A container that names one of several requests must not
        have the others'.
        """
        requests = {result.request for result in claim.results}
        if len(requests) == 1 or all(map(_EXTENDED.fullmatch, requests)):
            return True  # and `_container` tells those of extended resources apart
        containers = await self._allocator.containers_of(
            claim.namespace, claim.name, self._timing.containers
        )
        if not containers:
            prepared = self._allocator.prepared.value.get(claim.uid)
            return prepared is not None and prepared.joined
        return all(len(of_pod) == 1 for of_pod in containers)

    async def _grant(
        self, claim: ResourceClaim, call: _Call, *, single_container: bool
    ) -> tuple[v1.Device, ...]:
        """Grants a claim's devices; `single_container` is as `PreparedClaim.joined`."""
        async with self._changing:
            if claim.uid in call.unprepared:
                raise RefusalError(
                    Refusal.UNFIT, f"{claim} was unprepared meanwhile: its Pod has ended"
                )
            before = self._allocator.prepared.value.get(claim.uid)
            pairs = self._usable(claim)
            prepared = self._prepared(claim, pairs, single_container=single_container)
            spec = self._spec(prepared, (device for _, device in pairs))
            own = [device for result, device in pairs if not result.admin]
            await self._allocator.prepare(prepared, own)
            try:
                written = await asyncio.gather(
                    self._specs.write(self._spec_name(claim.uid), spec),
                    self._allocator.saved(),
                    return_exceptions=True,  # both have come to their end before one is undone
                )
                for error in filter(None, written):
                    raise error
            except OSError:
                if before:  # its Pods still run
                    self._allocator.put_back(before)
                else:
                    await self._end(claim.uid)
                with contextlib.suppress(OSError):  # logged; it is tried again
                    await self._allocator.saved()
                raise
            return tuple(
                v1.Device(
                    request_names=[result.request],
                    pool_name=result.pool,
                    device_name=result.device,
                    cdi_device_ids=[
                        cdi.claim_name(self._dra.claim_kind, claim.uid, result.request)
                    ],
                )
                for result in claim.results
            )

    def _prepared(
        self,
        claim: ResourceClaim,
        pairs: Iterable[tuple[Result, Device]],
        *,
        single_container: bool = False,
    ) -> PreparedClaim:
        return PreparedClaim(
            driver=self._dra.driver,
            uid=claim.uid,
            namespace=claim.namespace,
            name=claim.name,
            pods=claim.users,
            pod_uids=claim.pod_uids,
            joined=single_container,
            devices=tuple(
                PreparedDevice(
                    request=result.request,
                    pool=result.pool,
                    device=result.device,
                    admin=result.admin,
                    footprint=footprint(device),
                )
                for result, device in pairs
            ),
        )

    def _usable(self, claim: ResourceClaim) -> list[tuple[Result, Device]]:
        """Returns a claim's devices; raises RefusalError if its Pods must not have one of them."""
        pairs = [(result, self._device(claim, result)) for result in claim.results]
        allocated = [
            plan.AllocatedDevice(
                name=result.device, device=device, admin=result.admin, tolerates=result.tolerates
            )
            for result, device in pairs
        ]
        plan.check_claim(
            self._allocator.facts(),
            self._dra.driver,
            str(claim),
            allocated,
            prepared=claim.uid in self._allocator.prepared.value,
        )
        return pairs

    def _device(self, claim: ResourceClaim, result: Result) -> Device:
        """Returns the device of a result; raises RefusalError if it is not of this node."""
        device = self._devices.value.get(result.device)
        if device and result.pool == self._node_name:
            return device
        raise RefusalError(
            Refusal.UNKNOWN,
            f"{claim} has the device {result.device} of the pool {result.pool}, which this node "
            "does not have (any more): its card was removed or has another name now; delete the "
            "Pod, so that another device is allocated",
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
        async with self._changing:
            if not self._allocator.owned:
                return False
            for uid in uids:
                await self._end(uid)
            for call in self._calls:
                call.unprepared |= uids
            if self._allocator.needs_recovery:
                self._unprepared |= uids
            try:
                await self._allocator.saved()
            except OSError:  # logged; it is tried again
                return self._allocator.owned
            return True

    async def _end(self, uid: str) -> None:
        """Forgets a claim and removes its spec, without saving; orphaned Pods keep its cores."""
        await self._allocator.unprepare(uid)
        try:
            await self._specs.write(self._spec_name(uid), None)
        except OSError as error:
            log.error("the CDI spec of a claim cannot be removed", uid=uid, error=error)

    async def _gone(self, claim: PreparedClaim) -> bool:
        """Whether the API server says that this claim is gone, or has lost its devices.

        A Node that asks for a claim that is gone is refused, as for one of which it runs no Pod. To
        end it is safe for both: the kubelet too names no container with it, in two calls. Any other
        refusal says nothing of the claim.
        """
        try:
            current = await self._read(claim.namespace, claim.name)
        except ApiError as error:
            return error.kind in (ErrorKind.NOT_FOUND, ErrorKind.UNRELATED)
        except ValueError:
            return False
        allocated = {result.device for result in current.results}
        return current.uid != claim.uid or not allocated.issuperset(
            device.device for device in claim.devices
        )

    def _used(self, claim: PreparedClaim) -> bool:
        """Whether pod-resources names a container that uses this claim, or does not answer.

        Another claim of the same name has other devices, or none yet.
        """
        uses, devices = self._allocator.claim_uses(), {device.device for device in claim.devices}
        return uses is None or any(
            _is_of(use, claim) and (not devices or use.device in devices) for use in uses
        )

    def _spec_name(self, uid: str) -> str:
        return cdi.claim_file(self._dra.claim_kind, uid)


def _is_whole(claim: PreparedClaim | None) -> TypeGuard[PreparedClaim]:
    """Whether it is known what is whose: of a recovered claim it may not be."""
    return claim is not None and all(device.request for device in claim.devices)


def _is_of(use: Assignment, claim: PreparedClaim) -> bool:
    return (use.namespace, use.claim) == (claim.namespace, claim.name)


def _claim_from_record(known: PreparedClaim) -> ResourceClaim:
    results = tuple(
        Result(
            request=device.request,
            driver=known.driver,
            pool=device.pool,
            device=device.device,
            admin_access=device.admin,
        )
        for device in known.devices
    )
    users = tuple(
        objects.Consumer(name=pod, uid=uid, resource="pods" if uid else "")
        for pod, uid in zip_longest(known.pods, known.pod_uids, fillvalue="")
    )
    return ResourceClaim(
        objects.Meta(name=known.name, namespace=known.namespace, uid=known.uid),
        status=objects.ClaimStatus(objects.ClaimAllocation(objects.Results(results)), users),
    )


def _container(claim: PreparedClaim, request: str) -> str:
    match = _EXTENDED.fullmatch(request)
    if match:
        return match[1]
    return "" if claim.joined else request
