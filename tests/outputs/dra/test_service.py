"""The kubelet's calls over real sockets, and these: by grpclib, and once by gRPC's C core."""

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from npu_agent.core.hardware import HealthState
from npu_agent.core.pool import ClaimRef
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import pluginregistration, v1alpha1
from npu_agent.kubelet.wire import v1 as health_v1
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1, v1beta1
from npu_agent.outputs.dra.service import (
    PLUGINS,
    REGISTRY,
    DraPlugin,
    Endpoint,
    HealthStream,
    RegistrationState,
    sweep_all,
)
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.outputs.deviceplugin.client import Client
from tests.outputs.deviceplugin.helpers import names
from tests.outputs.dra.helpers import (
    DRIVER,
    POOL,
    Driver,
    Prepared,
    StandInClaims,
    given,
    kubelet_root,
    listed,
    ref,
)
from tests.until import first, until

BOTH = pytest.mark.parametrize("wire", [v1, v1beta1], ids=["v1", "v1beta1"])
SOON = 20.0
"""Seconds; guards against hanging and measures nothing."""


@pytest.fixture
async def root() -> AsyncIterator[Path]:
    async with kubelet_root() as directory:
        yield directory


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
async def endpoint(root: Path, driver: Driver) -> AsyncIterator[Endpoint]:
    async with driver.served(root) as served:
        yield served


@pytest.fixture
async def channel(endpoint: Endpoint) -> AsyncIterator[Channel]:
    async with Channel(path=str(endpoint.path)) as opened:
        yield opened


def claims(wire: Any, *refs: ClaimRef) -> list[Any]:
    return [wire.Claim(namespace=one.namespace, name=one.name, uid=one.uid) for one in refs]


async def prepare(channel: Channel, *refs: ClaimRef, wire: Any = v1) -> Mapping[str, Any]:
    request = wire.NodePrepareResourcesRequest(claims=claims(wire, *refs))
    response = await wire.DraPluginStub(channel, timeout=SOON).node_prepare_resources(request)
    answers: Mapping[str, Any] = response.claims
    return answers


async def unprepare(channel: Channel, *refs: ClaimRef, wire: Any = v1) -> dict[str, str]:
    request = wire.NodeUnprepareResourcesRequest(claims=claims(wire, *refs))
    response = await wire.DraPluginStub(channel, timeout=SOON).node_unprepare_resources(request)
    return {uid: answer.error for uid, answer in response.claims.items()}


