"""The kubelet's calls over real sockets: by grpclib, and by gRPC's C core from another thread."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from npu_agent.core.claim import ClaimRef, PreparedResult
from npu_agent.core.hardware import HealthState
from npu_agent.kubelet.wire import pluginregistration, v1alpha1
from npu_agent.kubelet.wire import v1 as health_v1
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1, v1beta1
from npu_agent.outputs.dra.endpoint import Endpoint
from npu_agent.outputs.dra.service import DraPlugin, HealthStream, RegistrationState
from tests.outputs.deviceplugin.client import Client
from tests.outputs.dra.helpers import (
    DRIVER,
    POOL,
    Driver,
    StandInClaims,
    given,
    kubelet_root,
    listed,
    ref,
)
from tests.until import first

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

    async def test_what_the_kubelet_says_is_published_and_a_refusal_is_logged_once(
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
    async def test_unprepare_says_what_failed_and_nothing_of_what_went_well(
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


@pytest.mark.parametrize("requests", [(), ("",), ("npu", ""), ("npu/whole",)])
def test_a_device_is_for_requests_that_a_container_can_name(requests: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="device 'npu-0' is for no request"):
        PreparedResult(requests=requests, pool=POOL, device="npu-0", cdi_ids=())


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

    async def test_streams_end_in_order_with_the_feed(
        self, driver: Driver, endpoint: Endpoint, channel: Channel
    ) -> None:
        messages = self.stub(channel)
        await anext(messages)
        streams = endpoint.health.streams
        assert streams.value == 1
        driver.devices.close()
        assert [one async for one in messages] == []  # the end, and no error
        await first(streams, lambda now: now == 0)
        assert [one async for one in self.stub(channel)] == []

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
async def test_what_is_no_message_is_an_invalid_argument(endpoint: Endpoint, service: str) -> None:
    """By gRPC's C core, which sends what grpclib would not; tests/fuzz has the other services."""
    client = Client(endpoint.path, service)
    status, message = await asyncio.to_thread(client.refused, "NodeWatchResources", b"\xff" * 11)
    assert status == "INVALID_ARGUMENT"
    assert "the request cannot be decoded" in message
    await asyncio.to_thread(client.close)
