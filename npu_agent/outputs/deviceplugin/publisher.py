"""Decides what each session advertises: Snapshot, config and ledger in, devices out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.core.api_mode import ApiMode
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import DeviceName
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.allocation_store import UNRECORDED, AllocationStore
from npu_agent.kubelet.api_modes import ApiModes
from npu_agent.kubelet.podresources import PodResources
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.deviceplugin.service import Devices

log = logger(__name__)

_ENDING = 0.3
"""Seconds for the end: the kubelet has 0.2 of them to say who holds what."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the config says of devices."""

    resources: tuple[Resource, ...]
    disabled: frozenset[str]
    """Names of cards that are not offered on this node, as `advertise` takes them."""


class Publisher:
    """Keeps `devices`, a feed for each resource, true.

    After a change of shape (defaultPe, resources), of a card's number or of its identity, a device
    is offered as unhealthy for as long as somebody holds, or may hold, any of its cores or device
    nodes under another name.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        wanted: Feed[Wanted],
        pod_resources: PodResources,
        store: AllocationStore,
        cdi_root: Path,
        cdi_kinds: Collection[str] = (),
        by_cdi: bool = False,
        modes: ApiModes | None = None,
    ) -> None:
        """A publisher of nothing yet.

        Args:
            snapshots: the cards.
            wanted: what the config says.
            pod_resources: who holds what.
            store: the ledger.
            cdi_root: where container runtimes read CDI specs.
            cdi_kinds: the kinds of which an agent before this one may have left a spec there.
            by_cdi: whether the devices are written there before they are offered. If not, what was
                left there goes once no container holds any of it.
            modes: which cards are offered here; all of them without it.
        """
        self.devices: Mapping[str, Feed[Devices]] = {
            resource.name: Feed(()) for resource in wanted.value.resources
        }
        self._snapshots = snapshots
        self._wanted = wanted
        self._pod_resources = pod_resources
        self._store = store
        self._modes = modes
        self._missing: set[DeviceName] = set()
        self._specs = cdi.SpecDirectory(cdi_root)
        self._ends = False
        """Whether the agent is about to end: no spec is written any more."""
        self._cdi_kinds = cdi_kinds
        self._by_cdi = by_cdi
        self._unwritten: frozenset[str] = frozenset()
        """The IDs of the devices that they do not have as they are now."""
        self._decided: Mapping[str, bytes] = {}
        """The CDI specs that there should be, as of this round."""
        self._published: Mapping[str, bytes] = {}
        """The same as of the round that published what is offered: they have all that can be held,
        also what is granted while a round goes on."""
        self._tried: Mapping[str, bytes] | None = None
        """What could not be written in this round."""
        self._found: bool | None = None
        """Whether the node was this agent's when the specs were read that were there before; None:
        they were not read yet."""
        self._looked = -math.inf
        """When the specs on disk were checked last, by `time.monotonic`."""
        self._publishing = asyncio.Lock()

    @property
    def cdi_error(self) -> str | None:
        """Why the CDI specs cannot be written; None while nothing is wrong."""
        return self._specs.error if self._by_cdi else None

    async def run(self) -> None:
        """Follows hardware, config and the ledger until cancelled."""
        async for _ in changes_of(
            self._snapshots,
            self._wanted,
            self._pod_resources.holdings,
            self._store.prepared,
            self._store.unrecorded,
            *(self._modes.feeds if self._modes else ()),
        ):
            await self.publish()

    async def renew(self) -> None:
        """Called when the node has just become this agent's, before anything is offered."""
        await self._store.renew()
        await self.publish()

    async def end(self) -> None:
        """Called when the agent is about to end: removes the CDI specs if nothing is held.

        Takes 0.3 s at most, also while a file system hangs: the streams are still to end in order.
        What is left on the disk then is for the next agent.
        """
        try:
            async with asyncio.timeout(_ENDING):
                await self._clean_up()
        except TimeoutError:
            log.warning("the disk is left as it is: it does not answer in time")
        finally:
            self._store.close()

    async def _clean_up(self) -> None:
        async with self._publishing:  # which would write them again
            self._ends = True
            if await self._store.end():
                await self._specs.sync({})

    async def publish(self) -> None:
        """Publishes what is to be offered now."""
        async with self._publishing:
            self._tried = None
            while (lists := self._lists()) is not None:
                # A grant or a change may come while a file is written: then all is decided again.
                wrote = await self._store.save() | await self._write_specs(lists)
                if not wrote:
                    self._put(lists)
                    break

    def _lists(self) -> dict[str, Devices] | None:
        """The devices of each resource; None as long as nothing should be offered."""
        snapshot, wanted = self._snapshots.value, self._wanted.value
        conflicts = self._store.update()
        if not snapshot.complete or not self._store.asked.value:
            return None  # never an empty list, or a list of doubts, before the real one
        offered = {
            resource.name: self._placed(advertise(snapshot, resource, wanted.disabled))
            for resource in wanted.resources
        }
        if self._modes:
            self._modes.listing(offered)
        self._store.offering(offered)
        unrecorded = UNRECORDED if self._store.unrecorded.value else None
        return {
            resource: tuple(
                replace(device, healthy=False, reason=reason)
                if (
                    reason := unrecorded
                    or conflicts.against(DeviceName(resource, device.id), device)
                )
                else device
                for device in devices
            )
            for resource, devices in offered.items()
        }

    def _placed(self, devices: Devices) -> Devices:
        """Those whose cards are the device plugin's."""
        if not self._modes:
            return devices
        places = self._modes.now()

        def placed(device: Device) -> Iterator[Device]:
            match places.get(device.card_id):
                case ApiMode.PLUGIN:
                    yield device
                case ApiMode.DRAINING_FROM_PLUGIN:
                    reason = "its card moves to DRA when its Pods have ended"
                    yield replace(device, healthy=False, reason=reason)

        return tuple(each for device in devices for each in placed(device))

    def _put(self, lists: Mapping[str, Devices]) -> None:
        """Publishes; there must be no await between the last use of the ledger and this."""
        self._report_missing(lists)
        self._published = self._decided
        for name, devices in lists.items():
            if self._unwritten:
                reason = f"the CDI specs cannot be written: {self.cdi_error}"
                devices = tuple(  # noqa: PLW2901
                    replace(device, healthy=False, reason=reason)
                    if device.id in self._unwritten
                    else device
                    for device in devices
                )
            self.devices[name].publish(devices)

    def _report_missing(self, lists: Mapping[str, Devices]) -> None:
        """Logs devices that vanished from under a running Pod, and their return."""
        here = {one.assignment.name for one in self._store.usages.value}
        here |= {
            DeviceName(name, device.id) for name, devices in lists.items() for device in devices
        }
        gone = {
            name: held
            for name, held in self._store.states.value.allocations.items()
            if held.containers and name.resource in lists and name not in here
        }
        for name in sorted(gone.keys() - self._missing):
            pod = gone[name].holder.removeprefix("Pod ")
            log.warning(
                "a running Pod holds a device that is no longer listed", pod=pod, device=name.device
            )
        for name in sorted(self._missing - gone.keys()):
            log.info("the device is listed again, or its Pod has ended", device=name.device)
        self._missing = set(gone)

    async def _write_specs(self, lists: Mapping[str, Devices]) -> bool:
        """Writes the CDI specs if the disk has others, and returns whether it did.

        A container cannot start without the spec of its device, so what is held stays. Where a file
        cannot be replaced, the last good one stays, and what is in it can still be handed out.
        """
        owned, cards = self._store.owned, self._snapshots.value.cards
        if self._ends or (not owned and (cards or not self._by_cdi)):
            return False  # another agent, with a config of its own, may serve the node
        if self._found is not owned:
            self._specs.files = await self._left_behind()
            self._published, self._looked, self._found = dict(self._specs.files), -math.inf, owned
            return True
        if not (self._by_cdi or self._specs.files):
            return False
        self._decided = specs = cdi.specs(
            (device for devices in lists.values() for device in devices if self._by_cdi),
            before=self._published,
            held=self._held(),
        )
        now, error = time.monotonic(), self._specs.error
        if specs == self._specs.files and now < self._looked + cdi.LOOK_EVERY and not error:
            self._unwritten = frozenset()
            return False
        if specs == self._tried:
            return False
        self._looked = now
        await self._specs.sync(specs)
        if self._specs.error and not self._by_cdi:
            # What is left does no harm, and the agent needs no right to write there.
            self._specs.files = {}
            return True
        self._unwritten = (
            cdi.missing(specs, self._specs.files) if self._specs.error else frozenset()
        )
        self._tried = specs
        return True

    def _held(self) -> set[str] | None:
        """The IDs of the devices that containers hold; None: nobody knows.

        As long as the kubelet does not say it: the record of an agent before this one may be lost.
        """
        if self._pod_resources.holdings.value.error is not None:
            return None
        return {device for _, device in self._store.states.value.allocations}

    async def _left_behind(self) -> dict[str, bytes]:
        """The specs of an agent before this one, by file name: its Pods may still run.

        What cannot be read is as good as nothing: no container can be started by it either.
        """
        found = {}
        for kind in self._cdi_kinds:
            name = cdi.spec_file(kind)
            with contextlib.suppress(OSError):
                content = await self._specs.read(name)
                spec = cdi.recovered(kind, content)
                if self._by_cdi or spec == content:  # else it may be somebody else's
                    found[name] = spec
        return found
