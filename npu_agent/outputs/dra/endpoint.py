"""The two unix sockets of a DRA driver: one with its services, one that registers it.

A registration lasts as long as its socket's file, not its connection. The kubelet refuses a
services' socket whose path it knows: each instance has names of its own.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from npu_agent.feed import Feed
from npu_agent.files import SOCKET_PATH_MAX
from npu_agent.kubelet.rpc import UnixServer, sweep, wait_drained
from npu_agent.outputs.dra.service import DraPlugin, HealthStream, Registration, RegistrationState

REGISTRY, PLUGINS = "plugins_registry", "plugins"
"""In the kubelet's root: its directory of registrations, and that with a directory for each
driver."""

_UNIQUE = "[0-9a-f]{12}"
"""Not a Pod's UID: below the kubelet's directory of MicroK8s that path would be too long."""


def socket_paths(driver: str, kubelet_root: Path, unique: str) -> tuple[Path, Path]:
    """Returns the socket of the services, and that of the registration."""
    return (
        kubelet_root.absolute() / PLUGINS / driver / f"dra-{unique}.sock",
        kubelet_root / REGISTRY / f"{driver}-{unique}-reg.sock",
    )


def made_by_us(name: str, driver: str) -> bool:
    return re.fullmatch(_registration(driver), name) is not None


def _registration(driver: str) -> str:
    return rf"{re.escape(driver)}-{_UNIQUE}-reg\.sock"


def sweep_all(driver: str, kubelet_root: Path) -> None:
    sweep(kubelet_root / REGISTRY, _registration(driver))
    sweep(kubelet_root / PLUGINS / driver, rf"dra-{_UNIQUE}\.sock")


class Endpoint:
    """A driver on two sockets that are this process's alone."""

    def __init__(
        self, *, driver: str, kubelet_root: Path, plugin: DraPlugin, health: HealthStream
    ) -> None:
        """`kubelet_root` is ``/var/lib/kubelet``, by the kubelet's own path for it."""
        self.path, self.registration_path = socket_paths(driver, kubelet_root, secrets.token_hex(6))
        self.plugin = plugin
        self.health = health
        self._service = UnixServer([plugin, health], self.path)
        registration = Registration(driver, self.path)
        self._registration = UnixServer([registration], self.registration_path)
        self.registration: Feed[RegistrationState] = registration.state

    async def start(self) -> None:
        """Listens: first what the kubelet will call, then where it finds that.

        Raises:
            OSError: a socket cannot be made, or its path is too long; nothing is left behind.
        """
        longest = max(len(os.fsencode(path)) for path in (self.path, self.registration_path))
        if longest > SOCKET_PATH_MAX:
            raise OSError(
                f"the kubelet's directory is {longest - SOCKET_PATH_MAX} bytes too long for the "
                f"socket {self.registration_path}: start the kubelet with a shorter --root-dir, or "
                "set allocation.api: device-plugin"
            )
        registry = self.registration_path.parent
        if not registry.is_dir():
            raise FileNotFoundError(
                f"{registry} is missing: check that the kubelet runs and that the directory is "
                "mounted here"
            )
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        await self._service.listen()
        try:
            await self._registration.listen()
        except BaseException:
            await self._service.shutdown()
            raise

    async def registered(self) -> None:
        """Returns when the kubelet calls this instance of the driver, and no other."""
        await self.registration.until(lambda now: now.registered)
        # It takes the newest of those that it is connected to, and connects by itself.
        await self._service.accepted.until(bool)

    def exists(self) -> bool:
        return self._service.exists() and self._registration.exists()

    async def close(self) -> None:
        """Deregisters, lets the health streams end, then closes the services; within 0.6 s.

        The caller has closed the feed of devices, so that the streams return. A call under way is
        cancelled (see `Driver.idle`). Cancelled, it waits no longer, and leaves no socket.
        """
        try:
            await self._registration.shutdown()
            await wait_drained(self.health.streams)
        finally:
            await self._service.shutdown()
