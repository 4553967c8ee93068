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
        self._directory, self._prefix = directory, prefix
        self._server = UnixServer([plugin], self._new_path())

    @property
    def path(self) -> Path:
        """Where the socket is."""
        return self._server.path

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the socket cannot be made, or its path is too long.
        """
        await self._server.listen()

    def rename(self) -> None:
        """Gives the socket another name; whoever is connected stays so.

        A kubelet from 1.37 on takes each name once: it refuses one that it is connected to, and
        from then on does not notice the end of that connection (`connectClient`).

        Raises:
            FileNotFoundError: the socket was removed.
        """
        self._server.move(self._new_path())

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

    def _new_path(self) -> Path:
        return self._directory / f"{self._prefix}-{secrets.token_hex(4)}.sock"
