"""The stand-in for the kubelet's plugin manager, beside drivers that behave and that do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from npu_agent.core.hardware import HealthState
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import pluginregistration as wire
from npu_agent.kubelet.wire import v1alpha1
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.outputs.dra.service import Health
from npu_agent.simulator.pluginmanager import KNOWN, PrepareError, StandInPluginManager
from tests.kubelet.closing import closed_when_connected
from tests.outputs.dra.helpers import DRIVER, POOL, Driver, given, kubelet_root, listed, ref
from tests.until import first, until


@pytest.fixture
async def root() -> AsyncIterator[Path]:
    async with kubelet_root() as directory:
        yield directory


@pytest.fixture
async def manager(root: Path) -> AsyncIterator[StandInPluginManager]:
    one = StandInPluginManager(root, interval=0.005)
    await one.start()
    yield one
    await one.stop()


class Plugin(wire.RegistrationBase):
    """A plugin that registers as a test says it should."""

    def __init__(self, **info: Any) -> None:
        self.info = {"type": "DRAPlugin", "name": DRIVER, "supported_versions": list(KNOWN), **info}
        self.notified: list[tuple[bool, str]] = []
        self.before_info: Callable[[], Awaitable[object]] | None = None
        self.refuses_notification = False

    async def get_info(self, info_request: wire.InfoRequest) -> wire.PluginInfo:  # noqa: ARG002
        if self.before_info:
            await self.before_info()
        return wire.PluginInfo(**self.info)

    async def notify_registration_status(
        self, registration_status: wire.RegistrationStatus
    ) -> wire.RegistrationStatusResponse:
        self.notified.append((registration_status.plugin_registered, registration_status.error))
        if self.refuses_notification:
            raise GRPCError(Status.INTERNAL, "not now")
        return wire.RegistrationStatusResponse()


@asynccontextmanager
async def listening(plugin: Plugin, path: Path) -> AsyncIterator[None]:
    """A plugin on a socket of its own."""
    server = UnixServer([plugin], path)
    await server.listen()
    try:
        yield
    finally:
        await server.shutdown()


class Broken(v1.DraPluginBase):
    """Answers about other claims than those it was asked for."""

    async def node_prepare_resources(
        self, node_prepare_resources_request: v1.NodePrepareResourcesRequest
    ) -> v1.NodePrepareResourcesResponse:
        uids = [claim.uid for claim in node_prepare_resources_request.claims]
        answered = {"other": v1.NodePrepareResourceResponse()} if uids == ["u1"] else {}
        return v1.NodePrepareResourcesResponse(claims=answered)


async def test_a_driver_is_registered_reported_and_called(
    root: Path, manager: StandInPluginManager
) -> None:
    driver = Driver()
    async with driver.served(root) as endpoint:
        (instance,) = await first(manager.instances, len)
        assert (instance.driver, instance.service) == (DRIVER, "v1.DRAPlugin")
        assert instance.endpoint == str(endpoint.path)
        state = await first(endpoint.registration, lambda now: now.registered)
        assert (state.asked, state.notifications, state.error) == (1, 1, "")
        await first(manager.health, len)
        assert manager.state(DRIVER, POOL, "npu-0") == ("Healthy", "is healthy")
        assert manager.state(DRIVER, POOL, "npu-1") == ("Unhealthy", "it is too hot")
        assert manager.state(DRIVER, POOL, "npu-2") == ("Unknown", "")
        driver.prepared = {"u1": (given("npu-0", "r", "s"),), "u2": ()}
        assert await manager.prepare(DRIVER, ref("u1"), ref("u2")) == driver.prepared
        await manager.unprepare(DRIVER, ref("u1"))
        assert [verb for verb, _ in driver.asked] == ["prepare", "unprepare"]
    await first(manager.instances, lambda now: not now)
    with pytest.raises(PrepareError, match=f"DRA driver {DRIVER} is not registered"):
        await manager.prepare(DRIVER, ref("u1"))
    assert manager.failures == []


async def test_an_older_kubelet_takes_the_newest_version_that_it_knows(root: Path) -> None:
    driver = Driver()
    manager = StandInPluginManager(root, known=KNOWN[1:], interval=0.005)
    await manager.start()
    async with driver.served(root):
        (instance,) = await first(manager.instances, len)
        assert instance.service == "v1beta1.DRAPlugin"
        driver.prepared = {"u1": (given("npu-0", "r"),)}
        assert await manager.prepare(DRIVER, ref("u1")) == driver.prepared
        await manager.unprepare(DRIVER, ref("u1"))
    await manager.stop()


async def test_a_newer_kubelet_watches_health_by_its_newer_version(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: object) -> None:
        raise AssertionError("by the alpha version")

    monkeypatch.setattr(v1alpha1, "DraResourceHealthStub", never)
    manager = StandInPluginManager(root, known=("v1.DRAResourceHealth", *KNOWN), interval=0.005)
    await manager.start()
    async with Driver().served(root):
        await first(manager.health, len)
        assert manager.state(DRIVER, POOL, "npu-0") == ("Healthy", "is healthy")
    await manager.stop()


async def test_a_restarted_kubelet_asks_again(root: Path, manager: StandInPluginManager) -> None:
    async with Driver().served(root) as endpoint:
        await first(endpoint.registration, lambda now: now.registered)
        await manager.restart()
        state = await first(endpoint.registration, lambda now: now.notifications == 2)
        assert (state.asked, state.registered) == (2, True)
        await first(manager.health, len)


async def test_of_several_instances_the_newest_is_called(
    root: Path, manager: StandInPluginManager
) -> None:
    old, new = Driver(), Driver()
    async with old.served(root):
        await first(manager.instances, len)
        async with new.served(root):
            await first(manager.instances, lambda now: len(now) == 2)
            await manager.prepare(DRIVER, ref("u1"))
        await first(manager.instances, lambda now: len(now) == 1)
        await manager.prepare(DRIVER, ref("u2"))
    assert [refs[0].uid for _, refs in new.asked] == ["u1"]
    assert [refs[0].uid for _, refs in old.asked] == ["u2"]


async def test_errors_are_in_the_words_of_a_pods_event(
    root: Path, manager: StandInPluginManager
) -> None:
    driver = Driver(
        prepared={"u1": "npu-0 is held by Pod ml/train"}, unprepared={"u1": "disk full"}
    )
    async with driver.served(root):
        await first(manager.instances, len)
        with pytest.raises(PrepareError) as error:
            await manager.prepare(DRIVER, ref("u1", "mine"))
        assert str(error.value) == (
            "prepare dynamic resources: NodePrepareResources failed for ResourceClaim mine: "
            "npu-0 is held by Pod ml/train"
        )
        with pytest.raises(PrepareError, match="disk full"):
            await manager.unprepare(DRIVER, ref("u1"))


async def test_a_socket_that_closes_what_it_accepts_harms_no_other(
    root: Path, manager: StandInPluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        closed_when_connected(patch)
        path = root / "plugins_registry" / "closing.sock"
        async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path):
            await until(lambda: bool(manager.failures))
    assert manager.failures[0].endswith("it closes the connection")
    async with Driver().served(root):
        await first(manager.instances, len)


async def test_an_answer_about_other_claims_is_an_error(
    root: Path, manager: StandInPluginManager
) -> None:
    path = root / "broken.sock"
    service = UnixServer([Broken()], path)
    registration = UnixServer(
        [Plugin(endpoint=str(path))], root / "plugins_registry" / "broken.sock"
    )
    await service.listen()
    await registration.listen()
    await first(manager.instances, len)
    with pytest.raises(PrepareError, match="answers for the claims other"):
        await manager.prepare(DRIVER, ref("u1"))
    with pytest.raises(PrepareError, match="answers for the claims"):
        await manager.prepare(DRIVER, ref("u2"), ref("u3"))
    await registration.shutdown()
    await service.shutdown()


@pytest.mark.parametrize("info", [{"type": "CSIPlugin"}, {"supported_versions": ["v7.DRAPlugin"]}])
async def test_whoever_cannot_be_registered_is_notified_and_retried(
    root: Path, manager: StandInPluginManager, info: dict[str, Any]
) -> None:
    plugin = Plugin(**info)
    async with listening(plugin, root / "plugins_registry" / "x.sock"):
        await until(lambda: len(plugin.notified) >= 2)
        registered, error = plugin.notified[0]
        assert not registered
        assert "none of services supported by the plugin" in error
        assert manager.instances.value == ()


async def test_a_plugin_that_refuses_the_notification_is_deregistered(
    root: Path, manager: StandInPluginManager
) -> None:
    plugin = Plugin(endpoint="/nowhere.sock")
    plugin.refuses_notification = True
    async with listening(plugin, root / "plugins_registry" / "x.sock"):
        await until(lambda: manager.failures and not manager.instances.value)
        assert "not now" in manager.failures[0]
        assert plugin.notified[0] == (True, "")
        plugin.refuses_notification = False
        await first(manager.instances, len)


async def test_what_is_hidden_or_no_socket_is_left_alone(
    root: Path, manager: StandInPluginManager
) -> None:
    (root / "plugins_registry" / "file.sock").touch()
    hidden = Plugin(endpoint="/nowhere.sock")
    async with listening(hidden, root / "plugins_registry" / ".x.sock"):
        async with Driver().served(root) as endpoint:
            # In the order of their names: the others were seen.
            await first(endpoint.registration, lambda now: now.registered)
        assert (hidden.notified, manager.failures) == ([], [])


async def test_health_ends_with_its_stream_and_devices_that_vanish_are_unknown(
    root: Path, manager: StandInPluginManager
) -> None:
    driver = Driver()
    async with driver.served(root, health=Health(POOL, driver.devices, heartbeat=0.02)):
        await first(manager.health, len)
        driver.devices.publish(listed(HealthState.HEALTHY))
        await until(lambda: manager.state(DRIVER, POOL, "npu-1")[0] == "Unknown")
        assert manager.state(DRIVER, POOL, "npu-0")[0] == "Healthy"
        driver.devices.close()
        await first(manager.health, lambda now: not now)
    await first(manager.instances, lambda now: not now)


async def test_a_stop_while_a_driver_is_deregistered_leaves_no_connection(
    root: Path, manager: StandInPluginManager
) -> None:
    async with Driver().served(root) as endpoint:
        await first(manager.health, len)
        (entry,) = manager._entries.values()
        endpoint.registration_path.unlink()
        stream = entry.stream
        assert stream
        await until(stream.cancelling, interval=0)
        await manager.stop()
        assert entry.channel is None
