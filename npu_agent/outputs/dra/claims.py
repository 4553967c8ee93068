"""Prepares and unprepares claims: what the kubelet asks before a Pod starts and after it has ended.

Start reading at `Claims.prepare`. In this order, so that whatever fails leaves nothing behind: read
the claim, ask the ledger, write the CDI spec, write the ledger's record, answer. A text that
refuses a claim is what the user reads in the events of the Pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from npu_agent import files, text
from npu_agent.core.claim import (
    Claim,
    ClaimRef,
    ClaimUse,
    PreparedResult,
    Result,
    claim_of,
    placeholder_uid,
)
from npu_agent.core.counts import DraCounts
from npu_agent.core.grant import Grant, Refusal, RefusalError, grant
from npu_agent.core.ledger import PreparedClaim, PreparedDevice, footprint
from npu_agent.core.offer import Device
from npu_agent.core.pool import DraNames, PoolDevice
from npu_agent.feed import Feed
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kubelet.allocation_store import AllocationStore
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.threads import DaemonThread

log = logger(__name__)

T = TypeVar("T")
Fetch = Callable[[str, str], Awaitable[Mapping[str, Any]]]
"""Gets a ResourceClaim by namespace and name; raises ApiError."""

_READY = 15.0
"""Seconds to wait for the cards, and for the kubelet to say who holds them, after the start."""
_HOLDER_ENDS = 35.0
"""Seconds from the call for which a holder of a device is waited for. The scheduler takes the
device of a Pod that was deleted by force for free, while its containers may run for all of their
terminationGracePeriodSeconds, 30 by default. A kubelet that is refused comes back at its
syncFrequency, after 60 to 90 s, and does not wait for an answer for longer than 45 s."""
_LISTING = 5.0
"""Seconds to wait for the list of CDI specs."""
_AT_ONCE = 8
"""Claims that are read from the API server at the same time."""
_REMEMBERED = 4096
"""Claims of which it is remembered that they were unprepared."""
_EXTENDED = re.compile(r"(container-\d+)-request-\d+")
"""Requests of a claim that the scheduler made for a Pod with extended resources; group 1 is the
container (k8s.io/kubernetes, extendeddynamicresources.go)."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A claim that is to be prepared."""

    claim: Claim
    joined: bool
    """As `PreparedClaim.joined`."""


_Outcome = tuple[PreparedResult, ...] | Exception
"""What a claim's containers are given, or why it cannot be prepared."""


