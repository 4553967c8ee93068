"""The kubelet's directory for device plugins, and the sockets there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from npu_agent.core.trouble import Trouble, TroubleKind, kind_of
from npu_agent.files import regular
from npu_agent.kubelet import KUBELET_SOCKET
from npu_agent.kubelet.ownership import Owner, lock_path, read_owner
from npu_agent.kubelet.rpc import UNANSWERED, GRPCError, ask
from npu_agent.people.doctor.check import KUBELET, SUDO, Check, Lines, Unknown, ok, unknown, wrong
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.directories import Directory, directory, writable
from npu_agent.text import reason

_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of one of our sockets: see
`npu_agent.outputs.deviceplugin.session`."""
_AS_ROOT = (
    "set runAsUser: 0 in the Pod's securityContext, as in k8s/daemonset.yaml: only root may use "
    "the directory (mode 0750)"
)


async def user(context: Context) -> Lines:
    yield "uid", _uid(context)


async def lines(context: Context) -> Lines:
    yield "plugin directory", _plugin_directory(context)
    yield KUBELET_SOCKET, _kubelet_socket(context)
    yield "other plugins", _other_plugins(context)


async def _uid(context: Context) -> Check:
    if context.uid == 0:
        return ok("0, as the kubelet's directory needs it")
    found = await context.probe_or(plugin_directory, None)
    if found is not None and (found.writable or not found.there):
        return ok(f"{context.uid}, which may write to the plugin directory")
    if context.in_pod:
        detail = f"{context.uid}, which may not write to the plugin directory"
        return wrong(detail, f"{_AS_ROOT}; no capability is needed", context.apply_again())
    return unknown(f"{context.uid}: checks that need root are left out", SUDO)


async def plugin_directory(context: Context) -> Directory:
    return await context.in_thread(lambda: directory(context.directory))


async def owner(context: Context) -> Owner | None:
    return await context.in_thread(lambda: owner_at(context.directory))


def owner_at(path: Path) -> Owner | None:
    """Returns the holder of the lock here; takes a shared lock for an instant, which is safe."""
    try:
        descriptor = regular(lock_path(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_owner(descriptor)
    finally:
        os.close(descriptor)
    return None


async def _plugin_directory(context: Context) -> Check:
    try:
        found = await context.probe(plugin_directory)
    except Unknown as error:
        if error.kind is TroubleKind.DENIED and context.in_pod:
            return wrong(error.why, _AS_ROOT, context.apply_again())
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
            "mount it without readOnly: the agent creates its socket there",
            context.apply_again() if context.in_pod else f"findmnt -T {found.path}",
        )
    return writable(context, found, _AS_ROOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A socket in the plugin directory."""

    name: str
    trouble: Trouble | None = None
    plugin: bool = False
    """Whether it belongs to another program and answers like a device plugin."""


async def sockets(context: Context) -> tuple[Socket, ...]:
    names = await context.in_thread(lambda: _socket_names(context.directory))
    return tuple(await asyncio.gather(*(_socket(context, name) for name in names)))


def _socket_names(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(item.name for item in path.iterdir() if stat.S_ISSOCK(item.lstat().st_mode))


async def _socket(context: Context, name: str) -> Socket:
    """Connects, and asks all but the kubelet's and our own for a device plugin's options."""
    path, deadline = context.directory / name, context.timing.connection
    ours = re.fullmatch(re.escape(context.config.socket_name) + _OURS, name) is not None
    try:
        async with asyncio.timeout(deadline):
            _, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:  # a TimeoutError, too
        why = reason(error) or f"no answer within {deadline:g} s"
        return Socket(name=name, trouble=Trouble(what=why, kind=kind_of(error)))
    writer.close()
    other = name != KUBELET_SOCKET and not ours
    return Socket(name=name, plugin=other and await _is_plugin(path, deadline))


async def _is_plugin(path: Path, deadline: float) -> bool:
    try:
        async with asyncio.timeout(deadline):
            await ask(path, "/v1beta1.DevicePlugin/GetDevicePluginOptions")
    except (*UNANSWERED, ValueError, GRPCError):
        return False
    return True


async def _kubelet_socket(context: Context) -> Check:
    path = context.directory / KUBELET_SOCKET
    every = await context.probe(sockets)
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
    if found.trouble.kind is TroubleKind.DENIED and context.uid:
        raise Unknown(f"{path}: {found.trouble}", TroubleKind.DENIED)
    return wrong(
        f"{path}: {found.trouble}",
        "read journalctl -u kubelet, and restart the kubelet: it has ended or hangs",
        KUBELET,
    )


async def _other_plugins(context: Context) -> Check:
    others = [each for each in await context.probe(sockets) if each.plugin]
    # A plugin may name its socket after its resource, a.b/npu: npu.sock.
    families = (family for vendor in context.vendors for family in vendor.spec.families)
    words = (context.config.socket_name, *_plugin_words(context), *families)
    rivals = [each for each in others if any(word in each.name for word in words)]
    if rivals:
        return wrong(
            f"{_names(rivals)} answers as a device plugin and is not npu-agent's: by its name it "
            "offers the same cards",
            delete_plugin(context),
            list_plugins(context),
        )
    return ok(f"{_names(others)}: for other devices, by the name" if others else "none")


def _plugin_words(context: Context) -> tuple[str, ...]:
    return tuple(vendor.profile.plugins for vendor in context.vendors)


def delete_plugin(context: Context, unless: str = "") -> str:
    return (
        f"delete the vendor's DaemonSet: {list_plugins(context)}; two plugins take the resource "
        "from each other"
        f"{unless and f'. ({unless})'}"
    )


def list_plugins(context: Context) -> str:
    words = " -e ".join((*_plugin_words(context), "npu"))
    return f"kubectl get daemonsets -A | grep -i -e {words}"


def _names(found: Iterable[Socket]) -> str:
    return ", ".join(each.name for each in found)


async def candidates(context: Context) -> str:
    """Names the sockets of a possible second plugin: the end of a sentence."""
    others = [each for each in await context.probe_or(sockets, ()) if each.plugin]
    return f"; its socket may be {_names(others)}" if others else ""
