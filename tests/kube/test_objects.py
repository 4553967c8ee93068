"""What is asked for each kind of object, and what is made of the answers."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from npu_agent import __version__
from npu_agent.kube import Api, ApiError, ErrorKind, dra, node, reviews
from npu_agent.kube.client import read_answer
from npu_agent.kube.node import NodeMeta
from npu_agent.kube.request import Request
from npu_agent.typedjson import convert
from tests.kube.helpers import NODE, SLICE, Server, says, status

METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
DRA = "/apis/resource.k8s.io/v1"
META = NodeMeta(name="n1", uid="7b0c", resource_version="42")


async def garbage(reading: Any) -> str:
    with pytest.raises(ApiError) as caught:
        await reading
    assert caught.value.kind is ErrorKind.GARBAGE
    assert str(caught.value).isprintable()
    return str(caught.value)


# Nodes.


async def test_a_node_is_asked_for_from_the_cache_as_metadata_only(
    server: Server, api: Api
) -> None:
    server.replies = [says(NODE)]
    found = await node.read(api, "n1")
    assert (found.name, found.uid, found.resource_version) == ("n1", "7b0c", "42")
    assert found.labels == {"kubernetes.io/hostname": "n1", "npu.count": "2"}
    assert found.applied == {"npu.count"}
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("GET", "/api/v1/nodes/n1")
    assert asked.query == [("resourceVersion", "0")]
    assert asked.headers["Accept"] == METADATA_ONLY
    assert asked.headers["User-Agent"] == f"npu-agent/{__version__}"
    assert asked.headers["Authorization"] == "Bearer secret"


async def test_the_whole_node(server: Server, api: Api) -> None:
    answer = {"kind": "Node", "metadata": NODE["metadata"]}
    parts = {
        "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
        "status": {"allocatable": {"cpu": "4"}, "nodeInfo": {"kubeletVersion": "v1.36.3"}},
    }
    server.replies = [says(answer), says({**answer, **parts})]
    assert not (await node.read_whole(api, "n1")).spec.unschedulable
    found = await node.read_whole(api, "n1")
    assert found.spec.unschedulable
    assert found.status.allocatable == {"cpu": "4"}
    assert found.status.node_info.kubelet_version == "v1.36.3"
    assert server.asked[0].headers["Accept"] == "application/json"
    assert server.asked[0].query == [("resourceVersion", "0")]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "metadata: expected object, got null"),
        ({"name": "n1"}, "metadata.uid is missing"),
        ({**NODE["metadata"], "uid": ""}, "metadata.uid: expected str of length >= 1"),
        ({**NODE["metadata"], "labels": {"a": 1}}, "metadata.labels[...]: expected str, got int"),
    ],
)
async def test_metadata_that_lacks_something(
    server: Server, api: Api, metadata: object, words: str
) -> None:
    server.replies = [says({**NODE, "metadata": metadata})]
    assert words in await garbage(node.read(api, "n1"))


def entry(labels: dict[str, Any], **others: Any) -> dict[str, Any]:
    fields = {"f:metadata": {"f:labels": labels, "f:annotations": {}}}
    return {"manager": "npu-agent", "operation": "Apply", "fieldsV1": fields, **others}


@pytest.mark.parametrize(
    ("managed_fields", "applied"),
    [
        ([], set()),
        ([entry({"f:a": {}, "f:example.com/b": {}, ".": {}})], {"a", "example.com/b"}),
        ([entry({"f:f:a": {}}), entry({"f:b": {}}, manager="kubectl")], {"f:a"}),
        ([entry({"f:a": {}}, operation="Update")], set()),
        ([entry({"f:a": {}}, subresource="status")], set()),
        ([entry({}, fieldsV1={"f:status": {}}), entry({"f:b": {}})], {"b"}),
    ],
)
def test_applied_labels(managed_fields: list[object], applied: set[str]) -> None:
    meta = {**NODE["metadata"], "managedFields": managed_fields}
    assert convert(meta, NodeMeta).applied == applied


async def test_labels_are_applied_to_this_very_node(server: Server, api: Api) -> None:
    after = await node.apply_labels(api, META, {"npu.count": "2"})
    assert after.resource_version == "42"
    await node.apply_labels(api, META, {})
    asked, without = server.asked
    assert (asked.method, asked.path) == ("PATCH", "/api/v1/nodes/n1")
    assert asked.query == [("fieldManager", "npu-agent"), ("force", "true")]
    assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
    assert asked.headers["Accept"] == METADATA_ONLY
    assert json.loads(asked.body) == {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "uid": "7b0c", "labels": {"npu.count": "2"}},
    }
    # An empty field would stay in managedFields.
    assert json.loads(without.body)["metadata"] == {"name": "n1", "uid": "7b0c"}


async def test_a_name_cannot_leave_its_place_in_the_path(server: Server, api: Api) -> None:
    await node.read(api, "a/b?c#d")
    assert server.asked[0].path == "/api/v1/nodes/a/b?c#d"
    assert server.asked[0].query == [("resourceVersion", "0")]


# Reviews.


async def test_rights_are_asked_for(server: Server, api: Api) -> None:
    review = {"kind": "SelfSubjectAccessReview", "status": {"allowed": True}}
    server.replies = [says(review, 201), says({**review, "status": {"allowed": False}}, 201)]
    assert await reviews.allowed(api, "get", "nodes", name="n1")
    assert not await reviews.allowed(api, "create", "events", namespace="default")
    first, second = server.asked
    assert first.method == "POST"
    assert first.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    right = json.loads(first.body)["spec"]["resourceAttributes"]
    assert right == {"verb": "get", "group": "", "resource": "nodes", "namespace": "", "name": "n1"}
    right = json.loads(second.body)["spec"]["resourceAttributes"]
    assert (right["namespace"], right["name"]) == ("default", "")


# Claims; what a token is worth is in tests/outputs/web/test_authorization.py.


async def test_a_claim(server: Server, api: Api) -> None:
    claim = {"kind": "ResourceClaim", "metadata": {"name": "c"}, "status": {"any": ["thing"]}}
    server.replies = [says(claim), status(404, 'resourceclaims "c" not found')]
    assert await dra.read_claim(api, "n", "c") == claim
    assert server.asked[0].path == f"{DRA}/namespaces/n/resourceclaims/c"
    with pytest.raises(ApiError, match=r"cannot get ResourceClaim n/c: .*: the claim was deleted"):
        await dra.read_claim(api, "n", "c")


async def test_whether_dra_is_served(server: Server, api: Api) -> None:
    server.replies = [says({"kind": "APIResourceList", "groupVersion": "resource.k8s.io/v1"})]
    assert await dra.served(api)
    assert server.asked[-1].path == DRA
    server.replies = [says("404 page not found", 404)]
    assert not await dra.served(api)
    server.replies = [status(503, "starting")]
    with pytest.raises(ApiError):
        await dra.served(api)


# ResourceSlices; watches of them are in test_watch.py.


async def test_the_slices_of_a_driver_on_a_node(server: Server, api: Api) -> None:
    theirs = {**SLICE, "metadata": {"name": "theirs", "resourceVersion": "8"}}
    theirs["spec"] = {**SLICE["spec"], "pool": {**SLICE["spec"]["pool"], "name": "n1-too"}}
    meta = {"resourceVersion": "42"}
    answer = {"kind": "ResourceSliceList", "metadata": meta, "items": [SLICE, theirs]}
    server.replies = [says(answer)]
    found = await dra.list_slices(api, "n1", "npu.example.com")
    assert found == ({"s": SLICE}, ("theirs",), "42")
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("GET", f"{DRA}/resourceslices")
    selector = "spec.nodeName=n1,spec.driver=npu.example.com"
    assert asked.query == [("fieldSelector", selector)]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([5], "expected object, got int"),
        (
            [{**SLICE, "spec": {**SLICE["spec"], "pool": {"name": "n1"}}}],
            "spec.pool.generation is",
        ),
        ([{**SLICE, "spec": {**SLICE["spec"], "devices": ["npu-0"]}}], "spec.devices[0]: expected"),
    ],
)
async def test_a_list_that_is_none(server: Server, api: Api, items: object, words: str) -> None:
    meta = {"resourceVersion": "42"}
    server.replies = [says({"kind": "ResourceSliceList", "metadata": meta, "items": items})]
    assert words in await garbage(dra.list_slices(api, "n1", "d"))


async def test_a_list_may_be_longer_than_an_object(server: Server, api: Api) -> None:
    """200 RNGD that are offered in parts are 2.4 MiB; an answer without an end is not kept."""
    meta = {"resourceVersion": "7", "padding": "x" * 2**20}
    items = [{**SLICE, "metadata": {"name": f"{n}", **meta}} for n in range(3)]
    answer = {"kind": "ResourceSliceList", "metadata": {"resourceVersion": "42"}, "items": items}
    server.replies = [says(answer)]
    assert len((await dra.list_slices(api, "n1", "d")).slices) == 3
    server.replies = [says(b" " * (8 * 2**20 + 1))]
    with pytest.raises(ApiError, match="more than 8388608 bytes: delete those that npu-agent has"):
        await dra.list_slices(api, "n1", "d")


class Answer:
    """Stands in for an Api: what a body is read as costs what it costs there."""

    def __init__(self, items: object) -> None:
        meta = {"resourceVersion": "42"}
        answer = {"kind": "ResourceSliceList", "metadata": meta, "items": items}
        self.body = json.dumps(answer).encode()

    async def ask(self, request: Request[Any]) -> Any:
        return read_answer(request, self.body, None)


def dense(name: str, pool: str) -> dict[str, Any]:
    """A slice as large as the API server takes it, of things that take much memory."""
    counters = {f"core-{n}": {"value": "1"} for n in range(32)}
    device = {
        "attributes": {f"a{n}": {"bool": True} for n in range(32)},
        "consumesCounters": [{"counterSet": f"s{n}", "counters": counters} for n in range(2)],
        "taints": [{"key": f"t{n}", "effect": "NoExecute"} for n in range(16)],
    }
    spec = {
        "driver": "d",
        "pool": {"name": pool, "generation": 7, "resourceSliceCount": 20},
        "devices": [{"name": f"npu{n}", **device} for n in range(128)],
    }
    return {**SLICE, "metadata": {"name": name, "resourceVersion": "7"}, "spec": spec}


@pytest.mark.parametrize(("pool", "whole", "most"), [("n1", 10, 10), ("theirs", 0, 0.1)])
async def test_slices_of_others_take_little_memory(pool: str, whole: int, most: float) -> None:
    """7 MiB that others made took the agent over its limit, at each start."""
    answer = Answer([dense(f"s{n:02}", pool) for n in range(20)])
    tracemalloc.start()
    found = await dra.list_slices(answer, "n1", "d")  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most * len(answer.body)
    assert len(found.slices) + len(found.foreign) == 20
    decoded = ["devices" in slice_["spec"] for slice_ in found.slices.values()]
    assert decoded.count(True) == whole
    assert {slice_["spec"]["pool"]["generation"] for slice_ in found.slices.values()} <= {7}


async def test_a_slice_is_deleted_or_was_gone_already(server: Server, api: Api) -> None:
    server.replies = [says(SLICE), status(404, "not found"), status(403, "no")]
    assert await dra.delete_slice(api, "s")
    assert not await dra.delete_slice(api, "s")
    with pytest.raises(ApiError):
        await dra.delete_slice(api, "s")
    assert [asked.method for asked in server.asked] == ["DELETE"] * 3