class Claims:
    """Prepares claims for Pods of this node, one change at a time."""

    def __init__(
        self,
        *,
        fetch: Fetch,
        dra: DraNames,
        pool: str,
        devices: Feed[tuple[PoolDevice, ...] | None],
        store: AllocationStore,
        cdi_root: Path,
        counts: DraCounts,
        patience: float = _HOLDER_ENDS,
        moved: Callable[[Device], RefusalError | None] = lambda _: None,
    ) -> None:
        """Nothing is written yet.

        Args:
            fetch: reads a claim.
            dra: the vendor's names.
            pool: the name of this node's pool.
            devices: all devices of this node, offered or not; None as long as that is not known.
            store: the ledger.
            cdi_root: where container runtimes read CDI specs.
            counts: where to count what is done.
            patience: seconds to wait for whoever still holds a device.
            moved: why a device that nobody holds is not for claims any more; None: it is.
        """
        self._fetch = fetch
        self._dra = dra
        self._pool = pool
        self._devices = devices
        self._store = store
        self._cdi_root = cdi_root
        self._counts = counts
        self._patience = patience
        self._moved = moved
        self._changing = asyncio.Lock()
        self._reading = asyncio.Semaphore(_AT_ONCE)
        self._changes: set[asyncio.Task[Any]] = set()
        """Under way."""
        self._orphans: set[str] = set()
        """Claims that the last sweep found to be gone and unused, by UID."""
        self._troubles: dict[str, str] = {}
        """Why specs could not be put right the last time, by UID, or "" for all of them."""
        self._unprepared: dict[str, float] = {}
        """When claims that the kubelet had unprepared, and not prepared since, were: by UID and by
        `placeholder_uid`, the latest ones."""

    async def prepare(
        self, refs: Sequence[ClaimRef]
    ) -> dict[str, tuple[PreparedResult, ...] | str]:
        """The devices of each claim, or why it cannot be prepared, by UID.

        All of them are written to the ledger's record together: a Pod waits for its slowest claim.
        """
        began, uids = time.monotonic(), [ref.uid for ref in refs]
        outcomes: dict[str, _Outcome] = {}
        try:
            found = dict(zip(uids, await asyncio.gather(*map(self._wanted, refs)), strict=True))
            wanted = [one for one in found.values() if isinstance(one, _Wanted)]
            outcomes |= {uid: one for uid, one in found.items() if isinstance(one, Exception)}
            outcomes |= await self._granted(wanted, began)
        finally:
            for uid in uids:
                self._counts.prepared(_result(outcomes.get(uid)), time.monotonic() - began)
        return {ref.uid: _answer(ref, outcomes[ref.uid]) for ref in refs}

    async def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, str | None]:
        """Ends the claims; the Pod stays Terminating for as long as that fails.

        So it needs no card, no API server and no claim. What cannot be removed from the disk is
        logged and tried again by `tidy`. Only an agent that does not own the node refuses: the one
        that does would take the claims for prepared.
        """
        if not await self._whole(self._end_all(refs)):
            return dict.fromkeys((ref.uid for ref in refs), self._store.why_not_owned)
        self._counts.unprepares["unprepared"] += len(refs)
        return dict.fromkeys((ref.uid for ref in refs), None)

    async def rebuild(self) -> None:
        """Finds the claims that containers use and that the record lacks.

        It may be lost, or an older one that was put back. To be called before anything is prepared.
        What the API server does not report of a claim is taken from pod-resources.
        """
        in_use = self._store.claim_uses()
        if not self._store.unchecked or in_use is None:
            return
        uses: dict[tuple[str, str], list[ClaimUse]] = {}
        for use in in_use:
            if use.driver == self._dra.driver:
                uses.setdefault((use.claim_namespace, use.claim_name), []).append(use)
        uses = {claim: of_claim for claim, of_claim in uses.items() if self._lacks(of_claim)}
        try:
            if uses:
                await self._ready()  # else the cores that they have are not known
        except RefusalError:
            return
        for (namespace, name), of_claim in uses.items():
            found = await self._rebuilt(namespace, name, of_claim)
            if found is None:
                return  # it is tried again
            async with self._changing:
                known = self._store.prepared.value.get(found.uid)
                if found == known or found.uid in self._unprepared or not self._lacks(of_claim):
                    continue  # that came after the answer of pod-resources
                log.warning(
                    "found a claim that is in use and in no record",
                    claim=f"{namespace}/{name}",
                    devices=",".join(one.device for one in found.devices),
                )
                await self._store.replacing(found)
                self._store.prepare(found, ())
                with contextlib.suppress(OSError):
                    await self._store.saved()
        self._store.rebuilt()

    def _lacks(self, uses: Iterable[ClaimUse]) -> bool:
        """Whether any of these uses is by a claim that is not prepared, or for another device."""
        return not all(map(self._store.states.value.has_claim, uses))

    async def sweep(self) -> None:
        """Drops claims that no longer exist, or have lost their devices, and that no Pod uses.

        An API server that does not answer ends nothing, and it takes two sweeps to end a claim: a
        Pod that was deleted by force is in no list while its containers end.
        """
        orphans, self._orphans = self._orphans, set()
        for claim in tuple(self._store.prepared.value.values()):
            if self._used(claim) or not await self._gone(claim):
                continue
            self._orphans.add(claim.uid)
            async with self._changing:
                if claim.uid in orphans and not self._used(claim):
                    log.warning(
                        "the claim no longer has its devices, and no Pod uses it: dropped",
                        claim=f"{claim.namespace}/{claim.name}",
                        uid=claim.uid,
                    )
                    await self._end(claim.uid)
                    with contextlib.suppress(OSError):
                        await self._store.saved()

    async def learn(self) -> None:
        """Finds the Pods that came to use a claim after it was prepared.

        The kubelet does not have it prepared for them again.
        """
        for claim in tuple(self._store.prepared.value.values()):
            using = {use.pod for use in self._store.claim_uses() or () if _is_of(use, claim)}
            if using.issubset(claim.pods) and claim.pod_uids:
                continue
            try:
                found = claim_of(await self._fetch(claim.namespace, claim.name), self._dra.driver)
            except (ApiError, ValueError):
                continue  # it is tried again
            async with self._changing:
                now = self._store.prepared.value.get(found.uid)
                if now is not None:
                    pods, uids = found.reserved_for or now.pods, found.pod_uids or now.pod_uids
                    now = replace(now, pods=pods, pod_uids=uids)
                    await self._store.replacing(now)  # Pods that are not reserved any more
                    self._store.prepare(now, ())
                    with contextlib.suppress(OSError):
                        await self._store.saved()

    async def tidy(self) -> None:
        """Removes specs of claims that are not prepared, and writes those that somebody removed.

        A container that is started again needs the spec of its claim, and the kubelet does not have
        the claim prepared for that. So nothing is removed as long as it is not sure which claims
        are prepared.
        """
        prepared = self._store.prepared.value
        nameless = any(
            uid == placeholder_uid(one.namespace, one.name) for uid, one in prepared.items()
        )
        if nameless or self._store.unchecked:
            return
        troubles: dict[str, str] = {}
        try:
            async with self._changing:
                await self._remove_specs()
            for uid in prepared if self._devices.value is not None else ():
                try:
                    async with self._changing:
                        await self._write_again(uid)
                except RefusalError as error:
                    troubles[uid] = str(error)
        except OSError as error:
            troubles[""] = f"{self._cdi_root}: {text.reason(error)}"
        for key, reason in troubles.items():
            if self._troubles.get(key) != reason:
                log.error("CDI specs of claims cannot be put right", reason=reason)
        self._troubles = troubles

    async def _remove_specs(self) -> None:
        """Removes the specs of claims that are not prepared. Called with the lock.

        Raises:
            OSError: the specs cannot be listed, or removed.
        """
        pattern = cdi.claim_file(self._dra.claim_kind, "*")
        there = await DaemonThread("npu-cdi").call(
            lambda: set(self._cdi_root.glob(pattern)), deadline=_LISTING
        )
        for path in there - {self._spec_of(uid) for uid in self._store.prepared.value}:
            await files.replace(path, None)

    async def _write_again(self, uid: str) -> None:
        """Writes the spec of a claim if it is not as its Pods were given it. Called with the lock.

        Raises:
            RefusalError: its cards are no longer here, or no longer have the same nodes.
            OSError: it cannot be written.
        """
        known = self._store.prepared.value.get(uid)
        if known is None or not all(one.request for one in known.devices):
            return  # it has ended meanwhile; or it was rebuilt, and nobody knows what is whose
        claim = _as_before(known)
        found = [(result, self._device(claim, result)) for result in claim.results]
        now = _prepared(claim, found, self._dra.driver, joined=known.joined)
        if now.devices != known.devices:
            raise RefusalError(
                Refusal.UNFIT, f"{claim} was given other device nodes than its cards have now"
            )
        spec = cdi.claim_spec(self._dra.claim_kind, uid, _grants(found, joined=known.joined))
        if await files.replace(self._spec_of(uid), spec):
            log.warning("a CDI spec was missing or changed: written again", claim=claim)

    async def _wanted(self, ref: ClaimRef) -> _Wanted | Exception:
        """The claim that the kubelet means, or why it cannot be prepared."""
        try:
            await self._ready()
            claim = await self._read(ref)
            return _Wanted(claim, await self._joined(claim))
        except (RefusalError, ApiError, OSError) as error:
            return error

    async def _ready(self) -> None:
        """Waits until the cards are known, and what was handed out before.

        Raises:
            RefusalError: that takes too long.
        """
        try:
            async with asyncio.timeout(_READY):
                await self._devices.until(lambda devices: devices is not None)
        except TimeoutError:
            raise RefusalError(
                Refusal.UNFIT,
                "npu-agent does not know yet which cards this node has and who holds them: "
                "it has just started; the kubelet tries again",
            ) from None

    async def _read(self, ref: ClaimRef) -> Claim:
        """The claim that the kubelet means.

        Raises:
            ApiError: it cannot be read.
            RefusalError: there is nothing in it to prepare.
        """
        known = self._store.prepared.value.get(ref.uid)
        try:
            async with self._reading:
                answer = await self._fetch(ref.namespace, ref.name)
            claim = claim_of(answer, self._dra.driver)
        except ApiError as error:
            if known is None or error.kind is Kind.NOT_FOUND:
                raise
            log.warning("prepared again as it was: the claim cannot be read", claim=ref.name)
            return _as_before(known)
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
        if not claim.allocated:
            raise RefusalError(Refusal.UNFIT, f"{ref} is not allocated (any more)")
        if not claim.results:
            raise RefusalError(
                Refusal.UNKNOWN, f"{ref} has no device of the driver {self._dra.driver}"
            )
        if claim.parameters and known is None:  # Pods that were given their devices keep them
            where = "; ".join(map(str, claim.parameters))
            raise RefusalError(
                Refusal.INVALID,
                f"{ref} has opaque parameters for the driver {self._dra.driver}, which takes none "
                f"({where}), and create the claim and its Pod again",
            )
        if not claim.reserved_for:
            raise RefusalError(
                Refusal.UNFIT, f"{ref} is reserved for no Pod: its Pod has ended, or was deleted"
            )
        return claim

    async def _joined(self, claim: Claim) -> bool:
        """Whether the requests of a claim are all one container's.

        A container's variables are those of the last CDI device that the runtime applies, so each
        of its requests must have the variables of all of them. But a container that names one of
        several requests must not have those of the others.
        """
        requests = {result.request for result in claim.results}
        if len(requests) == 1 or all(map(_EXTENDED.fullmatch, requests)):
            return True  # and `_container` tells those of extended resources apart
        containers = await self._store.containers_of(claim.namespace, claim.name)
        if not containers:
            known = self._store.prepared.value.get(claim.uid)
            return known is not None and known.joined
        return all(len(of_pod) == 1 for of_pod in containers)

    async def _granted(self, wanted: Sequence[_Wanted], began: float) -> dict[str, _Outcome]:
        """As `_grant`; a claim one of whose devices is held is tried again, if that ends soon.

        It is tried after each change of the ledger. No other call waits meanwhile.
        """
        until = began + self._patience
        outcomes: dict[str, _Outcome] = {}
        while True:
            changed = self._store.states.changed  # before it is tried: no change is missed
            outcomes |= await self._whole(self._grant(wanted, began))
            wanted = [one for one in wanted if _is_held(outcomes[one.claim.uid])]
            if not wanted:
                return outcomes
            self._store.ask()
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                return outcomes

    async def _grant(self, wanted: Iterable[_Wanted], began: float) -> dict[str, _Outcome]:
        """Prepares claims that were read after `began`; returns what becomes of each, by UID.

        What cannot be written is as it was before.
        """
        outcomes: dict[str, _Outcome] = {}
        noted: dict[str, PreparedClaim | None] = {}
        async with self._changing:
            for one in wanted:
                uid, before = one.claim.uid, self._before(one.claim)
                try:
                    found = self._checked(one.claim, began, again=before is not None)
                    prepared = _prepared(one.claim, found, self._dra.driver, joined=one.joined)
                    await self._store.replacing(prepared)
                    own = [device for result, device in found if not result.admin]
                    self._store.prepare(prepared, own)
                    noted[uid] = before
                    grants = _grants(found, joined=one.joined)
                    spec = cdi.claim_spec(self._dra.claim_kind, uid, grants)
                    await files.replace(self._spec_of(uid), spec)
                    outcomes[uid] = self._results(one.claim)
                except (RefusalError, OSError) as error:
                    outcomes[uid] = error
                    if uid in noted:
                        await self._undo(uid, noted.pop(uid))
            try:
                if noted:
                    await self._store.saved()
            except OSError as error:
                outcomes |= dict.fromkeys(noted, error)
                for uid, before in noted.items():
                    await self._undo(uid, before)
            else:
                for claim in [one.claim for one in wanted if one.claim.uid in noted]:
                    self._unprepared.pop(claim.uid, None)
                    self._unprepared.pop(placeholder_uid(claim.namespace, claim.name), None)
        return outcomes

    def _checked(self, claim: Claim, began: float, *, again: bool) -> list[tuple[Result, Device]]:
        """What a claim is allocated; `again`: its Pods may have that already.

        Raises:
            RefusalError: it has ended, or one of its devices is not to be used.
        """
        if began <= self._unprepared.get(claim.uid, 0.0):
            raise RefusalError(
                Refusal.UNFIT, f"{claim} was unprepared meanwhile: its Pod has ended"
            )
        found = [(result, self._device(claim, result)) for result in claim.results]
        if not again:
            for result, device in found:
                self._check_use(result, device)
        _check_overlap(claim, found)
        return found

    async def _undo(self, uid: str, before: PreparedClaim | None) -> None:
        """Takes back what could not be written."""
        if before is not None:  # its Pods still run
            self._store.prepare(before, ())
        else:
            await self._end(uid)

    def _results(self, claim: Claim) -> tuple[PreparedResult, ...]:
        return tuple(
            PreparedResult(
                requests=(result.request,),
                pool=result.pool,
                device=result.device,
                cdi_ids=(cdi.claim_name(self._dra.claim_kind, claim.uid, result.request),),
            )
            for result in claim.results
        )

    def _before(self, claim: Claim) -> PreparedClaim | None:
        """The claim as it is prepared already; one that was rebuilt without its UID gets it."""
        nameless = self._store.prepared.value.get(placeholder_uid(claim.namespace, claim.name))
        if nameless is not None:
            self._store.unprepare(nameless.uid)
            self._store.prepare(replace(nameless, uid=claim.uid), ())
        return self._store.prepared.value.get(claim.uid)

    def _device(self, claim: Claim, result: Result) -> Device:
        """What a result of an allocation stands for.

        Raises:
            RefusalError: it is none of this node's devices.
        """
        if result.pool != self._pool:
            raise RefusalError(
                Refusal.UNKNOWN,
                f"{claim} has the device {result.device} of the pool {result.pool}, and this "
                f"node's pool is {self._pool}",
            )
        for one in self._devices.value or ():
            if one.name == result.device:
                return one.device
        raise RefusalError(
            Refusal.UNKNOWN,
            f"{claim} has the device {result.device}, which this node does not have (any more): "
            "its card was removed or has another name now; delete the Pod, so that another device "
            "is allocated",
        )

    def _check_use(self, result: Result, device: Device) -> None:
        """Raises RefusalError if the device is the device plugin's, or unhealthy.

        An administrator may come to see why, and a request may tolerate that it is unhealthy.
        """
        if result.admin:
            return
        named = f"{result.device} ({device.name})"
        if not device.healthy and not result.tolerates(f"{self._dra.driver}/unhealthy"):
            raise RefusalError(Refusal.UNFIT, f"device {named} is unhealthy: {device.reason}")
        if moved := self._moved(device):
            raise RefusalError(moved.kind, f"device {named} is not for claims: {moved}")

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change to its end, even if the kubelet, or the agent, gives up waiting for it."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _end_all(self, refs: Sequence[ClaimRef]) -> bool:
        """Returns whether the next agent will know of it, if there is one."""
        async with self._changing:
            if not self._store.owned:
                return False
            for ref in refs:
                nameless = placeholder_uid(ref.namespace, ref.name)
                self._store.unprepare(nameless)
                await self._end(ref.uid)
                self._note_unprepared(ref.uid, nameless)
            try:
                await self._store.saved()
            except OSError:  # logged; it is tried again
                return self._store.owned
            return True

    async def _rebuilt(
        self, namespace: str, name: str, uses: Iterable[ClaimUse]
    ) -> PreparedClaim | None:
        """A claim as it must have been prepared; None: that cannot be found out now."""
        used = {use.device for use in uses}
        requests: dict[str, str] = {}
        uid, uids = placeholder_uid(namespace, name), tuple[str, ...]()
        try:
            claim = claim_of(await self._fetch(namespace, name), self._dra.driver)
            known = self._store.prepared.value.get(claim.uid)
            allocated = {result.device: result.request for result in claim.results}
            if used <= allocated.keys():
                uid, uids, requests = claim.uid, claim.pod_uids, allocated
            elif known and allocated.keys() <= {one.device for one in known.devices}:
                # A kubelet lists the devices of a claim's earlier allocations too.
                return known
        except (ApiError, ValueError) as error:
            log.warning("a claim in use cannot be read", claim=f"{namespace}/{name}", reason=error)
            again = isinstance(error, ApiError) and error.kind is not Kind.NOT_FOUND
            if again and any(
                (one.namespace, one.name) == (namespace, name)
                for one in self._store.prepared.value.values()
            ):
                return None
        here = {one.name: one.device for one in self._devices.value or ()}
        return PreparedClaim(
            driver=self._dra.driver,
            uid=uid,
            namespace=namespace,
            name=name,
            pods=tuple(sorted({use.pod for use in uses})),
            pod_uids=uids,
            devices=tuple(
                PreparedDevice(
                    request=requests.get(device, ""),
                    pool=self._pool,
                    device=device,
                    footprint=footprint(here[device]),
                )
                for device in sorted(used & here.keys())
            ),
        )

    async def _end(self, uid: str) -> None:
        """Forgets a claim and removes its spec; the record is still to be saved.

        Its cores stay with a Pod whose containers still run.
        """
        await self._store.outlive(uid)
        self._store.unprepare(uid)
        try:
            await files.replace(self._spec_of(uid), None)
        except OSError as error:
            log.error("the CDI spec of a claim cannot be removed", uid=uid, error=error)

    def _note_unprepared(self, *uids: str) -> None:
        for uid in uids:
            self._unprepared.pop(uid, None)
            self._unprepared[uid] = time.monotonic()
        while len(self._unprepared) > _REMEMBERED:
            del self._unprepared[next(iter(self._unprepared))]

    async def _gone(self, claim: PreparedClaim) -> bool:
        """Whether the API server says that this claim no longer exists, or lost its devices."""
        try:
            answer = await self._fetch(claim.namespace, claim.name)
            found = claim_of(answer, self._dra.driver)
            held = {one.device for one in claim.devices}
            return found.uid != claim.uid or not held <= {one.device for one in found.results}
        except ApiError as error:
            return error.kind is Kind.NOT_FOUND
        except ValueError:
            return False

    def _used(self, claim: PreparedClaim) -> bool:
        """Whether pod-resources names a container that uses this claim, or does not answer.

        Another claim of its name has other devices, or none yet.
        """
        uses, devices = self._store.claim_uses(), {one.device for one in claim.devices}
        return uses is None or any(
            _is_of(use, claim) and (not devices or use.device in devices) for use in uses
        )

    def _spec_of(self, uid: str) -> Path:
        return self._cdi_root / cdi.claim_file(self._dra.claim_kind, uid)


