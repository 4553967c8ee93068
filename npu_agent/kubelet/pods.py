"""Pods that live on although the kubelet no longer lists them: its own notes, and the cgroups.

The kubelet forgets a Pod that was deleted by force before it has ended its containers, and gives
its devices to the next one. Neither pod-resources nor the API server knows such a Pod any more. So
its UID is kept from the time before, and its cgroup says whether any process of it runs.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from npu_agent import files, text
from npu_agent.core.ledger import Name
from npu_agent.logs import logger
from npu_agent.threads import DaemonThread

log = logger(__name__)

CHECKPOINT = "kubelet_internal_checkpoint"
"""In the plugin directory: what the kubelet's device manager knows, as JSON, such as which Pod, by
UID, has which devices (k8s.io/kubernetes, pkg/kubelet/cm/devicemanager/checkpoint). pod-resources
has no UIDs."""
CGROUPS = "sys/fs/cgroup"
"""Below the host's root."""

_LARGEST = 8 << 20
"""Bytes that are read of it; a Pod with eight cards takes 20 kB."""
_UNSEEN = (
    "it cannot be seen whether the containers of deleted Pods still run: devices are free when the "
    "kubelet says so"
)
_HUNG = (
    "it cannot be seen in time whether the containers of deleted Pods still run: their devices are "
    "not given to others until it can"
)
_DEADLINE = 2.0
"""Seconds for a file, or for all cgroups that are asked for."""
_DEEPEST = 8
"""Levels of cgroups below which no Pod's is searched: kubelets that run in a container, or have
a `cgroupRoot`, put some above them."""
_POD = re.compile(r"pod([0-9a-f][0-9a-f_-]+)(?:\.slice)?$")
"""The end of the name of a Pod's cgroup (k8s.io/kubernetes, pkg/kubelet/cm,
pod_container_manager_linux.go and cgroup_manager_linux.go): ``pod<uid>`` with the driver cgroupfs,
``kubepods-burstable-pod<uid, with _ for ->.slice`` with systemd."""


class Pods:
    """The Pods of this node, by what the kubelet and the kernel have of them."""

    def __init__(self, directory: Path, host_root: Path) -> None:
        """Reads nothing yet.

        Args:
            directory: the kubelet's device-plugins directory.
            host_root: where the host's ``/`` is seen.
        """
        self._checkpoint = directory / CHECKPOINT
        self._cgroups = host_root / CGROUPS
        self._simulated = host_root / files.SIMULATION
        self._thread = DaemonThread("npu-pods")
        self._where: dict[str, Path] = {}
        """The cgroups that were found, by the Pod's UID."""
        self._troubles: set[str] = set()
        """What was logged."""

    async def noted(self) -> Mapping[Name, frozenset[str]]:
        """The UIDs of the Pods that have each device, as the kubelet has noted them last.

        It notes them when it hands out devices; a Pod that has ended stays until then. Empty where
        that cannot be read.
        """
        try:
            return await self._thread.call(self._noted, deadline=_DEADLINE)
        except (OSError, ValueError) as error:
            self._say(_UNSEEN, self._checkpoint, error)
            return {}

    async def living(self, uids: Collection[str]) -> frozenset[str]:
        """Those of the Pods of which any process runs.

        None of them where cgroups cannot be seen: then only the kubelet's lists count. All of them
        if the kernel does not answer in time.
        """
        if not uids:
            return frozenset()
        wanted = frozenset(uids)
        try:
            return await self._thread.call(lambda: self._living(wanted), deadline=_DEADLINE)
        except TimeoutError as error:
            self._say(_HUNG, self._cgroups, error)
            return wanted
        except OSError as error:
            self._say(_UNSEEN, self._cgroups, error)
            return frozenset()

    def _say(self, what: str, path: Path, error: Exception) -> None:
        reason = text.reason(error)
        trouble = reason if str(path) in reason else f"{path}: {reason}"
        if trouble not in self._troubles:
            self._troubles.add(trouble)
            log.warning(what, reason=trouble)

    def _noted(self) -> dict[Name, frozenset[str]]:
        content = files.content(self._checkpoint, _LARGEST, follow=False)
        if content is None:  # nobody was given anything yet
            return {}
        found: dict[Name, frozenset[str]] = {}
        try:
            for entry in json.loads(content)["Data"]["PodDeviceEntries"] or ():
                for devices in (entry["DeviceIDs"] or {}).values():
                    for device in devices or ():
                        name = (str(entry["ResourceName"]), str(device))
                        found[name] = found.get(name, frozenset()) | {str(entry["PodUID"])}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("this is no list of devices as kubelets write it") from error
        return found

    def _living(self, uids: frozenset[str]) -> frozenset[str]:
        if unknown := uids - self._where.keys():
            if not self._cgroups.is_dir():
                if self._simulated.exists():  # its Pods have none
                    return frozenset()
                missing = "this is missing: is it mounted here?"
                raise FileNotFoundError(errno.ENOENT, missing, str(self._cgroups))
            # The first version has a tree for each controller; that of pids counts processes.
            unified = (self._cgroups / "cgroup.controllers").exists()
            top = self._cgroups if unified else self._cgroups / "pids"
            self._where |= {uid: path for uid, path in _pods(top) if uid in unknown}
        living = frozenset(uid for uid in uids & self._where.keys() if _populated(self._where[uid]))
        for uid in uids - living:
            self._where.pop(uid, None)
        return living


def _pods(directory: Path, depth: int = 0) -> Iterator[tuple[str, Path]]:
    """The UID and the cgroup of each Pod."""
    try:
        below = [each for each in os.scandir(directory) if each.is_dir(follow_symlinks=False)]
    except OSError:
        if not depth:
            raise
        return  # it has gone
    for each in below:
        if match := _POD.search(each.name):
            yield match[1].replace("_", "-"), Path(each.path)
        elif depth < _DEEPEST:
            yield from _pods(Path(each.path), depth + 1)


def _populated(cgroup: Path) -> bool:
    """Whether any process runs in this cgroup or below.

    The files with PIDs do not tell: a process of another PID namespace is not in them.
    """
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except FileNotFoundError:
        pass
    except OSError:  # ENODEV: it has gone meanwhile
        return False
    try:
        return int((cgroup / "pids.current").read_text()) > 0
    except (OSError, ValueError):
        return False