class TestRegistration:
    @pytest.fixture
    async def kubelet(
        self, endpoint: Endpoint
    ) -> AsyncIterator[pluginregistration.RegistrationStub]:
        async with Channel(path=str(endpoint.registration_path)) as opened:
            yield pluginregistration.RegistrationStub(opened, timeout=SOON)

    async def test_get_info_has_all_that_a_kubelet_needs_the_newest_version_first(
        self, endpoint: Endpoint, kubelet: pluginregistration.RegistrationStub
    ) -> None:
        info = await kubelet.get_info(pluginregistration.InfoRequest())
        assert info == pluginregistration.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=str(endpoint.path),
            supported_versions=[
                "v1.DRAPlugin",
                "v1beta1.DRAPlugin",
                "v1.DRAResourceHealth",
                "v1alpha1.DRAResourceHealth",
            ],
        )
        assert Path(info.endpoint).is_absolute()

    async def test_the_kubelets_status_is_published_and_a_refusal_is_logged_once(
        self,
        endpoint: Endpoint,
        kubelet: pluginregistration.RegistrationStub,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        state = endpoint.registration
        await kubelet.get_info(pluginregistration.InfoRequest())
        assert await first(state, lambda now: now.asked) == RegistrationState(asked=1)
        for error in ("too old", "too old", "no version\nof yours is known"):
            await kubelet.notify_registration_status(
                pluginregistration.RegistrationStatus(error=error)
            )
        assert await first(state, lambda now: now.notifications == 3) == RegistrationState(
            asked=1, notifications=3, error="no version of yours is known"
        )
        refusals = [one for one in caplog.records if "refuses the DRA driver" in one.getMessage()]
        assert len(refusals) == 2
        await kubelet.notify_registration_status(
            pluginregistration.RegistrationStatus(plugin_registered=True)
        )
        assert await first(state, lambda now: now.registered) == RegistrationState(
            asked=1, notifications=4, registered=True
        )
        await kubelet.get_info(pluginregistration.InfoRequest())
        restarted = await first(state, lambda now: now.asked == 2)
        assert restarted.registered


class TestPrepare:
    @BOTH
    async def test_each_device_is_for_its_requests(
        self, driver: Driver, channel: Channel, wire: Any
    ) -> None:
        driver.prepared = {
            "u1": (given("npu-0", "train", "side"), given("npu-1", "train")),
            "u2": "npu-2 is held by Pod ml/other",
            "u3": (),
            "u4": "",  # an error without words would be a success without devices
        }
        refs = [ref(uid) for uid in driver.prepared]
        answers = await prepare(channel, *refs, wire=wire)
        assert answers == {
            "u1": wire.NodePrepareResourceResponse(
                devices=[
                    wire.Device(
                        request_names=["train", "side"],
                        pool_name=POOL,
                        device_name="npu-0",
                        cdi_device_ids=["furiosa.ai/claim=npu-0"],
                    ),
                    wire.Device(
                        request_names=["train"],
                        pool_name=POOL,
                        device_name="npu-1",
                        cdi_device_ids=["furiosa.ai/claim=npu-1"],
                    ),
                ]
            ),
            "u2": wire.NodePrepareResourceResponse(error="npu-2 is held by Pod ml/other"),
            "u3": wire.NodePrepareResourceResponse(),
            "u4": wire.NodePrepareResourceResponse(error="no reason given"),
        }
        assert driver.asked == [("prepare", tuple(refs))]

    @BOTH
    @pytest.mark.parametrize("reason", ["", "another agent serves the node"])
    async def test_unprepare_names_claims_that_failed_and_no_others(
        self, driver: Driver, channel: Channel, wire: Any, reason: str
    ) -> None:
        driver.unprepared = reason
        answers = await unprepare(channel, ref("u1"), ref("u2"), wire=wire)
        assert answers == {"u1": reason, "u2": reason}
        assert driver.asked == [("unprepare", (ref("u1"), ref("u2")))]

    @pytest.mark.parametrize("uid", ["", "../u2"])  # it is part of a file's name
    async def test_broken_requests_are_refused(
        self, driver: Driver, channel: Channel, uid: str
    ) -> None:
        for call in (prepare, unprepare):
            with pytest.raises(GRPCError) as error:
                await call(channel, ref("u1"), ref(uid, "outside"))
            message = f"claim 'ml/outside' has the UID {uid!r}, which is none"
            assert (error.value.status, error.value.message) == (Status.INVALID_ARGUMENT, message)
        assert driver.asked == []

    async def test_a_call_that_takes_too_long_is_answered_before_the_kubelet_gives_up(
        self, root: Path, driver: Driver
    ) -> None:
        ended: list[str] = []

        async def hang(refs: Sequence[ClaimRef]) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(refs[0].uid)

        late = "npu-agent was not ready within 0.05 s; the kubelet tries again"
        plugin = DraPlugin(StandInClaims(hang, hang), deadline=0.05)
        async with (
            driver.served(root, plugin=plugin) as endpoint,
            Channel(path=str(endpoint.path)) as channel,
        ):
            answers = await prepare(channel, ref("u1"), ref("u2"))
            assert {uid: answer.error for uid, answer in answers.items()} == {
                "u1": late,
                "u2": late,
            }
            assert await unprepare(channel, ref("u3")) == {"u3": late}
        assert ended == ["u1", "u3"]


class TestHealth:
    @staticmethod
    def stub(channel: Channel, wire: Any = v1alpha1) -> AsyncIterator[Any]:
        stub = wire.DraResourceHealthStub(channel, timeout=SOON)
        messages: AsyncIterator[Any] = stub.node_watch_resources(wire.NodeWatchResourcesRequest())
        return messages

    @staticmethod
    def health(message: Any) -> list[tuple[str, str, str]]:
        return [
            (
                one.device.device_name,
                str(v1alpha1.HealthStatus(one.health).name),
                one.message,
            )
            for one in message.devices
        ]

    @pytest.mark.parametrize("wire", [v1alpha1, health_v1], ids=["v1alpha1", "v1"])
    async def test_the_list_is_complete_from_the_first_message_on(
        self, driver: Driver, channel: Channel, wire: Any
    ) -> None:
        messages = self.stub(channel, wire)
        message = await anext(messages)
        assert {one.device.pool_name for one in message.devices} == {POOL}
        assert {one.health_check_timeout_seconds for one in message.devices} == {0}
        assert self.health(message) == [
            ("npu-0", "HEALTHY", "is healthy"),
            ("npu-1", "UNHEALTHY", "it is too hot"),
        ]
        driver.devices.publish(listed("gone", HealthState.UNKNOWN, HealthState.HEALTHY))
        assert self.health(await anext(messages)) == [
            ("npu-0", "UNHEALTHY", "gone"),
            ("npu-1", "HEALTHY", "is unknown"),
            ("npu-2", "HEALTHY", "is healthy"),
        ]
        driver.devices.publish(())
        assert self.health(await anext(messages)) == []

    async def test_the_same_list_comes_again_as_a_heartbeat(
        self, root: Path, driver: Driver
    ) -> None:
        health = HealthStream(POOL, driver.devices, heartbeat=0.02)
        async with (
            driver.served(root, health=health) as endpoint,
            Channel(path=str(endpoint.path)) as channel,
        ):
            messages = self.stub(channel)
            received = [await anext(messages) for _ in range(5)]
        assert all(one == another for one, another in pairwise(received))
        assert len(received[0].devices) == 2

    async def test_a_message_has_1024_bytes_and_no_half_character(
        self, driver: Driver, channel: Channel
    ) -> None:
        driver.devices.publish(listed("x" + "\u00e9" * 600, "\udcff broken"))
        long, broken = [one.message for one in (await anext(self.stub(channel))).devices]
        assert long == "x" + "\u00e9" * 511
        assert broken == "? broken"


@pytest.mark.parametrize("service", ["v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    endpoint: Endpoint, service: str
) -> None:
    """By gRPC's C core, which sends what grpclib would not; tests/fuzz has the other services."""
    client = Client(endpoint.path, service)
    status, message = await asyncio.to_thread(client.refused, "NodeWatchResources", b"\xff" * 11)
    assert status == "INVALID_ARGUMENT"
    assert "the request cannot be decoded" in message
    await asyncio.to_thread(client.close)


# The sockets.


def dead(path: Path) -> Path:
    """The socket of a process that was killed."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(os.fspath(path))
        killed.listen()
    return path


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
    long = root / ("k" * 60)
    (long / REGISTRY).mkdir(parents=True)
    with pytest.raises(OSError, match=r"Linux takes 107: .* link the kubelet's directory"):
        await Driver().endpoint(long).start()
    assert names(long / PLUGINS / DRIVER) == names(long / REGISTRY) == []


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
        ending = asyncio.ensure_future(anext(messages, None))
        await asyncio.sleep(0)  # it reads, as the kubelet does
        driver.devices.close()
        await endpoint.close()
        assert await ending is None  # a lost connection would raise


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
        file.write_text("a file, not a socket", encoding="utf-8")
        sweep_all(DRIVER, root)
        assert alive.exists()
        assert not any(path.exists() for path in killed)
        assert all(path.exists() for path in (*others, file))


async def test_a_socket_with_too_many_callers_is_not_swept(root: Path) -> None:
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