def _is_held(outcome: _Outcome) -> bool:
    return isinstance(outcome, RefusalError) and outcome.kind is Refusal.HELD


def _result(outcome: _Outcome | None) -> str:
    """Of `counts.PREPARES`; None: the kubelet did not wait for it."""
    if isinstance(outcome, RefusalError):
        return "refused"
    return "prepared" if isinstance(outcome, tuple) else "failed"


def _answer(ref: ClaimRef, outcome: _Outcome) -> tuple[PreparedResult, ...] | str:
    """What the kubelet is answered."""
    if isinstance(outcome, tuple):
        return outcome
    if isinstance(outcome, ApiError):
        return f"{ref} cannot be read: {outcome}"
    if isinstance(outcome, OSError):
        return f"{ref} cannot be prepared: {text.reason(outcome)}"
    return str(outcome)


def _is_of(use: ClaimUse, claim: PreparedClaim) -> bool:
    return (use.claim_namespace, use.claim_name) == (claim.namespace, claim.name)


def _prepared(
    claim: Claim, found: Iterable[tuple[Result, Device]], driver: str, *, joined: bool
) -> PreparedClaim:
    return PreparedClaim(
        driver=driver,
        uid=claim.uid,
        namespace=claim.namespace,
        name=claim.name,
        pods=claim.reserved_for,
        pod_uids=claim.pod_uids,
        joined=joined,
        devices=tuple(
            PreparedDevice(
                request=result.request,
                pool=result.pool,
                device=result.device,
                admin=result.admin,
                footprint=footprint(device),
            )
            for result, device in found
        ),
    )


