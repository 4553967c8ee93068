"""Orphaned Pods: the kubelet's checkpoint has their UIDs, and cgroups show whether they run.

The kubelet forgets a Pod that was deleted by force before its containers have ended, and gives its
devices to the next one. Neither pod-resources nor the API server knows it any more.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from npu_agent import files, text, typedjson
from npu_agent.core.ledger import DeviceName
from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread

log = logger(__name__)

CHECKPOINT = "kubelet_internal_checkpoint"
"""In the plugin directory: what the device manager knows, such as which Pod, by UID, has which
devices (k8s.io/kubernetes, pkg/kubelet/cm/devicemanager/checkpoint). pod-resources has no UIDs."""
CGROUPS = "sys/fs/cgroup"
MOST = 4096
"""Allocations of a resource; 64 cards of 8 cores have 512."""


class _Entry(msgspec.Struct):
    PodUID: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | None
    """By NUMA node."""


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None


class _Checkpoint(msgspec.Struct):
    Data: _Data


_LARGEST = 8 << 20
"""Bytes that are read of it; a Pod with eight cards takes 20 kB."""
_UNSEEN = "cannot check whether containers of deleted Pods are still running; trusting the kubelet"
_UNREADABLE = (
    "cannot read the cgroups of deleted Pods; withholding their devices until they can be read"
)
_EVENTS = 4096
"""Bytes that are read of a cgroup's file; kernels write some 25."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)
"""Errors of a cgroup that was removed."""
_POD = re.compile(r"pod([0-9a-f][0-9a-f_-]+)(?:\.slice)?$")
"""The end of the name of a Pod's cgroup (k8s.io/kubernetes, pkg/kubelet/cm,
pod_container_manager_linux.go and cgroup_manager_linux.go): ``pod<uid>`` with the driver cgroupfs,
``kubepods-burstable-pod<uid, with _ for ->.slice`` with systemd."""


class Pods:
    """The Pods with devices, and those of them that run."""

    def __init__(self, directory: Path, host_root: Path, deadline: float = 2.0) -> None:
        """`deadline` is in seconds, for a file or for all cgroups that are asked for."""
        self._deadline = deadline
        self._checkpoint = directory / CHECKPOINT
        self._cgroups = host_root / CGROUPS
        self._simulated = host_root / files.SIMULATION
        self._holders: Mapping[DeviceName, frozenset[str]] = {}
        """The last that could be read."""
        self._thread = DaemonThread()
        self._checkpoint_reporter = Reporter(log, _UNSEEN)
        self._cgroup_reporter = Reporter(log, _UNREADABLE)
        self._no_cgroups = Reporter(log, _UNSEEN)

    async def device_holders(self) -> Mapping[DeviceName, frozenset[str]]:
        """The UIDs of the Pods that have each device; if that cannot be read, as it was last.

        The kubelet notes them when it hands out devices; a Pod that has ended stays until then.
        Resources with more than `MOST` devices are left out, as `podresources.read_list` does.
        """
        try:
            self._holders = await self._thread.call(self._device_holders, deadline=self._deadline)
        except (OSError, ValueError) as error:
            self._checkpoint_reporter.failed(_at(self._checkpoint, error))
        else:
            self._checkpoint_reporter.works()
        return self._holders

    async def running(self, uids: Collection[str]) -> frozenset[str]:
        """Returns those of the Pods that have a process, as `cgroups` has it."""
        cgroups = await self.cgroups(uids)
        return frozenset(uid for uid, populated in cgroups.items() if populated)

    async def cgroups(self, uids: Collection[str]) -> Mapping[str, bool]:
        """Returns those of the Pods that have a cgroup, by UID: whether it has a process.

        The kubelet makes it before the Pod's volumes are there, and removes it when the Pod has
        ended. None on a host without cgroups: then only the kubelet's lists count. If they cannot
        be read in time, all have one with a process.
        """
        if not uids:
            return {}
        wanted = frozenset(uids)
        try:
            found = await self._thread.call(lambda: self._read(wanted), deadline=self._deadline)
        except FileNotFoundError as error:
            self._no_cgroups.failed(_at(self._cgroups, error))
            return {}
        except OSError as error:
            self._cgroup_reporter.failed(_at(self._cgroups, error))
            return dict.fromkeys(wanted, True)
        self._cgroup_reporter.works()
        return found

    def _device_holders(self) -> dict[DeviceName, frozenset[str]]:
        content = files.content(self._checkpoint, _LARGEST, follow=False)
        if content is None:  # no container was given anything yet
            return {}
        holders: dict[DeviceName, frozenset[str]] = {}
        for entry in typedjson.decode(content, _Checkpoint).Data.PodDeviceEntries or ():
            for devices in (entry.DeviceIDs or {}).values():
                for device in devices or ():
                    name = DeviceName(entry.ResourceName, device)
                    holders[name] = holders.get(name, frozenset()) | {entry.PodUID}
        devices_of = Counter(name.resource for name in holders)
        return {name: uids for name, uids in holders.items() if devices_of[name.resource] <= MOST}

    def _read(self, uids: frozenset[str]) -> dict[str, bool]:
        # The first version has a tree for each controller; that of pids counts processes.
        unified = (self._cgroups / "cgroup.controllers").exists()
        cgroups: dict[str, bool] = {}
        try:
            for uid, path in _pods(self._cgroups if unified else self._cgroups / "pids"):
                if uid in uids:
                    cgroups[uid] = _populated(path) or cgroups.get(uid, False)
        except FileNotFoundError:
            if self._simulated.exists():  # its Pods have none
                return {}
            missing = "this is missing: mount it here"
            raise FileNotFoundError(errno.ENOENT, missing, str(self._cgroups)) from None
        return cgroups


def _at(path: Path, error: Exception) -> str:
    reason = text.reason(error)
    return reason if str(path) in reason else f"{path}: {reason}"


def _pods(top: Path) -> Iterator[tuple[str, Path]]:
    """The UID and the path of each Pod's cgroup; several if the kubelet's `cgroupRoot` has changed.

    Raises:
        OSError: one cannot be read; a FileNotFoundError if there is no `top`.
    """
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                below = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if directory == top or error.errno not in _GONE:
                raise
            continue
        for path in below:
            if match := _POD.search(path.name):
                yield match[1].replace("_", "-"), path
            else:
                waiting.append(path)


def _populated(cgroup: Path) -> bool:
    """Whether any process runs in this cgroup or below.

    The files with PIDs lack processes of other PID namespaces.

    Raises:
        OSError: it cannot be read.
    """
    try:
        if (events := files.content(cgroup / "cgroup.events", _EVENTS)) is not None:
            return b"populated 0" not in events
        return files.content(cgroup / "pids.current", _EVENTS) not in (None, b"0\n")
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
