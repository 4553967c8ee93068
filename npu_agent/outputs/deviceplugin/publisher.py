"""Decides what each session advertises: Snapshot, config and ledger in, devices out.

The ledger of the node is kept here: it is asked before anything is offered and again before
anything is granted, and it is on disk before anything new is offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent import files
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Holding, Ledger, keys_of
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.podresources import Holdings, PodResources
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


RECORD = ".npu-agent.ledger.json"
"""In the plugin directory: `Ledger.record`. The kubelet removes sockets there and nothing else."""
OLD_RECORD = ".npu-agent.shapes.json"
"""What versions before 0.9 wrote. It does not say which cores were handed out."""

_NO_SPECS = "the CDI specs cannot be written"
_ANSWER = 11.0
"""Seconds to wait for the kubelet to say who holds what: asking and reading have 5 each."""
_LAST_ANSWER = 0.2
"""Seconds of the one that the agent has for its end."""
_RESTART = 30.0
"""Seconds after a restart of the kubelet for which it may list fewer Pods than run: it asks the API
server which Pods it has."""


class Publisher:
    """Keeps `devices`, a feed for each resource, true, and `holdings`, who holds which cores.

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
        directory: Path,
        cdi_root: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads what an agent before this one has left in `directory`, the plugin directory.

        With a `cdi_root` the devices are written there as CDI specs before they are offered. The
        `clock` is the one of `Holdings.asked_at`.
        """
        self.devices: Mapping[str, Feed[Devices]] = {
            resource.name: Feed(()) for resource in wanted.value.resources
        }
        self.holdings: Feed[tuple[Holding, ...]] = Feed(())
        self._snapshots = snapshots
        self._wanted = wanted
        self._pod_resources = pod_resources
        self._directory = directory
        self._clock = clock
        self._on_disk = left_behind(directory)
        self._ledger = Ledger().recovered(self._on_disk, self._clock())
        self._claims = self._ledger.claims(())
        self._answered_at = 0.0
        """When the answer was asked for that the ledger has."""
        self._owner = False
        self._missing: set[tuple[str, str]] = set()
        self._cdi_root = cdi_root
        self._specs: Mapping[str, bytes | None] = {}
        """The CDI specs on disk, by file name."""
        self._trouble: dict[str, str] = {}
        """What could not be written last, by what it is for."""
        self._publishing = asyncio.Lock()

    async def run(self) -> None:
        """Follows hardware, config and pod-resources until cancelled."""
        async for _ in changes_of(self._snapshots, self._wanted, self._pod_resources.holdings):
            await self.publish()

    async def renew(self) -> None:
        """Called when the resources have just become this agent's, maybe from another one's hands.

        What is known of who holds what may be older than the other one's last Allocate: its record
        is read, and the kubelet is asked again before anything is offered.
        """
        self._owner = True
        self._on_disk = left_behind(self._directory)
        self._ledger = self._ledger.recovered(self._on_disk, self._clock())
        await self._answer(_ANSWER)
        await self.publish()

    def grant(self, resource: str, devices: Sequence[Device]) -> None:
        """Notes that a container is given these devices; called before it is.

        Raises:
            RefusalError: somebody holds cores or nodes of one of them.
        """
        present = {(state.card.key, keys_of(state.card)) for state in self._snapshots.value.cards}
        for device in devices:
            reason = self._claims.against(resource, device)
            if (device.card.key, keys_of(device.card)) not in present:
                reason = "its card has just gone, or got another number"
            if reason:
                raise RefusalError(
                    Refusal.UNFIT, f"device {device.id!r} ({device.name}) is not free: {reason}"
                )
        self._ledger = self._ledger.granted(resource, devices, self._clock())
        for device in devices:
            name = (resource, device.id)
            self._claims.add(name, self._ledger.holds[name])
        self._pod_resources.ask_soon()

    def kubelet_lost(self) -> None:
        """Called when the kubelet dropped our devices: it may have been restarted."""
        self._ledger = self._ledger.doubted(self._clock() + _RESTART)

    async def end(self) -> None:
        """Called when the agent is about to end, while the resources are still its own.

        What the disk has for the next agent is of no use if no container holds a device: a node
        whose agent was removed is as clean as before. Takes 0.2 s at most.
        """
        if not self._owner:
            return
        now = self._clock()
        answer = await self._answer(_LAST_ANSWER)
        async with self._publishing:  # which would write them again
            self._owner = False
            holds, ours = self._ledger.holds, self.devices
            # What is held may also have the name of a resource that is not served any more.
            held = any(one.name in holds or one.resource in ours for one in answer.assignments)
            starting = any(hold.kept_until > now for hold in holds.values())
            if held or starting or answer.error or answer.asked_at < now:
                return
            root, self._cdi_root = self._cdi_root, None
            left = [root / name for name in self._specs] if root else []
            for path in (self._directory / RECORD, *left):
                with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                    path.unlink(missing_ok=True)

    async def _answer(self, deadline: float) -> Holdings:
        """What pod-resources says now; the last known if there is no answer within `deadline`."""
        now, holdings = self._clock(), self._pod_resources.holdings
        self._pod_resources.ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                async for answer in holdings.watch():
                    if answer.asked_at >= now:
                        break
        return holdings.value

    async def publish(self) -> None:
        """Publishes what is to be offered now."""
        async with self._publishing:
            while (lists := self._lists()) is not None:
                # A grant or a change may come while a file is written: then all is decided again.
                wrote = await self._write_record() | await self._write_specs(lists)
                if not wrote:
                    self._put(lists)
                    break

    def _lists(self) -> dict[str, Devices] | None:
        """The devices of each resource; None as long as nothing should be offered."""
        snapshot, wanted = self._snapshots.value, self._wanted.value
        answer = self._pod_resources.holdings.value
        if not snapshot.complete or not answer.asked_at:
            return None  # never an empty list, or a list of doubts, before the real one
        cards = [state.card for state in snapshot.cards]
        if answer.error is None and answer.asked_at > self._answered_at:
            self._answered_at = answer.asked_at
            self._ledger = self._ledger.answered(
                answer.assignments, answer.asked_at, cards=cards, resources=self.devices
            )
            if self._ledger.doubtful:
                self._pod_resources.ask_soon()
        offered = {
            resource.name: advertise(snapshot, resource, wanted.disabled)
            for resource in wanted.resources
        }
        if self._owner:
            self._ledger = self._ledger.offering(offered, snapshot.cards)
        self._claims = self._ledger.claims(cards)
        return {
            resource: tuple(self._fenced(resource, device) for device in devices)
            for resource, devices in offered.items()
        }

    def _fenced(self, resource: str, device: Device) -> Device:
        reason = self._claims.against(resource, device)
        return replace(device, healthy=False, reason=reason) if reason else device

    def _put(self, lists: Mapping[str, Devices]) -> None:
        """Publishes; there must be no await between the last use of the ledger and this."""
        self.holdings.publish(self._ledger.holdings(self._snapshots.value.cards))
        self._report_missing(lists)
        for name, devices in lists.items():
            if trouble := self._trouble.get(_NO_SPECS):
                devices = tuple(  # noqa: PLW2901
                    replace(device, healthy=False, reason=trouble) for device in devices
                )
            self.devices[name].publish(devices)

    def _report_missing(self, lists: Mapping[str, Devices]) -> None:
        """Logs devices that vanished from under a running Pod, and their return."""
        here = {one.assignment.name for one in self.holdings.value}
        here |= {(name, device.id) for name, devices in lists.items() for device in devices}
        gone = {
            name: hold
            for name, hold in self._ledger.holds.items()
            if hold.containers and name[0] in lists and name not in here
        }
        for name in sorted(gone.keys() - self._missing):
            pod = gone[name].holder.removeprefix("Pod ")
            log.warning(
                "a running Pod holds a device that is no longer listed", pod=pod, device=name[1]
            )
        for name in sorted(self._missing - gone.keys()):
            log.info("the device is listed again, or its Pod has ended", device=name[1])
        self._missing = set(gone)

    async def _write_record(self) -> bool:
        """Writes the ledger if the disk has another one; returns whether it did."""
        if not self._owner or (record := self._ledger.record()) == self._on_disk:
            return False
        await self._replace(
            "the record of who holds what cannot be written", self._directory / RECORD, record
        )
        self._on_disk = record  # even if it cannot be written: the next change tries again
        with contextlib.suppress(OSError):
            (self._directory / OLD_RECORD).unlink(missing_ok=True)
        return True

    async def _write_specs(self, lists: Mapping[str, Devices]) -> bool:
        """As `_write_record`, for the CDI specs: a container cannot start without the device's."""
        if self._cdi_root is None:
            return False
        specs = cdi.specs(device for devices in lists.values() for device in devices)
        wanted: dict[str, bytes | None] = {**dict.fromkeys(self._specs), **specs}
        if wanted == self._specs and _NO_SPECS not in self._trouble:
            return False
        good = True
        for name, content in wanted.items():
            good &= await self._replace(_NO_SPECS, self._cdi_root / name, content)
        self._specs = {name: content for name, content in wanted.items() if content or not good}
        return good

    async def _replace(self, failure: str, path: Path, content: bytes | None) -> bool:
        """Writes a file, and logs `failure` once if it fails; returns whether it went well."""
        try:
            await files.replace(path, content)
        except OSError as error:
            reason = f"{failure}: {path}: {error.strerror or error}"
            if reason != self._trouble.get(failure):
                log.error(failure, file=path, error=error)
            self._trouble[failure] = reason
            return False
        self._trouble.pop(failure, None)
        return True


def left_behind(directory: Path) -> bytes | None:
    """The record that an agent before this one wrote to the plugin directory; None: there is none.

    An empty one if it cannot be read.
    """
    for name in (RECORD, OLD_RECORD):
        try:
            return (directory / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError:
            return b""
    return None