def _as_before(known: PreparedClaim) -> Claim:
    """A claim as it was when it was prepared."""
    return Claim(
        namespace=known.namespace,
        name=known.name,
        uid=known.uid,
        allocated=True,
        results=tuple(
            Result(request=one.request, pool=one.pool, device=one.device, admin=one.admin)
            for one in known.devices
        ),
        reserved_for=known.pods,
        pod_uids=known.pod_uids,
    )


def _check_overlap(claim: Claim, found: Sequence[tuple[Result, Device]]) -> None:
    """Raises RefusalError if the claim was given the same cores twice, which no scheduler does."""
    own = [(result, device) for result, device in found if not result.admin]
    for number, (result, device) in enumerate(own):
        for other, its in own[:number]:
            if device.card_id == its.card_id and device.cores.overlaps(its.cores):
                raise RefusalError(
                    Refusal.INVALID,
                    f"{claim} has the same cores twice: by {other.device} and by {result.device}; "
                    "was its status written by hand?",
                )


def _grants(found: Iterable[tuple[Result, Device]], *, joined: bool) -> dict[str, Grant]:
    """What a container gets by each request of a claim; `joined` as `PreparedClaim.joined`."""
    by_request: dict[str, list[Device]] = {}
    by_container: dict[str, list[Device]] = {}
    for result, device in found:
        by_request.setdefault(result.request, []).append(device)
        by_container.setdefault(_container(result.request, joined=joined), []).append(device)
    return {
        request: Grant(
            environment=grant(by_container[_container(request, joined=joined)]).environment,
            nodes=grant(devices).nodes,
            cdi_names=(),
        )
        for request, devices in by_request.items()
    }


def _container(request: str, *, joined: bool) -> str:
    """The same text for requests of one container, as far as that is known."""
    match = _EXTENDED.fullmatch(request)
    if match:
        return match[1]
    return "" if joined else request
