"""A device plugin of somebody else, as a program: `second.py DIRECTORY RESOURCE` until it is ended.

It behaves as the vendor's plugins do, which is why it says so little: it serves on a socket of its
own name, registers once at the kubelet whose directory it is, under a resource name that may be
somebody's already (the kubelet does not mind), takes its devices for what they were when it
started, sends that list again and again, and ends when the kubelet has a new socket.

    second.py DIRECTORY RESOURCE [SOCKET [DEVICE...]]

A DEVICE is `ID`, `ID=CARD` (the card's nodes in /dev are handed out) or `ID=CARD:NAME` (and
NPU_DEVNAME=NAME).
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from grpclib.client import Channel

from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1beta1 as wire

DEV = Path("/host/dev")
"""Where a Pod of it has the host's /dev."""
READY = Path("/tmp/second-is-ready")
"""There, in a Pod, once the kubelet has the list: for the readiness probe."""


class SecondPlugin(wire.DevicePluginBase):
    """Serves the devices of its command line, for ever."""

    def __init__(self, devices: list[str]) -> None:
        found = (re.fullmatch("([^=]+)(?:=([^:]+)(?::(.+))?)?", device) for device in devices)
        self._devices = {one[1]: (one[2], one[3]) for one in found if one}

    async def get_device_plugin_options(self, _: wire.Empty) -> wire.DevicePluginOptions:
        """Wishes for nothing."""
        return wire.DevicePluginOptions()

    async def list_and_watch(self, _: wire.Empty) -> AsyncIterator[wire.ListAndWatchResponse]:
        """The same list every five seconds."""
        devices = [wire.Device(id=id_, health="Healthy") for id_ in self._devices]
        while True:
            yield wire.ListAndWatchResponse(devices=devices)
            if DEV.is_dir():
                READY.touch()
            await asyncio.sleep(5)

    async def allocate(self, request: wire.AllocateRequest) -> wire.AllocateResponse:
        """The nodes of the cards, whoever else may have them."""
        grants = [self._grant(one.devices_ids) for one in request.container_requests]
        return wire.AllocateResponse(container_responses=grants)

    def _grant(self, ids: list[str]) -> wire.ContainerAllocateResponse:
        cards = [card for card, _ in map(self._devices.__getitem__, ids) if card]
        names = [name for _, name in map(self._devices.__getitem__, ids) if name]
        nodes = [
            f"/dev/{path.name}"
            for card in cards
            for path in sorted(DEV.iterdir())
            if re.fullmatch(rf"{card}(\D.*)?", path.name)
        ]
        return wire.ContainerAllocateResponse(
            envs={"NPU_DEVNAME": ",".join(names)} if names else {},
            devices=[
                wire.DeviceSpec(container_path=node, host_path=node, permissions="rw")
                for node in nodes
            ],
        )


async def restarted(socket: Path) -> None:
    """Waits until the kubelet's socket is another one."""
    first = _made(socket)
    while _made(socket) in (first, None):
        await asyncio.sleep(0.2)


def _made(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


async def main(directory: Path, resource: str, name: str, devices: list[str]) -> None:
    """Serves and registers; TERM ends it, and so does the kubelet's restart."""
    end = asyncio.create_task(restarted(directory / "kubelet.sock"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.cancel)
    (directory / name).unlink(missing_ok=True)
    server = UnixServer([SecondPlugin(devices)], directory / name)
    await server.listen()
    channel = Channel(path=str(directory / "kubelet.sock"))
    try:
        request = wire.RegisterRequest(version="v1beta1", endpoint=name, resource_name=resource)
        await wire.RegistrationStub(channel).register(request, timeout=10)
        await asyncio.wait([end])
    finally:
        channel.close()
        await server.shutdown()


if __name__ == "__main__":
    _directory, _resource, *_rest = sys.argv[1:]
    _socket, *_devices = _rest or ["vendor.sock", "vendor-0"]
    asyncio.run(main(Path(_directory), _resource, _socket, _devices))
