"""The kubelet's directory for device plugins, and the sockets there."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from npu_agent.core.trouble import Trouble, TroubleKind, kind_of
from npu_agent.doctor.check import KUBELET, Finding, Lines, Unseen, note, ok, wrong
from npu_agent.doctor.places import writable
from npu_agent.doctor.probe import Directory, Process, directory, probe, process
from npu_agent.doctor.situation import Situation
from npu_agent.files import SOCKET_PATH_MAX
from npu_agent.kubelet import KUBELET_SOCKET
from npu_agent.kubelet.rpc import ask
from npu_agent.text import reason

_ANSWER = 2.0
"""Seconds for a plugin to answer."""
_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of one of our sockets: see
`npu_agent.outputs.deviceplugin.endpoint`."""
_AS_ROOT = (
    "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it: the directory is "
    "root's alone (mode 0750)"
)


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "plugin directory", _plugin_directory(here)
    yield KUBELET_SOCKET, _kubelet_socket(here)
    yield "socket path", _socket_path(here)
    yield "our sockets", _our_sockets(here)
    yield "other plugins", _other_plugins(here)


async def plugin_directory(here: Situation) -> Directory:
    """The kubelet's, for device plugins."""
    return await probe(lambda: directory(here.directory))


async def _plugin_directory(here: Situation) -> Finding:
    try:
        found = await here.see(plugin_directory)
    except Unseen as unseen:
        if unseen.kind is TroubleKind.DENIED and here.in_pod:
            return wrong(unseen.why, _AS_ROOT, here.apply_again())
        raise
    if not found.there:
        return wrong(
            f"{found.path} is missing, or no directory",
            "set pluginDir (--plugin-dir) to the kubelet's (--root-dir)/device-plugins, and in a "
            "Pod mount it there (hostPath)",
            KUBELET,
        )
    if found.read_only:
        return wrong(
            f"{found.path} is mounted read-only",
            "mount it without readOnly: the agent makes its socket there",
            here.apply_again() if here.in_pod else f"findmnt -T {found.path}",
        )
    return writable(here, found, _AS_ROOT)


def _socket_path(here: Situation) -> Finding:
    path = here.directory / f"{here.config.socket_name}-01234567.sock"
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX:
        return wrong(
            f"that of our socket has {length} bytes, and Linux takes {SOCKET_PATH_MAX}",
            f"shorten pluginDir or socketName by {length - SOCKET_PATH_MAX}",
            here.command("config show", *here.options),
        )
    return ok(f"{length} bytes of at most {SOCKET_PATH_MAX}")


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


async def sockets(here: Situation) -> tuple[Socket, ...]:
    """All in the plugin directory."""
    names = await probe(lambda: _socket_names(here.directory))
    return tuple(await asyncio.gather(*(_socket(here, name) for name in names)))


def _socket_names(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(item.name for item in path.iterdir() if stat.S_ISSOCK(item.lstat().st_mode))


async def _socket(here: Situation, name: str) -> Socket:
    """Connects, and asks anyone but the kubelet and our own for a device plugin's options."""
    path = here.directory / name
    ours = re.fullmatch(re.escape(here.config.socket_name) + _OURS, name) is not None
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
    by: Process | None = None
    with suppress(Unseen):
        by = await probe(lambda: process(here.proc, struct.unpack("3i", credentials)[0]))
    return Socket(
        name=name,
        ours=ours,
        plugin=name != KUBELET_SOCKET and not ours and await _is_plugin(path),
        by=by,
    )


async def _is_plugin(path: Path) -> bool:
    try:
        async with asyncio.timeout(_ANSWER):
            await ask(path, "/v1beta1.DevicePlugin/GetDevicePluginOptions", most=1 << 16)
    except (OSError, ValueError, GRPCError, ProtocolError, StreamTerminatedError):
        return False
    return True


async def _kubelet_socket(here: Situation) -> Finding:
    path = here.directory / KUBELET_SOCKET
    every = await here.see(sockets)
    found = next((each for each in every if each.name == KUBELET_SOCKET), None)
    if found is None:
        return wrong(
            f"{path} is missing",
            "start the kubelet; if it runs, set pluginDir (--plugin-dir) to its "
            "(--root-dir)/device-plugins",
            KUBELET,
        )
    if found.trouble is None:
        return ok(f"{path} takes connections")
    if found.trouble.kind is TroubleKind.DENIED and here.uid:
        raise Unseen(f"{path}: {found.trouble}", TroubleKind.DENIED)
    return wrong(
        f"{path}: {found.trouble}",
        "the kubelet has ended or hangs: read journalctl -u kubelet, and restart it",
        KUBELET,
    )


async def _our_sockets(here: Situation) -> Finding:
    ours = [each for each in await here.see(sockets) if each.ours]
    if left := [each.name for each in ours if each.trouble]:
        return note(
            f"nobody serves {', '.join(left)}",
            "harmless: left behind by an agent that was killed; the kubelet removes them when it "
            "starts, and so may you",
        )
    return ok(f"{len(ours)} served" if ours else "none")


async def _other_plugins(here: Situation) -> Finding:
    """Whether another device plugin serves this node, and may be one for the same cards."""
    others = [each for each in await here.see(sockets) if each.plugin]
    # A plugin may name its socket after its resource, a.b/npu: npu.sock.
    families = (family for vendor in here.vendors for family in vendor.spec.families)
    words = (here.config.socket_name, *_plugin_words(here), *families)
    rivals = [each for each in others if any(word in each.name for word in words)]
    if rivals:
        return wrong(
            f"{_joined(rivals)} answers as a device plugin and is not npu-agent's: by its name "
            "one for the same cards, which both would hand out",
            delete_plugin(here),
            list_plugins(here),
        )
    return ok(f"{_joined(others)}: by the name for other devices" if others else "none")


def _plugin_words(here: Situation) -> tuple[str, ...]:
    return tuple(vendor.profile.plugins for vendor in here.vendors)


def delete_plugin(here: Situation, unless: str = "") -> str:
    """The remedy for a second plugin; `unless` is what else it may be."""
    return (
        f"delete the vendor's DaemonSet: {list_plugins(here)}; two "
        "plugins take a resource from each other, and the kubelet reports it to neither"
        f"{unless and f'. ({unless})'}"
    )


def list_plugins(here: Situation) -> str:
    """The command that shows other device plugins of the cluster."""
    words = " -e ".join((*_plugin_words(here), "npu"))
    return f"kubectl get daemonsets -A | grep -i -e {words}"


def _joined(sockets: Iterable[Socket]) -> str:
    return ", ".join(map(str, sockets))


async def candidates(here: Situation) -> str:
    """Which sockets a second plugin may have."""
    others = [each for each in await here.see_or(sockets, ()) if each.plugin]
    return f"; its socket may be {_joined(others)}" if others else ""
