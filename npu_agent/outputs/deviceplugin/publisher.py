"""Decides what each session advertises: Snapshot, config and ledger in, devices out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import DeviceName
from npu_agent.core.plan import PluginWishes, device_lists, withhold
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.allocation_store import AllocationStore
from npu_agent.logs import logger
from npu_agent.outputs.deviceplugin.service import Devices
from npu_agent.outputs.deviceplugin.specs import PluginSpecs

log = logger(__name__)

_ENDING = 0.3
"""Seconds for the end; pod-resources has 0.2 of them."""


class Publisher:
    """Keeps `devices`, a feed for each resource, up to date."""

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        wanted: Feed[PluginWishes],
        store: AllocationStore,
        cordons: Feed[Mapping[str, str]],
        specs: PluginSpecs,
    ) -> None:
        """Publishes nothing yet; `specs` are written before the devices in them are offered."""
        self.devices: Mapping[str, Feed[Devices]] = {
            resource.name: Feed(()) for resource in wanted.value.resources
        }
        self._snapshots = snapshots
        self._wanted = wanted
        self._store = store
        self._cordons = cordons
        self._specs = specs
        self._missing: set[DeviceName] = set()
        self._known: dict[str, str] = {}
        """Name and ID of each listed device, by ID, for people."""
        self._publishing = asyncio.Lock()

    @property
    def cdi_error(self) -> str | None:
        return self._specs.error

    async def run(self) -> None:
        async for _ in changes_of(
            self._snapshots,
            self._wanted,
            self._cordons,
            self._store.answers,
            self._store.prepared,
            self._store.published,
            self._store.drivers_in_recovery,
        ):
            await self.publish()

    async def renew(self) -> None:
        """Called when the node has just become this agent's, before anything is offered."""
        await self._store.renew()
        await self.publish()

    async def end(self) -> None:
        """Removes the CDI specs if nothing is held, within 0.3 s; the next agent may."""
        try:
            async with asyncio.timeout(_ENDING):
                await self._clean_up()
        except TimeoutError:
            log.warning("skipping cleanup: the file system did not respond in time")
        finally:
            self._store.close()

    async def _clean_up(self) -> None:
        async with self._publishing:  # which would write them again
            await self._specs.end(remove=await self._store.end())

    async def publish(self) -> None:
        async with self._publishing:
            while (lists := self._lists()) is not None:
                decided = self._store.states.value
                await self._store.save()
                await self._specs.write(
                    [device for devices in lists.values() for device in devices],
                    self._held(),
                    owned=self._store.owned,
                    cards=bool(self._snapshots.value.cards),
                )
                # A grant may come while a file is written: then all is decided again.
                if self._store.states.value is decided:
                    self._put(lists)
                    break

    def _lists(self) -> dict[str, Devices] | None:
        """Returns the devices of each resource; None: nothing should be offered yet."""
        self._store.update()
        if not self._snapshots.value.complete or not self._store.asked.value:
            return None  # never an empty list, or a list of doubts, before the real one
        lists = device_lists(self._store.facts(self._cordons.value), self._wanted.value)
        self._store.record_offer(lists)
        return lists

    def _put(self, lists: Mapping[str, Devices]) -> None:
        """Publishes, without an await since the last use of the ledger."""
        self._report_missing(lists)
        self._specs.published()
        for name, devices in lists.items():
            if self._specs.unwritten:
                reason = f"the CDI specs cannot be written: {self.cdi_error}"
                devices = tuple(  # noqa: PLW2901
                    withhold(device, reason) if device.id in self._specs.unwritten else device
                    for device in devices
                )
            self.devices[name].publish(devices)

    def _report_missing(self, lists: Mapping[str, Devices]) -> None:
        """Logs devices that vanished while a Pod holds them, each once."""
        here = {one.assignment.name for one in self._store.usages.value}
        for resource, devices in lists.items():
            here |= {DeviceName(resource, device.id) for device in devices}
            self._known |= {device.id: f"{device.name} ({device.id})" for device in devices}
        gone = {
            name: held
            for name, held in self._store.states.value.allocations.items()
            if held.containers
            and held.first_absent is None
            and name.resource in lists
            and name not in here
        }
        for name in sorted(gone.keys() - self._missing):
            log.warning(
                "a running Pod holds a device that is no longer listed",
                pod=gone[name].holder.removeprefix("Pod "),
                device=self._known.get(name.device, name.device),
            )
        self._missing = {*gone, *self._missing} & self._store.states.value.allocations.keys()

    def _held(self) -> set[str] | None:
        """Returns the IDs of devices that containers hold; None: unknown."""
        if self._store.answers.value.error is not None:
            return None
        return {name.device for name in self._store.states.value.allocations}
