import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from npu_agent import files
from npu_agent.feed import Feed
from npu_agent.files import SOCKET_PATH_MAX
from npu_agent.kubelet.rpc import UnixServer, sweep
from npu_agent.outputs.deviceplugin.endpoint import Endpoint
from npu_agent.outputs.deviceplugin.service import DevicePlugin, Devices
from tests.outputs.deviceplugin.client import DEADLINE, Client, Sleeper
from tests.outputs.deviceplugin.helpers import crowd, devices, names, short_directory, state
from tests.until import first


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    with short_directory() as path:
        yield path


def endpoint(directory: Path, feed: Feed[Devices] | None = None) -> Endpoint:
    return Endpoint(DevicePlugin("r/r", feed or Feed(devices(state()))), directory, "npu")


async def test_each_has_a_name_of_its_own_that_starts_as_configured(directory: Path) -> None:
    first, second = endpoint(directory), endpoint(directory)
    await first.start()
    await second.start()
    assert first.path != second.path
    assert first.path.name.startswith("npu-")
    assert first.path.name.endswith(".sock")
    await first.close()
    assert not first.path.exists()
    assert second.exists()
    await second.close()
    assert not names(directory)


async def test_sockets_of_the_dead_are_swept(directory: Path) -> None:
    alive = endpoint(directory)
    await alive.start()
    for name in ("npu-0123abcd.sock", "other-0123abcd.sock"):
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(directory / name))
        dead.close()
    (directory / "npu-notes.sock").write_text("a file, not a socket")
    sweep(directory, r"npu-.*\.sock")
    kept = {alive.path.name, "other-0123abcd.sock", "npu-notes.sock"}
    assert set(names(directory)) == kept
    assert alive.exists()
    await alive.close()


async def test_longest_path_that_linux_takes_is_served(directory: Path) -> None:
    name = len("/npu-01234567.sock")
    deep = directory / ("d" * (SOCKET_PATH_MAX - name - 1 - len(os.fsencode(directory))))
    deep.mkdir()
    longest = endpoint(deep)
    assert len(os.fsencode(longest.path)) == SOCKET_PATH_MAX
    await longest.start()
    client = Client(longest.path)
    assert await asyncio.to_thread(client.call, "GetDevicePluginOptions")
    await asyncio.to_thread(client.close)
    await longest.close()


async def test_socket_of_somebody_else_is_never_taken_over(directory: Path) -> None:
    first = endpoint(directory)
    await first.start()
    other = UnixServer([first.plugin], first.path)
    with pytest.raises(OSError, match=f"in use: '{first.path}'"):
        await other.listen()
    assert first.exists()
    await first.close()


@pytest.mark.parametrize("when", ["identity", "start"])
async def test_server_whose_socket_is_swept_at_its_start_does_not_stay_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    server = UnixServer([], directory / "swept.sock")
    where = server if when == "start" else files
    then = getattr(where, when)

    def swept(*args: Any, **kwargs: Any) -> Any:
        server.path.unlink()
        return then(*args, **kwargs)

    monkeypatch.setattr(where, when, swept)
    if when == "identity":
        with pytest.raises(FileNotFoundError, match=str(server.path)):
            await server.listen()
    else:
        await server.listen()
        assert not server.exists()
        await server.shutdown()
    assert str(server.path) not in Path("/proc/net/unix").read_text()  # nobody listens


async def test_an_end_that_is_cancelled_leaves_no_socket(directory: Path) -> None:
    one = endpoint(directory)
    await one.start()
    one.plugin.streams.publish(replace(one.plugin.streams.value, open=1))  # and it goes on
    closing = asyncio.create_task(one.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not names(directory)


async def test_removed_or_replaced_socket_is_not_ours_any_more(directory: Path) -> None:
    one = endpoint(directory)
    await one.start()
    assert one.exists()
    one.path.rename(directory / "moved.sock")
    assert not one.exists()
    one.path.write_text("somebody else's")
    assert not one.exists()
    await one.close()
    assert one.path.read_text() == "somebody else's"


async def test_close_ends_the_streams_in_order_and_leaves_other_files(directory: Path) -> None:
    feed: Feed[Devices] = Feed(devices(state()))
    one = endpoint(directory, feed)
    await one.start()
    (directory / "kubelet_internal_checkpoint").write_text("{}")
    client = Client(one.path)
    stream = client.watch()
    await asyncio.to_thread(next, stream)

    feed.close()
    await one.close(drain=DEADLINE)  # on a busy machine too
    assert await asyncio.to_thread(list, stream) == []
    assert stream.code() is grpc.StatusCode.OK
    assert names(directory) == ["kubelet_internal_checkpoint"]
    await asyncio.to_thread(client.close)


async def test_close_does_not_wait_for_a_reader_that_sleeps(directory: Path) -> None:
    feed: Feed[Devices] = Feed(crowd(2000))  # sending it waits for a reader
    one = endpoint(directory, feed)
    await one.start()
    sleeper = Sleeper(one.path)
    await first(one.plugin.streams, lambda streams: streams.open)
    async with asyncio.timeout(DEADLINE):
        feed.close()
        await one.close()
    assert not one.path.exists()
    assert not await asyncio.to_thread(list, sleeper.read())  # cut off, before a whole message
    sleeper.close()
