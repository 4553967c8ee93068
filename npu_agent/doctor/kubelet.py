"""The kubelet on this host: its directory and sockets, who is registered, who holds what."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from npu_agent.config import SOCKET_PATH_MAX
from npu_agent.config.resources import resources_of
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, Ledger
from npu_agent.core.offer import Device, split_id
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.host import offered
from npu_agent.doctor.look import Directory, content, directory, look
from npu_agent.doctor.places import of_writing
from npu_agent.doctor.situation import Situation
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.ownership import lock_path, owner_of
from npu_agent.kubelet.rpc import apart
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.deviceplugin.session import KUBELET_SOCKET
from npu_agent.vendors import WORDS

CHECKPOINT = "kubelet_internal_checkpoint"
"""The kubelet's device manager keeps what it knows there, as JSON (k8s.io/kubernetes,
pkg/kubelet/cm/devicemanager/checkpoint)."""
_LARGEST = 32 << 20
"""Bytes: it holds what each container was given."""
_ANSWER = 2.0
"""Seconds for a plugin to answer."""
_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of a socket of ours: see
`npu_agent.outputs.deviceplugin.endpoint`."""
_VENDORS = "furiosa"
"""In the names of the vendor's own plugins' sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A socket in the plugin directory."""

    name: str
    ours: bool
    """Whether it is named like one that an npu-agent of this configuration makes."""
    accepts: bool
    """Whether somebody takes connections."""
    trouble: str = ""
    """Why nobody does."""
    plugin: bool = False
    """Whether it answers as a device plugin does."""
    by: str = ""
    """The process that made it, where /proc tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubelet:
    """All that was seen of it."""

    directory: Directory | Unseen
    sockets: tuple[Socket, ...] | Unseen
    owner: str | Unseen | None
    """The npu-agent that serves this node; None: none does."""
    registered: Mapping[str, frozenset[str]] | Unseen | None
    """For each resource, the healthy devices that the kubelet knows; None: it has written nothing
    yet."""
    held: tuple[Assignment, ...] | Unseen

    @property
    def agent_runs(self) -> bool:
        """Whether an npu-agent serves this node."""
        return isinstance(self.owner, str)


async def kubelet(situation: Situation) -> Kubelet:
    """Looks at all of it."""
    path = situation.directory
    place, sockets, owner, registered, held = await asyncio.gather(
        look(lambda: directory(path)),
        _sockets(situation),
        look(lambda: _owner_of(path)),
        _registered(path),
        _held(path),
    )
    return Kubelet(directory=place, sockets=sockets, owner=owner, registered=registered, held=held)


def unseen(why: Unseen) -> Kubelet:
    """Nothing of it was seen."""
    return Kubelet(directory=why, sockets=why, owner=why, registered=why, held=why)


async def _sockets(situation: Situation) -> tuple[Socket, ...] | Unseen:
    names = await look(lambda: _socket_names(situation.directory))
    if isinstance(names, Unseen):
        return names
    return tuple(await asyncio.gather(*(_socket(situation, name) for name in names)))


def _socket_names(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(item.name for item in path.iterdir() if stat.S_ISSOCK(item.lstat().st_mode))


async def _socket(situation: Situation, name: str) -> Socket:
    """Connects, and asks anyone but the kubelet and our own for a device plugin's options."""
    path = situation.directory / name
    ours = re.fullmatch(re.escape(situation.config.socket_name) + _OURS, name) is not None
    try:
        async with asyncio.timeout(_ANSWER):
            _, writer = await asyncio.open_unix_connection(str(path))
        credentials = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        writer.close()
    except TimeoutError:
        trouble = f"no answer within {_ANSWER:g} s"
        return Socket(name=name, ours=ours, accepts=False, trouble=trouble)
    except OSError as error:
        trouble = error.strerror or str(error)
        return Socket(name=name, ours=ours, accepts=False, trouble=trouble)
    by = await look(lambda: _process(situation.proc, struct.unpack("3i", credentials)[0]))
    return Socket(
        name=name,
        ours=ours,
        accepts=True,
        plugin=name != KUBELET_SOCKET and not ours and await _is_plugin(path),
        by=by if isinstance(by, str) else "",
    )


