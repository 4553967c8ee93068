"""Decides what each session advertises: Snapshot, Config and Assignments in, devices out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent import files
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Held, reserve
from npu_agent.core.offer import Resource, advertise, split_id
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.podresources import SETTLED, Assignment, Holdings
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.deviceplugin.service import Devices

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the config says of devices."""

    resources: tuple[Resource, ...]
    disabled: frozenset[str]
    """Names of cards that are not offered on this node, as `advertise` takes them."""


Shape = tuple[str, int]
"""How a family's cards are offered: under which resource, and in devices of how many cores."""

RECORD = ".npu-agent.shapes.json"
"""In the plugin directory: the shapes under which devices were handed out last."""

_ANSWER = 11.0
"""Seconds to wait for the kubelet to say who holds what: asking and reading have 5 each."""
_LAST_ANSWER = 0.2
"""Seconds of the one that the agent has for its end."""


class Publisher:
    """Keeps `devices`, a feed for each resource, true.

    A change of shape (defaultPe, resources) is made in two steps, so that no core is ever in two
    containers: first nothing of the family is offered, then the kubelet is asked who holds what,
    and then all that nobody holds is offered in the new shape. Without an answer nothing of the
    family is offered, unless the shape is the one that was in force before.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        wanted: Feed[Wanted],
        holdings: Feed[Holdings],
        ask: Callable[[], None],
        directory: Path,
        cdi_file: Path | None,
    ) -> None:
        """`ask` has the kubelet asked who holds what, soon; `holdings` has the answers.

        With a `cdi_file` the devices are written there as a CDI spec before they are offered.
        """
        self.devices: Mapping[str, Feed[Devices]] = {
            resource.name: Feed(()) for resource in wanted.value.resources
        }
        self._snapshots = snapshots
        self._wanted = wanted
        self._holdings = holdings
        self._ask = ask
        self._record_path = directory / RECORD
        self._record = _load(self._record_path)
        self._owner = False
        self._shapes: dict[str, Shape] = {}
        self._contested: set[str] = set()
        """Families of which somebody holds a device of another shape."""
        self._since = 0.0
        """When the shapes or the owner changed last; seconds of `time.monotonic`."""
        self._spec_trouble: str | None = None
        self._missing: set[Assignment] = set()
        self._starting: dict[tuple[str, str], float] = {}
        """When (resource, device) was allocated, for those that pod-resources may not show yet."""
        self._cdi_file = cdi_file
        self._publishing = asyncio.Lock()

    async def run(self) -> None:
        """Follows hardware, config and assignments until cancelled."""
        async for _ in changes_of(self._snapshots, self._wanted, self._holdings):
            await self._publish()

    async def renew(self) -> None:
        """Called when the resources have just become this agent's, maybe from another one's hands.

        What is known of who holds what may be older than the other one's last Allocate: the
        kubelet is asked again before anything is offered.
        """
        self._owner = True
        self._record = _load(self._record_path)  # the one before us may have noted something
        self._since = time.monotonic()
        await self._told(_ANSWER)
        await self._publish()

    def allocated(self, resource: str, ids: Sequence[str]) -> None:
        """Called when a container was given these devices."""
        now = time.monotonic()
        self._starting |= {(resource, id_): now for id_ in ids}

    async def end(self) -> None:
        """Called when the agent is about to end, while the resources are still its own.

        What the disk has for the next agent is of no use if no container holds a device: a node
        whose agent was removed is as clean as before. Takes 0.2 s at most.
        """
        if not self._owner:
            return
        now = time.monotonic()
        holdings = await self._told(_LAST_ANSWER)
        in_use = any(one.resource in self.devices for one in holdings.assignments)
        if in_use or self._starting or holdings.error or holdings.asked_at < now:
            return
        self._owner = False  # else it would be noted again
        for path in (self._record_path, self._cdi_file):
            if path is not None:
                with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                    path.unlink()
        self._cdi_file = None

    async def _told(self, deadline: float) -> Holdings:
        """Who holds what, asked anew; or what is known if there is no answer within `deadline`."""
        now = time.monotonic()
        self._ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                async for holdings in self._holdings.watch():
                    if holdings.asked_at >= now:
                        break
        return self._holdings.value

    async def _publish(self) -> None:
        async with self._publishing:
            snapshot, wanted = self._snapshots.value, self._wanted.value
            holdings = self._holdings.value
            if not snapshot.complete or not holdings.asked_at:
                return  # never an empty list, or a list of doubts, before the real one
            shapes = {
                family: (resource.name, width)
                for resource in wanted.resources
                for family, width in resource.widths
            }
            if shapes != self._shapes:
                if self._shapes:
                    self._since = time.monotonic()
                    self._ask()
                self._shapes = shapes
            lists = self._lists(snapshot, wanted, holdings)
            self._report_missing(lists, holdings)
            lists = await self._with_specs(lists)
            for name, devices in lists.items():
                self.devices[name].publish(devices)
            if self._owner:
                await self._remember(holdings)

    def _lists(self, snapshot: Snapshot, wanted: Wanted, holdings: Holdings) -> dict[str, Devices]:
        """The devices of each resource, fenced where somebody holds, or may hold, their cores."""
        known = self._knows(holdings)
        held = [
            Held(one.resource, one.device, f"Pod {one.namespace}/{one.pod}")
            for one in holdings.assignments
        ]
        # Until the kubelet was asked long enough after an Allocate, the device counts as held.
        if holdings.error is None:
            told = holdings.asked_at - SETTLED
            self._starting = {key: at for key, at in self._starting.items() if at > told}
        held += [Held(*key, "a container that starts") for key in self._starting]
        lists = {}
        self._contested = set()
        reason = (
            "its card was cut otherwise before, and the kubelet has not said yet who holds what"
            + (f": {holdings.error}" if holdings.error else "")
        )
        for resource in wanted.resources:
            offered = advertise(snapshot, resource, wanted.disabled)
            devices = reserve(offered, resource.name, held)
            self._contested |= {
                before.family
                for before, after in zip(offered, devices, strict=True)
                if before is not after
            }
            shapes = {family: (resource.name, width) for family, width in resource.widths}
            doubtful = {
                family
                for family, shape in shapes.items()
                if not known and self._record.get(family, shape) != shape
            }
            lists[resource.name] = tuple(
                replace(device, healthy=False, reason=reason)
                if device.family in doubtful
                else device
                for device in devices
            )
        return lists

    def _report_missing(self, lists: Mapping[str, Devices], holdings: Holdings) -> None:
        """Tells of cards that went from under a running Pod, and of their return."""
        cards = {device.card_id for devices in lists.values() for device in devices}
        missing = {
            one
            for one in holdings.assignments
            if one.resource in lists and split_id(one.device)[0] not in cards
        }
        for one in sorted(missing - self._missing):
            pod = f"{one.namespace}/{one.pod}"
            log.warning(
                "a running Pod holds a device that is no longer listed", pod=pod, device=one.device
            )
        for one in sorted(self._missing - missing):
            log.info("the device is listed again, or its Pod has ended", device=one.device)
        self._missing = missing

    def _knows(self, holdings: Holdings) -> bool:
        """Whether the kubelet has said who holds what since the shapes, or the owner, changed."""
        return holdings.error is None and holdings.asked_at >= self._since

    async def _with_specs(self, lists: dict[str, Devices]) -> dict[str, Devices]:
        """Writes the CDI specs first: a device without one could be allocated and not started."""
        if self._cdi_file is None:
            return lists
        content = cdi.spec(device for devices in lists.values() for device in devices)
        try:
            await files.replace(self._cdi_file, content)
        except OSError as error:
            reason = f"its CDI spec {self._cdi_file} cannot be written: {error.strerror}"
            if reason != self._spec_trouble:
                log.error("the CDI specs cannot be written", reason=reason)
            self._spec_trouble = reason
            return {
                name: tuple(replace(device, healthy=False, reason=reason) for device in devices)
                for name, devices in lists.items()
            }
        self._spec_trouble = None
        return lists

    async def _remember(self, holdings: Holdings) -> None:
        """Notes the shapes in force, once nobody holds anything of the ones before.

        So that an agent that starts while the kubelet does not say who holds what can tell
        whether devices of another shape may be in use.
        """
        record = dict(self._record)
        for family, shape in self._shapes.items():
            if family not in record or (self._knows(holdings) and family not in self._contested):
                record[family] = shape
        if record == self._record:
            return
        try:
            content = json.dumps(record).encode() + b"\n"
            await files.replace(self._record_path, content)
        except OSError as error:
            log.warning("the shapes of devices cannot be noted", error=error)
        self._record = record


def _load(path: Path) -> dict[str, Shape]:
    """The record; empty if there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
        return {str(family): (str(name), int(width)) for family, (name, width) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
