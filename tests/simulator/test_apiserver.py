"""The stand-in for the API server, asked by the agent's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from npu_agent.kube import Api, ApiError, Kind, node, resourceclaims, resourceslices
from npu_agent.kube.credentials import Credentials
from npu_agent.outputs.dra.support import support
from npu_agent.simulator.apiserver import StandInApiServer, served

NODE, DRIVER = "n1", "npu.example.com"


@pytest.fixture
def server() -> StandInApiServer:
    return StandInApiServer(NODE)


@pytest.fixture
async def api(server: StandInApiServer) -> AsyncIterator[Api]:
    async with served(server.answer) as url:
        one = Api(credentials=Credentials(server=url, source="a test"))
        yield one
        await one.close()


def a_slice(name: str, **device: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": DRIVER,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "npu-0", **device}],
        },
    }


async def test_only_its_own_node_is_there(api: Api) -> None:
    assert (await node.read(api, NODE)).name == NODE
    with pytest.raises(ApiError) as caught:
        await node.read(api, "n2")
    assert caught.value.kind is Kind.NOT_FOUND


async def test_its_node_can_do_dra(api: Api) -> None:
    assert (await support(api, NODE)).available


async def test_a_claim_has_what_it_was_allocated_until_it_is_deleted(
    server: StandInApiServer, api: Api
) -> None:
    ref = server.allocate(DRIVER, "train", ["npu-0", "npu-1"], pod="train-0")
    claim = resourceclaims.claim_of(await resourceclaims.get(api, ref.namespace, "train"), DRIVER)
    assert (claim.uid, claim.allocated, claim.reserved_for) == (ref.uid, True, ("train-0",))
    assert [(one.pool, one.device) for one in claim.results] == [(NODE, "npu-0"), (NODE, "npu-1")]
    server.forget(ref)
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, ref.namespace, "train")
    assert caught.value.kind is Kind.NOT_FOUND


async def test_an_apply_that_changes_nothing_writes_nothing(
    server: StandInApiServer, api: Api
) -> None:
    taints = [{"key": "example.com/sick", "effect": "NoSchedule"}]
    first = await resourceslices.apply(api, a_slice("a"))
    second = await resourceslices.apply(api, a_slice("a"))
    tainted = await resourceslices.apply(api, a_slice("a", taints=taints))
    assert first == second
    assert tainted["metadata"]["resourceVersion"] > first["metadata"]["resourceVersion"]
    assert tainted["spec"]["devices"][0]["taints"][0]["timeAdded"]
    assert [one["effect"] for one in server.taints()["npu-0"]] == ["NoSchedule"]
    assert server.writes == ["apply a"] * 3


async def test_a_watch_has_what_happens_after_the_listing_and_ends_in_time(
    server: StandInApiServer, api: Api
) -> None:
    await resourceslices.apply(api, a_slice("a"))
    listing = await resourceslices.read(api, NODE, DRIVER)
    assert list(listing.slices) == ["a"]
    await resourceslices.apply(api, a_slice("b"))
    assert await resourceslices.delete(api, "a")
    assert not await resourceslices.delete(api, "a")
    version = listing.resource_version
    async with resourceslices.watch(api, NODE, DRIVER, version, seconds=1) as events:
        seen = [(event["type"], event["object"]["metadata"]["name"]) async for event in events]
    assert seen == [("ADDED", "b"), ("DELETED", "a")]
    assert list(server.slices) == ["b"]


async def test_devices_are_waited_for(server: StandInApiServer, api: Api) -> None:
    await resourceslices.apply(api, a_slice("a"))
    assert await server.until(lambda found: "npu-0" in found, 10) == {"npu-0": {"name": "npu-0"}}
    with pytest.raises(TimeoutError):
        await server.until(lambda found: not found, 0.01)
