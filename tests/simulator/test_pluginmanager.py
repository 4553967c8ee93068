"""The stand-in for the kubelet's plugin manager, beside drivers that behave and that do not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import pluginregistration as wire
from npu_agent.simulator.pluginmanager import KNOWN, PrepareError, StandInPluginManager
from tests.outputs.dra.helpers import DRIVER, POOL, Driver, given, kubelet_root, ref
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
