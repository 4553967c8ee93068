"""Keeps the prepared claims true: found again, dropped, with their Pods' UIDs and their CDI specs.

The driver calls each method from time to time (`Driver.run`). Start reading at
`ClaimUpkeep.recover`: a claim that runs must be known before any other is prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeGuard

from npu_agent import text
from npu_agent.core import plan
from npu_agent.core.grant import RefusalError
from npu_agent.core.ledger import Assignment, PreparedClaim, PreparedDevice, footprint
from npu_agent.core.pool import AllocatedClaim
from npu_agent.kube.dra import ClaimReader
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kubelet.allocator import Allocator, ClaimPool
from npu_agent.kubelet.cdi import ClaimSpecs
from npu_agent.logs import Reporter, logger

log = logger(__name__)


class ClaimUpkeep:
    """Recovers, identifies and ends the claims of one driver, and keeps their specs on the disk."""

    def __init__(
        self,
        reader: ClaimReader,
        pool: ClaimPool,
        allocator: Allocator,
        node_name: str,
        specs: ClaimSpecs,
        *,
        ready: float,
    ) -> None:
        """`ready` is the longest wait for cards and holders, in seconds."""
        self.changing = asyncio.Lock()
        """Held during each change of a claim, of its spec and of the record."""
        self.unprepared: set[str] = set()
        """UIDs of claims that were unprepared before the recovery of others has ended."""
        self._reader = reader
        self._pool = pool
        self._allocator = allocator
        self._node_name = node_name
        self._specs = specs
        self._ready = ready
        self._orphans: set[str] = set()
        """UIDs of claims that the last `collect_garbage` found gone and unused."""
        self._recovering = Reporter(log, "cannot read a claim that is in use and not recorded")
        self._syncing = Reporter(log, "cannot repair the CDI specs of claims")

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
            if use.resource == self._pool.dra.driver:
                uses.setdefault((use.namespace, use.claim), []).append(use)
        for (namespace, name), of_claim in uses.items():
            if not self._lacks(of_claim):
                continue
            try:
                # Else the cores that it has are not known.
                await self._allocator.until_known(self._ready)
                claim = await self._reader.read(namespace, name)
            except (RefusalError, ApiError, ValueError) as error:
                self._recovering.failed(f"{namespace}/{name}: {error}")
                return  # it is tried again
            async with self.changing:
                entry = self._allocator.prepared.value.get(claim.uid)
                devices = {device.device for device in entry.devices} if entry else set()
                # A kubelet lists the devices of a claim's earlier allocations too.
                is_known = entry and devices.issuperset(device.name for device in claim.devices)
                if is_known or claim.uid in self.unprepared or not self._lacks(of_claim):
                    continue
                prepared = self._recovered(claim, of_claim)
                log.warning(
                    "found a claim that is in use and not recorded",
                    claim=f"{namespace}/{name}",
                    devices=",".join(device.device for device in prepared.devices),
                )
                await self._adopt(prepared)
        self._recovering.works()
        self.unprepared.clear()
        self._allocator.recovery_done()

    def _lacks(self, uses: Iterable[Assignment]) -> bool:
        """Whether any of these uses is by a claim, or for a device, that is not prepared."""
        return not all(map(self._allocator.states.value.has_claim, uses))

    def _recovered(self, claim: AllocatedClaim, uses: Iterable[Assignment]) -> PreparedClaim:
        used = {use.device for use in uses}
        pods = {use.pod for use in uses}
        here = self._pool.by_name.value
        requests = {device.name: device.request for device in claim.devices}
        return PreparedClaim(
            driver=self._pool.dra.driver,
            uid=claim.uid,
            namespace=claim.namespace,
            name=claim.name,
            pods=tuple(sorted(pods)),
            pod_uids=claim.pod_uids,
            unidentified=tuple(sorted(pods.difference(claim.pods))),
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

    async def _adopt(self, claim: PreparedClaim) -> None:
        """Records a claim whose Pods run; needs the lock."""
        await self._allocator.prepare(claim, ())
        with contextlib.suppress(OSError):  # logged; it is tried again
            await self._allocator.saved()

    async def collect_garbage(self) -> None:
        """Drops claims that no Pod uses and that are gone, or have lost their devices.

        An API server that does not answer ends nothing. It takes two calls to end a claim: a Pod
        that was deleted by force is in no list while its containers end.
        """
        orphans = self._orphans
        self._orphans = set()
        for claim in tuple(self._allocator.prepared.value.values()):
            if self._used(claim) or not await self._gone(claim):
                continue
            self._orphans.add(claim.uid)
            async with self.changing:
                if claim.uid in orphans and not self._used(claim):
                    log.warning(
                        "the claim no longer has its devices, and no Pod uses it; dropped",
                        claim=f"{claim.namespace}/{claim.name}",
                        uid=claim.uid,
                    )
                    await self.end(claim.uid)
                    with contextlib.suppress(OSError):
                        await self._allocator.saved()

    async def identify_pods(self) -> bool:
        """Reads claims with `unidentified` Pods again; returns whether all Pods are known now."""
        for uid in tuple(self._allocator.prepared.value):
            await self.identify(uid)
        return not any(claim.unidentified for claim in self._allocator.prepared.value.values())

    async def identify(self, uid: str) -> None:
        """Finds the UIDs of later Pods of a claim, for which the kubelet prepares it no more."""
        claim = self._allocator.prepared.value.get(uid)
        if not (claim and claim.unidentified):
            return
        try:
            current = await self._reader.read(claim.namespace, claim.name)
        except (ApiError, ValueError):
            return  # it is tried again
        async with self.changing:
            claim = self._allocator.prepared.value.get(current.uid)
            if claim and current.pods:
                strangers = set(claim.unidentified).difference(current.pods)
                identified = replace(
                    claim,
                    pods=current.pods,
                    pod_uids=current.pod_uids or claim.pod_uids,
                    unidentified=tuple(sorted(strangers)),
                )
                if identified != claim:
                    await self._adopt(identified)

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
            async with self.changing:
                prepared = allocator.prepared.value
                await self._specs.remove_others(prepared)
                for claim in filter(is_whole, prepared.values()):
                    try:
                        devices = plan.recorded_devices(
                            claim, pool=self._node_name, devices=self._pool.by_name.value
                        )
                        await self._specs.write(claim, devices)
                    except RefusalError as error:
                        troubles.append(str(error))
        except OSError as error:
            troubles = [f"{self._specs.path}: {text.reason(error)}"]
        if troubles:
            self._syncing.failed("; ".join(troubles))
        else:
            self._syncing.works()

    async def end(self, uid: str) -> None:
        """Forgets a claim and removes its spec, without saving; orphaned Pods keep its cores."""
        await self._allocator.unprepare(uid)
        await self._specs.remove(uid)

    async def _gone(self, claim: PreparedClaim) -> bool:
        """Whether the API server says that this claim is gone, or has lost its devices.

        A Node that asks for a claim that is gone is refused, as for one of which it runs no Pod. To
        end it is safe for both: the kubelet too names no container with it, in two calls. Any other
        refusal says nothing of the claim.
        """
        try:
            current = await self._reader.read(claim.namespace, claim.name)
        except ApiError as error:
            return error.kind in (ErrorKind.NOT_FOUND, ErrorKind.UNRELATED)
        except ValueError:
            return False
        allocated = {device.name for device in current.devices}
        return current.uid != claim.uid or not allocated.issuperset(
            device.device for device in claim.devices
        )

    def _used(self, claim: PreparedClaim) -> bool:
        """Whether pod-resources names a container that uses this claim, or does not answer.

        Another claim of the same name has other devices, or none yet.
        """
        uses = self._allocator.claim_uses()
        devices = {device.device for device in claim.devices}
        return uses is None or any(
            _is_of(use, claim) and (not devices or use.device in devices) for use in uses
        )


def is_whole(claim: PreparedClaim | None) -> TypeGuard[PreparedClaim]:
    """Whether it is known what is whose: of a recovered claim it may not be."""
    return claim is not None and all(device.request for device in claim.devices)


def _is_of(use: Assignment, claim: PreparedClaim) -> bool:
    return (use.namespace, use.claim) == (claim.namespace, claim.name)
