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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from npu_agent.config import SOCKET_PATH_MAX
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, Ledger
from npu_agent.core.offer import Device, Resource, split_id
from npu_agent.core.trouble import Trouble, TroubleKind, kind_of
from npu_agent.doctor.check import (
    Check,
    Finding,
    Unseen,
    have,
    line,
    note,
    ok,
    unknown,
    wrong,
)
from npu_agent.doctor.host import offered
from npu_agent.doctor.places import writable
from npu_agent.doctor.probe import Directory, Process, directory, probe, process
from npu_agent.doctor.situation import Situation
from npu_agent.files import content
from npu_agent.kubelet import KUBELET_SOCKET
from npu_agent.kubelet.ownership import Owner, lock_path, owner_of
from npu_agent.kubelet.podresources import UnavailableError, fetch, socket_beside
from npu_agent.kubelet.rpc import apart
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.text import reason

CHECKPOINT = "kubelet_internal_checkpoint"
"""The kubelet's device manager keeps what it knows there, as JSON (k8s.io/kubernetes,
pkg/kubelet/cm/devicemanager/checkpoint)."""
_LARGEST = 32 << 20
"""Bytes: it holds what each container was given."""
_ANSWER = 2.0
"""Seconds for a plugin to answer."""
_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of one of our sockets: see
`npu_agent.outputs.deviceplugin.endpoint`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A socket in the plugin directory."""

    name: str
    ours: bool
    """Whether it is named like one that an npu-agent of this configuration makes."""
    trouble: Trouble | None = None
    """Why nobody takes connections; None: somebody does."""
    plugin: bool = False
    """Whether it answers as a device plugin does."""
    by: Process | None = None
    """The process that made it, where /proc has it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.by})" if self.by else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubelet:
    """All that was seen of it."""

    directory: Directory | Unseen
    sockets: tuple[Socket, ...] | Unseen
    owner: Owner | Unseen | None
    """The npu-agent that serves this node; None: none does."""
    registered: Mapping[str, frozenset[str]] | Unseen | None
    """For each resource, the healthy devices that the kubelet knows; None: it has written nothing
    yet."""
    held: tuple[Assignment, ...] | Unseen


async def kubelet(situation: Situation) -> Kubelet:
    """Probes all of it."""
    path = situation.directory
    place, sockets, owner, registered, held = await asyncio.gather(
        probe(lambda: directory(path)),
        _sockets(situation),
        probe(lambda: _owner_of(path)),
        _registered(path),
        _held(path),
    )
    return Kubelet(directory=place, sockets=sockets, owner=owner, registered=registered, held=held)


async def _sockets(situation: Situation) -> tuple[Socket, ...] | Unseen:
    names = await probe(lambda: _socket_names(situation.directory))
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
    except OSError as error:  # a TimeoutError, too
        why = reason(error) or f"no answer within {_ANSWER:g} s"
        return Socket(name=name, ours=ours, trouble=Trouble(what=why, kind=kind_of(error)))
    with closing(writer):
        credentials = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
    by = await probe(lambda: process(situation.proc, struct.unpack("3i", credentials)[0]))
    return Socket(
        name=name,
        ours=ours,
        plugin=name != KUBELET_SOCKET and not ours and await _is_plugin(path),
        by=None if isinstance(by, Unseen) else by,
    )


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