def _process(proc: Path, pid: int) -> str:
    """What runs there; empty for a process in another PID namespace, which has number 0."""
    words = content(proc / str(pid) / "cmdline", 256) if pid else None
    if not words:
        return ""
    shown = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return f"pid {pid}: {shown}"


async def _is_plugin(path: Path) -> bool:
    async def ask() -> None:
        async with asyncio.timeout(_ANSWER), Channel(path=str(path)) as channel:
            stub = wire.DevicePluginStub(channel)
            await stub.get_device_plugin_options(wire.Empty())

    try:
        await apart(ask())
    except (OSError, TimeoutError, GRPCError, ProtocolError, StreamTerminatedError):
        return False
    return True


def _owner_of(path: Path) -> str | None:
    """Who holds the lock. A shared one is asked for, for an instant, which nobody notices."""
    try:
        descriptor = os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner_of(descriptor)
    finally:
        os.close(descriptor)
    return None


async def _registered(path: Path) -> Mapping[str, frozenset[str]] | Unseen | None:
    raw = await look(lambda: content(path / CHECKPOINT, _LARGEST))
    if raw is None or isinstance(raw, Unseen):
        return raw
    try:
        found = json.loads(raw)["Data"]["RegisteredDevices"] or {}
        return {str(name): frozenset(map(str, ids or ())) for name, ids in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Unseen(f"{path / CHECKPOINT} is not as kubelets write it")


async def _held(path: Path) -> tuple[Assignment, ...] | Unseen:
    try:
        return await assignments.fetch(assignments.socket_beside(path))
    except assignments.UnavailableError as error:
        denied = isinstance(error.__cause__, PermissionError)
        return Unseen(str(error), denied=denied)


def checks(situation: Situation, found: Kubelet, snapshot: Snapshot | Unseen) -> Iterator[Check]:
    """What it means."""
    yield _of_directory(situation, found.directory)
    yield _of_kubelet_socket(situation, found)
    yield _of_path(situation)
    yield _of_leftovers(found.sockets)
    yield _of_others(found.sockets, situation)
    yield _of_owner(situation, found.owner)
    yield _of_held(situation, found.held, snapshot)
    for resource in resources_of(situation.config, WORDS.core_counts):
        if isinstance(snapshot, Unseen):
            yield snapshot.check(f"resource {resource.name}")
        else:
            devices = offered(situation, resource, snapshot)
            yield of_resource(situation, resource.name, devices, found, snapshot)


def _of_directory(situation: Situation, found: Directory | Unseen) -> Check:
    name = "plugin directory"
    if isinstance(found, Unseen):
        if found.denied and situation.in_pod:
            return Check(name, State.WRONG, found.why, _AS_ROOT)
        return found.check(name)
    if not found.there:
        return Check(
            name,
            State.WRONG,
            f"{found.path} is missing, or no directory",
            "is that the kubelet's (--root-dir)/device-plugins? Say which one by pluginDir "
            "(--plugin-dir), and in a Pod mount it there (hostPath)",
        )
    if found.read_only:
        return Check(
            name,
            State.WRONG,
            f"{found.path} is mounted read-only",
            "mount it without readOnly: the agent makes its socket there",
        )
    return of_writing(name, situation, found, _AS_ROOT)


_AS_ROOT = (
    "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it: the directory is "
    "root's alone (mode 0750)"
)


def _of_kubelet_socket(situation: Situation, found: Kubelet) -> Check:
    name, path = KUBELET_SOCKET, situation.directory / KUBELET_SOCKET
    if isinstance(found.sockets, Unseen):
        return found.sockets.check(name)
    kubelet = next((each for each in found.sockets if each.name == KUBELET_SOCKET), None)
    if kubelet is None:
        return Check(
            name,
            State.WRONG,
            f"{path} is missing",
            "is the kubelet running (systemctl status kubelet), and is that its directory "
            "(pluginDir)?",
        )
    if not kubelet.accepts:
        if "denied" in kubelet.trouble and situation.uid:
            return Unseen(f"{path}: {kubelet.trouble}", denied=True).check(name)
        return Check(
            name,
            State.WRONG,
            f"{path}: {kubelet.trouble}",
            "the kubelet has ended or hangs: systemctl status kubelet, journalctl -u kubelet",
        )
    return Check(name, State.OK, f"{path} takes connections")


def _of_path(situation: Situation) -> Check:
    path = situation.directory / f"{situation.config.socket_name}-01234567.sock"
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX:
        return Check(
            "socket path",
            State.WRONG,
            f"that of our socket has {length} bytes, and Linux takes {SOCKET_PATH_MAX}",
            f"shorten pluginDir or socketName by {length - SOCKET_PATH_MAX}",
        )
    return Check("socket path", State.OK, f"{length} bytes of at most {SOCKET_PATH_MAX}")


def _of_leftovers(sockets: tuple[Socket, ...] | Unseen) -> Check:
    name = "our sockets"
    if isinstance(sockets, Unseen):
        return sockets.check(name)
    ours = [each for each in sockets if each.ours]
    left = [each.name for each in ours if not each.accepts]
    if left:
        return Check(
            name,
            State.NOTE,
            f"nobody serves {', '.join(left)}",
            "harmless: left behind by an agent that was killed; the kubelet removes them when it "
            "starts, and so may you",
        )
    return Check(name, State.OK, f"{len(ours)} served" if ours else "none")


def _of_others(sockets: tuple[Socket, ...] | Unseen, situation: Situation) -> Check:
    """Whether another device plugin serves this node, and may be one for the same cards."""
    name = "other plugins"
    if isinstance(sockets, Unseen):
        return sockets.check(name)
    others = [each for each in sockets if each.plugin]
    names = (_VENDORS, situation.config.socket_name)
    rivals = [each for each in others if any(word in each.name for word in names)]
    if rivals:
        return Check(
            name,
            State.WRONG,
            f"{_shown(rivals)} answers as a device plugin and is not npu-agent's: by its name one "
            "for the same cards, which both would hand out",
            _DELETE,
        )
    if others:
        return Check(name, State.OK, f"{_shown(others)}: by the name for other devices")
    return Check(name, State.OK, "none")


_DELETE = (
    "delete the vendor's DaemonSet: kubectl get daemonsets -A | grep -i -e furiosa -e npu; two "
    "plugins take a resource from each other, and the kubelet says so to neither"
)


def _shown(sockets: Iterable[Socket]) -> str:
    return ", ".join(f"{each.name} ({each.by})" if each.by else each.name for each in sockets)


def _of_owner(situation: Situation, owner: str | Unseen | None) -> Check:
    name = "serving agent"
    if isinstance(owner, Unseen):
        return owner.check(name)
    if owner is None:
        return Check(
            name,
            State.NOTE,
            "no npu-agent serves this node now",
            "normal before it is installed, or without cards; else: is its Pod running here?",
        )
    if situation.in_pod and f" on {situation.hostname}," not in owner:
        return Check(
            name,
            State.NOTE,
            f"{owner}; the agent of this Pod ({situation.hostname}) stands by",
            "normal during a rollout; else there are two DaemonSets: kubectl get daemonsets -A | "
            "grep npu-agent, and delete one",
        )
    return Check(name, State.OK, owner)


def _of_held(
    situation: Situation, held: tuple[Assignment, ...] | Unseen, snapshot: Snapshot | Unseen
) -> Check:
    name = "pod-resources"
    if isinstance(held, Unseen):
        if held.denied:
            return held.check(name)
        path = assignments.socket_beside(situation.directory).parent
        return Check(
            name,
            State.WRONG,
            held.why,
            f"in a Pod, mount the host's {path} there (hostPath, readOnly); on the host, "
            "systemctl status kubelet",
        )
    ours = {resource.name for resource in resources_of(situation.config, WORDS.core_counts)}
    mine = [one for one in held if one.resource in ours]
    if isinstance(snapshot, Snapshot) and not any(odd.unread for odd in snapshot.odd):
        cards = {state.id for state in snapshot.cards}
        if gone := [one for one in mine if split_id(one.device)[0] not in cards]:
            first = gone[0]
            return Check(
                name,
                State.NOTE,
                f"Pod {first.namespace}/{first.pod} holds {first.device}, which is not here any "
                "more" + (f", and {len(gone) - 1} more are" if len(gone) > 1 else ""),
                "its card was drained or has failed under it: delete the Pod, or bring the card "
                "back",
            )
    return Check(name, State.OK, f"answers: {len(mine)} of our devices are held by Pods")


def expected(
    resource: str, devices: tuple[Device, ...], held: tuple[Assignment, ...] | Unseen
) -> frozenset[str]:
    """The IDs that can be handed out, by the agent's own reckoning; those in use among them."""
    if isinstance(held, tuple):
        cards = {device.card for device in devices}
        ledger = Ledger().answered(held, 0.0, cards=cards, resources=[resource])
        claims = ledger.claims(cards)
        devices = tuple(one for one in devices if claims.against(resource, one) is None)
    return frozenset(device.id for device in devices if device.healthy)


def of_resource(
    situation: Situation,
    resource: str,
    devices: tuple[Device, ...],
    found: Kubelet,
    snapshot: Snapshot,
) -> Check:
    """Whether the kubelet has our devices under this resource, nobody else's, and only there."""
    name, known = f"resource {resource}", found.registered
    if isinstance(known, Unseen):
        return known.check(name)
    ours = {device.id for device in devices}
    registered = (known or {}).get(resource, frozenset())
    strange = sorted(registered - ours)
    if strange and any(odd.unread for odd in snapshot.odd):
        return Check(
            name,
            State.UNKNOWN,
            f"the kubelet has {strange[0]}, which may be of a card that cannot be read",
            "mend the odd entry first",
        )
    if strange:
        cards = {state.id for state in snapshot.cards}
        how = "no card of this host has"
        if split_id(strange[0])[0] in cards:
            how = "this configuration does not offer"
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        return Check(
            name,
            State.WRONG,
            f"the kubelet has device {strange[0]}{more} of it, which {how}: a second plugin "
            f"registers the same resource{_candidates(found.sockets)}",
            f"{_DELETE}. (Or these are of an agent with another configuration: name its "
            "--config-file)",
        )
    configured = {one.name for one in resources_of(situation.config, WORDS.core_counts)}
    cards = {device.card_id for device in devices}
    for other, ids in sorted((known or {}).items()):
        both = sorted(id_ for id_ in ids if split_id(id_)[0] in cards)
        if other not in configured and both:
            return Check(
                name,
                State.WRONG,
                f"the kubelet has {both[0]} as {other}, too: a second plugin offers the same "
                f"cards{_candidates(found.sockets)}",
                f"{_DELETE}. (For five minutes after it has ended the kubelet remembers a "
                "plugin, as after a change of resourceName)",
            )
    healthy = expected(resource, devices, found.held)
    missing = healthy - registered
    if missing and found.agent_runs:
        return Check(
            name,
            State.WRONG,
            f"the kubelet knows {len(healthy) - len(missing)} of {len(healthy)} devices",
            "the agent runs and is not registered, or follows another configuration: see "
            "readiness, and its log",
        )
    if missing:
        return Check(
            name,
            State.NOTE,
            f"the kubelet knows {len(healthy) - len(missing)} of {len(healthy)} devices: no agent "
            "serves them",
        )
    if not registered:
        return Check(name, State.OK, "no device to offer, and the kubelet knows of none")
    return Check(name, State.OK, f"the kubelet knows {len(registered)}, all of them ours")


def _candidates(sockets: tuple[Socket, ...] | Unseen) -> str:
    """Whose it may be."""
    if isinstance(sockets, Unseen):
        return ""
    others = [each for each in sockets if each.plugin]
    return f"; its socket may be {_shown(others)}" if others else ""
