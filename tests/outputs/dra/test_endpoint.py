import asyncio
import errno
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel

from npu_agent.core.claim import ClaimRef
from npu_agent.files import SOCKET_PATH_MAX
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1alpha1
from npu_agent.outputs.dra.endpoint import PLUGINS, REGISTRY, Endpoint, instance_of, sweep_all
from npu_agent.outputs.dra.service import DraPlugin, Prepared
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.outputs.deviceplugin.helpers import names
from tests.outputs.dra.helpers import DRIVER, POD_UID, Driver, kubelet_root, ref
from tests.until import first, until


@pytest.fixture
async def root() -> AsyncIterator[Path]:
    async with kubelet_root() as directory:
        yield directory


def dead(path: Path) -> Path:
    """The socket of a process that was killed."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(os.fspath(path))
        killed.listen()
    return path


async def _rest(messages: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in messages]


async def test_names_are_the_pods_and_yet_this_process_alone(root: Path) -> None:
    one, two = Driver(), Driver()
    async with one.served(root) as first_, two.served(root) as second:
        assert re.fullmatch(rf"dra-{POD_UID}-[0-9a-f]{{4}}\.sock", first_.path.name)
        assert re.fullmatch(
            rf"{re.escape(DRIVER)}-{POD_UID}-[0-9a-f]{{4}}-reg\.sock", first_.registration_path.name
        )
        assert first_.path.parent == root / "plugins" / DRIVER
        assert first_.registration_path.parent == root / "plugins_registry"
        assert first_.path != second.path
        assert first_.registration_path != second.registration_path
        assert first_.exists()
        assert second.exists()
    assert names(root / PLUGINS / DRIVER) == names(root / REGISTRY) == []


async def test_in_a_usual_root_directory_the_paths_are_short_enough() -> None:
    endpoint = Driver().endpoint(Path("/var/lib/kubelet"))
    assert len(os.fsencode(endpoint.path)) <= SOCKET_PATH_MAX
    assert len(os.fsencode(endpoint.registration_path)) <= SOCKET_PATH_MAX


def test_an_instance_is_a_pods_uid_or_random() -> None:
    assert instance_of(POD_UID) == POD_UID
    of_a_static_pod = "0f4e5a1c2b3d4e5f60718293a4b5c6d7"
    assert instance_of(of_a_static_pod) == of_a_static_pod
    for nothing in (None, "", ".hidden", "../../etc", "not-a-uid", POD_UID + "\n"):
        one, another = instance_of(nothing), instance_of(nothing)
        assert one != another
        assert re.fullmatch("[0-9a-f]{8}", one)


async def test_the_services_listen_before_the_kubelet_can_find_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Driver().endpoint(root)
    order = []
    listen = UnixServer.listen

    async def noted(server: UnixServer) -> None:
        order.append((server.path, endpoint.path.exists()))
        await listen(server)

    monkeypatch.setattr(UnixServer, "listen", noted)
    await endpoint.start()
    assert order == [(endpoint.path, False), (endpoint.registration_path, True)]
    await endpoint.close()


async def test_the_end_deregisters_before_anything_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    endpoint = driver.endpoint(root)
    await endpoint.start()
    order = []
    shutdown = UnixServer.shutdown

    async def noted(server: UnixServer) -> None:
        order.append((server.path, endpoint.registration_path.exists()))
        await shutdown(server)

    monkeypatch.setattr(UnixServer, "shutdown", noted)
    driver.devices.close()
    await endpoint.close()
    assert order == [(endpoint.registration_path, True), (endpoint.path, False)]
    assert not endpoint.path.exists()


async def test_the_drivers_directory_is_not_for_everybody(root: Path) -> None:
    async with Driver().served(root) as endpoint:
        assert stat.S_IMODE(endpoint.path.parent.stat().st_mode) == 0o750


@asynccontextmanager
async def streaming(endpoint: Endpoint) -> AsyncIterator[AsyncIterator[object]]:
    """A health stream of which the first message has come."""
    async with Channel(path=str(endpoint.path)) as channel:
        messages = v1alpha1.DraResourceHealthStub(channel).node_watch_resources(
            v1alpha1.NodeWatchResourcesRequest()
        )
        await anext(messages)
        yield messages


async def test_a_health_stream_sees_its_end_at_the_end(root: Path) -> None:
    driver = Driver()
    endpoint = driver.endpoint(root)
    await endpoint.start()
    async with streaming(endpoint) as messages:
        ending = asyncio.create_task(_rest(messages))
        await asyncio.sleep(0)  # it reads, as the kubelet does
        driver.devices.close()
        await endpoint.close()
        assert await ending == []  # a lost connection would raise


async def test_an_end_that_is_cancelled_leaves_no_socket(root: Path) -> None:
    driver = Driver()
    endpoint = driver.endpoint(root)
    await endpoint.start()
    async with streaming(endpoint):
        closing = asyncio.create_task(endpoint.close())
        await until(lambda: not endpoint.registration_path.exists())
        closing.cancel()  # it waits for the stream, which goes on
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert names(root / PLUGINS / DRIVER) == []
        driver.devices.close()


async def test_a_call_under_way_does_not_delay_the_end(root: Path) -> None:
    began = asyncio.Event()

    async def hang(_: Sequence[ClaimRef]) -> Mapping[str, Prepared]:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    driver = Driver()
    manager = StandInPluginManager(root)
    await manager.start()
    async with driver.served(root, plugin=DraPlugin(hang, driver.unprepare)):
        await first(manager.instances, len)
        call = asyncio.create_task(manager.prepare(DRIVER, ref("u1")))
        await began.wait()
    with pytest.raises(Exception, match="NodePrepareResources"):
        await call
    await manager.stop()


async def test_without_a_registry_nothing_is_made(root: Path) -> None:
    (root / REGISTRY).rmdir()
    with pytest.raises(
        FileNotFoundError, match=f"{REGISTRY} is missing: check that the kubelet runs"
    ):
        await Driver().endpoint(root).start()
    assert names(root) == []


async def test_a_start_that_fails_half_way_leaves_no_socket(root: Path) -> None:
    endpoint = Driver().endpoint(root)
    endpoint.registration_path.touch()
    with pytest.raises(OSError, match="in use"):
        await endpoint.start()
    assert names(root / PLUGINS / DRIVER) == []


async def test_sweep_removes_the_sockets_of_the_killed_and_no_others(root: Path) -> None:
    registry, plugins = root / REGISTRY, root / PLUGINS / DRIVER
    async with Driver().served(root) as alive:
        killed = (
            dead(registry / f"{DRIVER}-{POD_UID}-0123-reg.sock"),
            dead(registry / f"{DRIVER}-01234567-89ab-reg.sock"),
            dead(plugins / f"dra-{POD_UID}-0123.sock"),
            dead(plugins / "dra-01234567-89ab.sock"),
        )
        others = (
            dead(registry / f"{DRIVER}-reg.sock"),
            dead(registry / f"{DRIVER}-{POD_UID}-reg.sock"),  # as other drivers name theirs
            dead(registry / f"{DRIVER}-other-0123-reg.sock"),
            dead(registry / f"gpu.example.com-{POD_UID}-0123-reg.sock"),
            dead(registry / f"npuxfuriosaxai-{POD_UID}-0123-reg.sock"),
            dead(plugins / "dra.sock"),
            dead(plugins / f"dra-{POD_UID}-0123.sock.old"),
        )
        file = plugins / f"dra-{POD_UID}-4567.sock"
        file.write_text("a file, not a socket")
        sweep_all(DRIVER, root)
        assert alive.exists()
        assert not any(path.exists() for path in killed)
        assert all(path.exists() for path in (*others, file))


async def test_a_socket_with_too_many_callers_is_nobodys_rest(root: Path) -> None:
    path = root / REGISTRY / f"{DRIVER}-{POD_UID}-0123-reg.sock"
    with ExitStack() as sockets:
        busy = sockets.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        code = 0
        while not code:
            caller = sockets.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            code = caller.connect_ex(str(path))
        assert code == errno.EAGAIN
        sweep_all(DRIVER, root)
        assert path.exists()


async def test_the_socket_is_named_absolutely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    endpoint = Driver().endpoint(Path("var/lib/kubelet"))
    assert endpoint.path.parent == Path("/var/lib/kubelet/plugins") / DRIVER