def _owner_of(path: Path) -> Owner | None:
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
    raw = await probe(lambda: content(path / CHECKPOINT, _LARGEST))
    if raw is None or isinstance(raw, Unseen):
        return raw
    try:
        found = json.loads(raw)["Data"]["RegisteredDevices"] or {}
        return {str(name): frozenset(map(str, ids or ())) for name, ids in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Unseen(f"{path / CHECKPOINT} is not as kubelets write it")


async def _held(path: Path) -> tuple[Assignment, ...] | Unseen:
    try:
        return await fetch(socket_beside(path))
    except UnavailableError as error:
        return Unseen(str(error), kind_of(error.__cause__ or error))


def checks(situation: Situation, found: Kubelet, snapshot: Snapshot | Unseen) -> Iterator[Check]:
    """What it means."""
    yield line("plugin directory", _of_directory, situation, found.directory)
    yield line(KUBELET_SOCKET, _of_kubelet_socket, situation, found.sockets)
    yield line("socket path", _of_path, situation)
    yield line("our sockets", _of_leftovers, found.sockets)
    yield line("other plugins", _of_others, situation, found.sockets)
    yield line("serving agent", _of_owner, situation, found.owner)
    yield line("pod-resources", _of_held, situation, found.held, snapshot)
    for resource in situation.resources:
        yield line(f"resource {resource.name}", of_resource, situation, resource, found, snapshot)


def _of_directory(situation: Situation, found: Directory | Unseen) -> Finding:
    if isinstance(found, Unseen):
        if found.kind is TroubleKind.DENIED and situation.in_pod:
            return wrong(found.why, _AS_ROOT)
    elif not found.there:
        return wrong(
            f"{found.path} is missing, or no directory",
            "is that the kubelet's (--root-dir)/device-plugins? Name the right one by pluginDir "
            "(--plugin-dir), and in a Pod mount it there (hostPath)",
        )
    elif found.read_only:
        return wrong(
            f"{found.path} is mounted read-only",
            "mount it without readOnly: the agent makes its socket there",
        )
    return writable(situation, found, _AS_ROOT)


_AS_ROOT = (
    "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it: the directory is "
    "root's alone (mode 0750)"
)


def _of_kubelet_socket(situation: Situation, sockets: tuple[Socket, ...] | Unseen) -> Finding:
    path = situation.directory / KUBELET_SOCKET
    found = next((each for each in have(sockets) if each.name == KUBELET_SOCKET), None)
    if found is None:
        return wrong(
            f"{path} is missing",
            "is the kubelet running (systemctl status kubelet), and is that its directory "
            "(pluginDir)?",
        )
    if found.trouble is None:
        return ok(f"{path} takes connections")
    if found.trouble.kind is TroubleKind.DENIED and situation.uid:
        raise Unseen(f"{path}: {found.trouble}", TroubleKind.DENIED)
    return wrong(
        f"{path}: {found.trouble}",
        "the kubelet has ended or hangs: systemctl status kubelet, journalctl -u kubelet",
    )


def _of_path(situation: Situation) -> Finding:
    path = situation.directory / f"{situation.config.socket_name}-01234567.sock"
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX:
        return wrong(
            f"that of our socket has {length} bytes, and Linux takes {SOCKET_PATH_MAX}",
            f"shorten pluginDir or socketName by {length - SOCKET_PATH_MAX}",
        )
    return ok(f"{length} bytes of at most {SOCKET_PATH_MAX}")


def _of_leftovers(sockets: tuple[Socket, ...] | Unseen) -> Finding:
    ours = [each for each in have(sockets) if each.ours]
    if left := [each.name for each in ours if each.trouble]:
        return note(
            f"nobody serves {', '.join(left)}",
            "harmless: left behind by an agent that was killed; the kubelet removes them when it "
            "starts, and so may you",
        )
    return ok(f"{len(ours)} served" if ours else "none")


def _of_others(situation: Situation, sockets: tuple[Socket, ...] | Unseen) -> Finding:
    """Whether another device plugin serves this node, and may be one for the same cards."""
    others = [each for each in have(sockets) if each.plugin]
    names = (situation.vendor.sockets, situation.config.socket_name)
    rivals = [each for each in others if any(word in each.name for word in names)]
    if rivals:
        return wrong(
            f"{_joined(rivals)} answers as a device plugin and is not npu-agent's: by its name "
            "one for the same cards, which both would hand out",
            _delete(situation),
        )
    return ok(f"{_joined(others)}: by the name for other devices" if others else "none")


def _delete(situation: Situation, unless: str = "") -> str:
    return (
        "delete the vendor's DaemonSet: kubectl get daemonsets -A | grep -i -e "
        f"{situation.vendor.sockets} -e npu; two plugins take a resource from each other, and the "
        f"kubelet reports it to neither{unless and f'. ({unless})'}"
    )


def _joined(sockets: Iterable[Socket]) -> str:
    return ", ".join(map(str, sockets))


def _of_owner(situation: Situation, found: Owner | Unseen | None) -> Finding:
    owner = have(found)
    if owner is None:
        return note(
            "no npu-agent serves this node now",
            "normal before it is installed, or without cards; else: is its Pod running here?",
        )
    if owner.host is None:
        return unknown(f"{owner} serves this node", "ask again: it signs as soon as it has it")
    if situation.in_pod and owner.host != situation.hostname:
        return note(
            f"{owner}; the agent of this Pod ({situation.hostname}) stands by",
            "normal during a rollout; else there are two DaemonSets: kubectl get daemonsets -A | "
            "grep npu-agent, and delete one",
        )
    return ok(str(owner))


def _of_held(
    situation: Situation, found: tuple[Assignment, ...] | Unseen, snapshot: Snapshot | Unseen
) -> Finding:
    if isinstance(found, Unseen) and found.kind is not TroubleKind.DENIED:
        return wrong(
            found.why,
            f"in a Pod, mount the host's {socket_beside(situation.directory).parent} there "
            "(hostPath, readOnly); on the host, systemctl status kubelet",
        )
    ours = {resource.name for resource in situation.resources}
    mine = [one for one in have(found) if one.resource in ours]
    if isinstance(snapshot, Snapshot) and not any(odd.unread for odd in snapshot.odd):
        cards = {state.id for state in snapshot.cards}
        if gone := [one for one in mine if split_id(one.device)[0] not in cards]:
            more = f", and {len(gone) - 1} more are" if len(gone) > 1 else ""
            return note(
                f"Pod {gone[0].namespace}/{gone[0].pod} holds {gone[0].device}, which is not here "
                f"any more{more}",
                "its card was drained or has failed under it: delete the Pod, or bring the card "
                "back",
            )
    return ok(f"answers: {len(mine)} of our devices are held by Pods")


def expected(
    resource: str, devices: tuple[Device, ...], held: tuple[Assignment, ...] | Unseen
) -> frozenset[str]:
    """The IDs that can be handed out, computed as the agent does; those in use among them."""
    if isinstance(held, tuple):
        cards = {device.card for device in devices}
        ledger = Ledger().answered(held, 0.0, cards=cards, resources=[resource])
        conflicts = ledger.conflicts(cards)
        devices = tuple(
            one for one in devices if conflicts.against((resource, one.id), one) is None
        )
    return frozenset(device.id for device in devices if device.healthy)


def of_resource(
    situation: Situation, resource: Resource, found: Kubelet, seen: Snapshot | Unseen
) -> Finding:
    """Whether the kubelet has our devices under this resource, no others, and only there."""
    snapshot, known = have(seen), have(found.registered) or {}
    devices = offered(situation, resource, snapshot)
    registered = known.get(resource.name, frozenset())
    cards = {state.id for state in snapshot.cards}
    if strange := sorted(registered - {device.id for device in devices}):
        if any(odd.unread for odd in snapshot.odd):
            return unknown(
                f"the kubelet has {strange[0]}, which may be of a card that cannot be read",
                "fix the odd entry first",
            )
        ours = split_id(strange[0])[0] in cards
        how = "this configuration does not offer" if ours else "no card of this host has"
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        return wrong(
            f"the kubelet has device {strange[0]}{more} of it, which {how}: a second plugin "
            f"registers the same resource{_candidates(found.sockets)}",
            _delete(
                situation,
                "Or these are of an agent with another configuration: name its --config-file",
            ),
        )
    configured = {one.name for one in situation.resources}
    cards = {device.card_id for device in devices}
    for other, ids in sorted(known.items()):
        both = sorted(id_ for id_ in ids if split_id(id_)[0] in cards)
        if other not in configured and both:
            return wrong(
                f"the kubelet has {both[0]} as {other}, too: a second plugin offers the same "
                f"cards{_candidates(found.sockets)}",
                _delete(
                    situation,
                    "For five minutes after it has ended the kubelet remembers a plugin, as after "
                    "a change of resourceName",
                ),
            )
    healthy = expected(resource.name, devices, found.held)
    if missing := healthy - registered:
        detail = f"the kubelet knows {len(healthy) - len(missing)} of {len(healthy)} devices"
        if isinstance(found.owner, Owner):
            return wrong(
                detail,
                "the agent runs and is not registered, or follows another configuration: see "
                "readiness, and its log",
            )
        return note(f"{detail}: no agent serves them")
    if not registered:
        return ok("no device to offer, and the kubelet knows of none")
    return ok(f"the kubelet knows {len(registered)}, all of them ours")


def _candidates(sockets: tuple[Socket, ...] | Unseen) -> str:
    """Which sockets a second plugin may have."""
    others = [] if isinstance(sockets, Unseen) else [each for each in sockets if each.plugin]
    return f"; its socket may be {_joined(others)}" if others else ""
