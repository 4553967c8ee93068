"""The unix socket of a device plugin: a name of its own, and an orderly end."""

from __future__ import annotations

import secrets
from pathlib import Path

from npu_agent.kubelet.rpc import DRAINED, UnixServer, wait_drained
from npu_agent.outputs.deviceplugin.service import DevicePlugin


class Endpoint:
    """A served device plugin on a socket that is this process's alone."""

    def __init__(self, plugin: DevicePlugin, directory: Path, prefix: str) -> None:
        """`prefix` is the configured socket name; what follows it is random.

        Unique, so that an instance that ends late cannot delete the socket of the one after it.
        """
        self.plugin = plugin
        self.path = directory / f"{prefix}-{secrets.token_hex(4)}.sock"
        self._server = UnixServer([plugin], self.path)

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the socket cannot be made, or its path is too long.
        """
        await self._server.listen()

    def exists(self) -> bool:
        """Whether the socket is still there: the kubelet sweeps all of them when it starts."""
        return self._server.exists()

    async def close(self, drain: float = DRAINED) -> None:
        """Lets the streams end, then closes the connections and the socket; within `drain` + 0.2 s.

        The caller has closed the plugin's devices feed, so that the streams return by themselves
        and the kubelet sees their end. Cancelled, it waits no longer, and leaves no socket.
        """
        try:
            await wait_drained(self.plugin.streams.map(lambda streams: streams.open), drain)
        finally:
            await self._server.shutdown()
