"""The kubelet: its directories and sockets, and other plugins for the same cards."""

from __future__ import annotations

import asyncio
import re
import stat

from npu_agent.kubelet import KUBELET_SOCKET
from npu_agent.kubelet.rpc import UNANSWERED, GRPCError, ask
from npu_agent.people.doctor.check import SUDO, Check, Context, Lines, Unknown, ok, wrong
from npu_agent.people.doctor.host import usable
from npu_agent.text import reason

_OURS = "-[0-9a-f]{8}[.]sock"
"""What follows the configured name in that of one of our sockets: see
`npu_agent.outputs.deviceplugin.session`."""
_MOUNT = (
    "set pluginDir (--plugin-dir) to the kubelet's (--root-dir)/device-plugins; in a Pod mount it "
    "there (hostPath) without readOnly, and set runAsUser: 0, as in k8s/daemonset.yaml: only root "
    "may use it (mode 0750)"
)
_STATUS = "systemctl status kubelet"


async def lines(context: Context) -> Lines:
    yield "plugin directory", usable(context, context.directory, _MOUNT, write=True)
    if not await context.in_thread(context.directory.is_dir):
        return
    yield KUBELET_SOCKET, _kubelet_socket(context)
    yield "other plugins", _other_plugins(context)


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


async def _other_plugins(context: Context) -> Check:
    """Whether a socket that answers like a device plugin has a name like that of one for NPUs."""
    ours = re.compile(re.escape(context.config.socket_name) + _OURS)
    sockets = await context.in_thread(
        lambda: sorted(
            item.name for item in context.directory.iterdir() if stat.S_ISSOCK(item.lstat().st_mode)
        )
    )
    names = [name for name in sockets if name != KUBELET_SOCKET and not ours.fullmatch(name)]
    answers = await asyncio.gather(*(_is_plugin(context, name) for name in names))
    others = [name for name, plugin in zip(names, answers, strict=True) if plugin]
    # A plugin may name its socket after its resource, a.b/npu: npu.sock.
    vendor = context.vendor
    maker = vendor.profile.plugins
    words = (context.config.socket_name, maker, *vendor.spec.families)
    if rivals := [name for name in others if any(word in name for word in words)]:
        find = f"kubectl get daemonsets -A | grep -i -e {maker} -e npu"
        return wrong(
            f"{', '.join(rivals)} answers as a device plugin and is not npu-agent's: by its name "
            "it offers the same cards",
            f"delete the vendor's DaemonSet: {find}",
            find,
        )
    return ok(f"{', '.join(others)}: for other devices, by the name" if others else "none")


async def _is_plugin(context: Context, name: str) -> bool:
    path = context.directory / name
    try:
        async with asyncio.timeout(context.timing.connection):
            await ask(path, "/v1beta1.DevicePlugin/GetDevicePluginOptions")
    except (*UNANSWERED, ValueError, GRPCError):
        return False
    return True
