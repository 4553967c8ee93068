"""The kubelet: its directories and sockets, and other plugins for the same cards."""

from __future__ import annotations

import asyncio
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from npu_agent import typedjson
from npu_agent.config.resources import resources_of
from npu_agent.core.ledger import footprints_of
from npu_agent.core.vendor_spec import merged
from npu_agent.files import content
from npu_agent.kubelet import KUBELET_SOCKET, pods
from npu_agent.kubelet.pods import CHECKPOINT
from npu_agent.kubelet.rpc import UNANSWERED, GRPCError, ask
from npu_agent.people.doctor.check import SUDO, Check, Lines, Unknown, ok, unknown, wrong
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.host import snapshot, usable
from npu_agent.text import listed, reason

_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of one of our sockets: see
`npu_agent.outputs.deviceplugin.session`."""
_MOUNT = (
    "set pluginDir (--plugin-dir) to the kubelet's (--root-dir)/device-plugins; in a Pod mount it "
    "there (hostPath) without readOnly, and set runAsUser: 0, as in k8s/daemonset.yaml: only root "
    "may use it (mode 0750)"
)
_STATUS = "systemctl status kubelet"
_LARGEST = 32 << 20
_LEAST_FREE = 1 << 20
"""Bytes; the record of a large node has some hundred KiB."""


async def lines(context: Context) -> Lines:
    yield "plugin directory", _plugin_directory(context)
    if not await context.in_thread(context.directory.is_dir):
        return
    yield KUBELET_SOCKET, _kubelet_socket(context)
    yield "other plugins", _other_plugins(context)


async def _plugin_directory(context: Context) -> Check:
    path = context.directory
    check = await usable(context, path, _MOUNT, write=True)
    if check.remedy:
        return check
    free = (await context.in_thread(lambda: shutil.disk_usage(path))).free
    if free >= _LEAST_FREE:
        return check
    return wrong(
        f"{path}: its disk has {free} bytes left, and the agent's record of the allocations may "
        "be lost",
        "make room on that disk",
        f"df -h {path}",
    )


async def _kubelet_socket(context: Context) -> Check:
    path = context.directory / KUBELET_SOCKET
    try:
        async with asyncio.timeout(context.timing.connection):
            _, writer = await asyncio.open_unix_connection(str(path))
        writer.close()
    except FileNotFoundError:
        return wrong(
            f"{path} is missing",
            "start the kubelet; if it runs, set pluginDir (--plugin-dir) to its "
            "(--root-dir)/device-plugins",
            _STATUS,
        )
    except PermissionError as error:
        if context.uid:
            raise Unknown(f"{path}: {reason(error)}", SUDO) from error
        fault = reason(error)
    except TimeoutError:
        fault = f"does not answer within {context.timing.connection:g} s"
    except OSError as error:
        fault = reason(error)
    else:
        return ok(f"{path} takes connections")
    remedy = "read journalctl -u kubelet, and restart the kubelet: it has ended or hangs"
    return wrong(f"{path}: {fault}", remedy, _STATUS)


async def plugins(context: Context) -> tuple[str, ...]:
    """Returns the sockets of other device plugins: those that answer like one."""
    ours = re.compile(re.escape(context.config.socket_name) + _OURS)
    names = await context.in_thread(lambda: _socket_names(context.directory))
    others = [name for name in names if name != KUBELET_SOCKET and not ours.fullmatch(name)]
    answers = await asyncio.gather(*(_is_plugin(context, name) for name in others))
    return tuple(name for name, plugin in zip(others, answers, strict=True) if plugin)


def _socket_names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir() if stat.S_ISSOCK(item.lstat().st_mode))


async def _is_plugin(context: Context, name: str) -> bool:
    path = context.directory / name
    try:
        async with asyncio.timeout(context.timing.connection):
            await ask(path, "/v1beta1.DevicePlugin/GetDevicePluginOptions")
    except (*UNANSWERED, ValueError, GRPCError):
        return False
    return True


async def registered(context: Context) -> Mapping[str, frozenset[str]]:
    """Returns the healthy devices that the kubelet knows, by resource."""
    path = context.directory / CHECKPOINT
    raw = await context.in_thread(lambda: content(path, _LARGEST))
    try:
        return {} if raw is None else pods.registered(raw)
    except typedjson.InvalidJsonError as error:
        raise Unknown(f"{path} is not in a format that kubelets write: {error}") from None


async def _other_plugins(context: Context) -> Check:
    """Whether another plugin has our cards: by the names of sockets, or by the kubelet's list."""
    others = await plugins(context)
    # A plugin may name its socket after its resource, a.b/npu: npu.sock.
    families = (family for vendor in context.vendors for family in vendor.spec.families)
    words = (context.config.socket_name, *_plugin_words(context), *families)
    remedy, command = f"delete the vendor's DaemonSet: {(find := _find(context))}", find
    if rivals := [name for name in others if any(word in name for word in words)]:
        detail = f"{', '.join(rivals)} answers as a device plugin and is not npu-agent's: by its "
        return wrong(f"{detail}name it offers the same cards", remedy, command)
    seen, devices = await context.probe(snapshot), await context.probe(registered)
    cards = [state.card for state in seen.cards]
    core_counts = merged([vendor.spec for vendor in context.vendors]).core_counts
    ours = {resource.name for resource in resources_of(context.config, core_counts)}
    sockets_of = f"; its socket may be {', '.join(others)}" if others else ""
    for resource, ids in sorted(devices.items()):
        twice = sorted(id_ for id_ in ids if bool(footprints_of(id_, cards)) != (resource in ours))
        if not twice:
            continue
        if resource not in ours:
            return wrong(
                f"the kubelet has {twice[0]} as {resource}, too: a second plugin offers the same "
                f"cards{sockets_of}",
                f"{remedy}. The kubelet remembers a plugin for five minutes after its end",
                command,
            )
        if any(odd.unread for odd in seen.skipped):
            detail = f"the kubelet has {twice[0]}, which may be of a card that cannot be read"
            return unknown(detail, "fix the odd entry first")
        return wrong(
            f"the kubelet has device {listed(twice, 1)} of {resource}, which no card of this host "
            f"has: a second plugin registers the same resource{sockets_of}",
            remedy,
            command,
        )
    return ok(f"{', '.join(others)}: for other devices, by the name" if others else "none")


def _plugin_words(context: Context) -> tuple[str, ...]:
    return tuple(vendor.profile.plugins for vendor in context.vendors)


def _find(context: Context) -> str:
    words = " -e ".join((*_plugin_words(context), "npu"))
    return f"kubectl get daemonsets -A | grep -i -e {words}"
