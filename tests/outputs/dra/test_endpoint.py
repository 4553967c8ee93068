import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel

from npu_agent.core.claim import ClaimRef
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1alpha1
from npu_agent.outputs.dra.endpoint import PLUGINS, REGISTRY, Endpoint, sweep_all
from npu_agent.outputs.dra.service import DraPlugin
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.outputs.deviceplugin.helpers import names
from tests.outputs.dra.helpers import DRIVER, Driver, Prepared, StandInClaims, kubelet_root, ref
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


async def test_names_are_this_process_alone(root: Path) -> None:
    one, two = Driver(), Driver()
    async with one.served(root) as first_, two.served(root) as second:
        assert first_.path.parent == root / "plugins" / DRIVER
        assert first_.registration_path.parent == root / "plugins_registry"
        assert first_.path != second.path
        assert first_.registration_path != second.registration_path
        assert first_.exists()
        assert second.exists()
        assert stat.S_IMODE(first_.path.parent.stat().st_mode) == 0o750
    assert names(root / PLUGINS / DRIVER) == names(root / REGISTRY) == []


async def test_sockets_are_made_below_the_longest_usual_root(root: Path) -> None:
    """MicroK8s' kubelet has /var/snap/microk8s/common/var/lib/kubelet, of 41 bytes."""
    usual = root / ("k" * (41 - len(os.fsencode(root)) - 1))
    (usual / REGISTRY).mkdir(parents=True)
    async with Driver().served(usual) as endpoint:
        assert endpoint.exists()
    endpoint = Driver().endpoint(Path("/", "k" * 60))
    with pytest.raises(OSError, match=r"8 bytes too long .* start the kubelet with a shorter"):
        await endpoint.start()


async def test_the_services_listen_before_the_kubelet_can_find_them_and_end_after_that(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    endpoint = driver.endpoint(root)
    order = []

    def note(what: str) -> None:
        call = getattr(UnixServer, what)

        async def noted(server: UnixServer) -> None:
            sockets = [path.exists() for path in (endpoint.path, endpoint.registration_path)]
            order.append((what, server.path, sockets))
            await call(server)

        monkeypatch.setattr(UnixServer, what, noted)

    note("listen")
    note("shutdown")
    await endpoint.start()
    driver.devices.close()
    await endpoint.close()
    assert order == [
        ("listen", endpoint.path, [False, False]),
        ("listen", endpoint.registration_path, [True, False]),
        ("shutdown", endpoint.registration_path, [True, True]),
        ("shutdown", endpoint.path, [True, False]),
    ]
    assert not endpoint.path.exists()


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
    async with driver.served(root, plugin=DraPlugin(StandInClaims(hang, driver.unprepare))):
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
            dead(registry / f"{DRIVER}-0123456789ab-reg.sock"),
            dead(plugins / "dra-0123456789ab.sock"),
        )
        others = (
            dead(registry / f"{DRIVER}-reg.sock"),
            dead(
                registry / f"{DRIVER}-0d5a8e1c-1f3b-4d52-9d2e-0123456789ab-reg.sock"
            ),  # as other drivers name theirs
            dead(registry / f"{DRIVER}-other-0123-reg.sock"),
            dead(registry / "gpu.example.com-0123456789ab-reg.sock"),
            dead(registry / "npuxfuriosaxai-0123456789ab-reg.sock"),
            dead(plugins / "dra.sock"),
            dead(plugins / "dra-0123456789ab.sock.old"),
        )
        file = plugins / "dra-0123456789cd.sock"
        file.write_text("a file, not a socket")
        sweep_all(DRIVER, root)
        assert alive.exists()
        assert not any(path.exists() for path in killed)
        assert all(path.exists() for path in (*others, file))


async def test_a_socket_with_too_many_callers_is_nobodys_rest(root: Path) -> None:
    path = root / REGISTRY / f"{DRIVER}-0123456789ab-reg.sock"
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
