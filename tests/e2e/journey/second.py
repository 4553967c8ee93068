"""A device plugin of somebody else, as a program: `second.py DIRECTORY RESOURCE` until it is ended.

It serves one device on `DIRECTORY/vendor.sock` and registers it once at the kubelet whose directory
it is, under a resource name that may be somebody's already. The kubelet does not mind.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from grpclib.client import Channel

from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1beta1 as wire


class SecondPlugin(wire.DevicePluginBase):
    """Serves one device, for ever."""

    async def get_device_plugin_options(self, _: wire.Empty) -> wire.DevicePluginOptions:
        """Wishes for nothing."""
        return wire.DevicePluginOptions()

    async def list_and_watch(self, _: wire.Empty) -> AsyncIterator[wire.ListAndWatchResponse]:
        """One list, which does not change."""
        yield wire.ListAndWatchResponse(devices=[wire.Device(id="vendor-0", health="Healthy")])
        await asyncio.Event().wait()


async def main(directory: Path, resource: str) -> None:
    """Serves and registers; TERM ends it."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = UnixServer([SecondPlugin()], directory / "vendor.sock")
    await server.listen()
    channel = Channel(path=str(directory / "kubelet.sock"))
    try:
        request = wire.RegisterRequest(
            version="v1beta1", endpoint="vendor.sock", resource_name=resource
        )
        await wire.RegistrationStub(channel).register(request, timeout=10)
        await ended.wait()
    finally:
        channel.close()
        await server.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
