"""Objects as the API server writes them."""

from __future__ import annotations

import pytest

from npu_agent.kube.objects import Node, ResourceClaim, ResourceSlice
from npu_agent.people.cluster.objects import condition
from npu_agent.people.cluster.pods import Pod
from npu_agent.typedjson import InvalidJsonError
from tests.people.cluster.build import read


def test_a_node_is_read() -> None:
    node = read(
        Node,
        {
            "kind": "Node",
            "metadata": {"name": "n1", "labels": {"zone": "a"}, "managedFields": [{}]},
            "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoSchedule"}]},
            "status": {
                "allocatable": {"beta.furiosa.ai/npu": "8"},
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "t"}],
            },
        },
    )
    assert (node.name, node.key, node.metadata.labels) == ("n1", "n1", {"zone": "a"})
    assert node.spec.unschedulable
    assert node.spec.taints[0].key == "k"
    ready = condition(node.status.conditions, "Ready")
    assert ready is not None
    assert condition(node.status.conditions, "Other") is None


def test_a_pod_has_its_claims_by_name_by_template_and_for_extended_resources() -> None:
    pod = read(
        Pod,
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "creationTimestamp": None},
            "spec": {
                "resourceClaims": [
                    {"name": "a", "resourceClaimName": "mine"},
                    {"name": "b", "resourceClaimTemplateName": "t"},
                    {"name": "c", "resourceClaimTemplateName": "not-yet"},
                ],
            },
            "status": {
                "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x1"}],
                "extendedResourceClaimStatus": {
                    "resourceClaimName": "p-extended-resources",
                    "requestMappings": [{"containerName": "main"}],
                },
                "containerStatuses": [
                    {
                        "name": "main",
                        "allocatedResourcesStatus": [
                            {"name": "r", "resources": [{"resourceID": "d1", "health": "Healthy"}]}
                        ],
                    }
                ],
            },
        },
    )
    assert pod.claims == ("mine", "p-b-x1", "p-extended-resources")
    [status] = pod.status.container_statuses
    assert status.allocated_resources_status[0].resources[0].resource_id == "d1"
    assert not pod.ended


def test_a_claim_has_what_it_was_given_and_none_before() -> None:
    raw = {"metadata": {"name": "c", "namespace": "ns"}, "spec": {"devices": {"requests": []}}}
    assert read(ResourceClaim, raw).results == ()
    given = {"request": "r", "driver": "npu.furiosa.ai", "pool": "n1", "device": "npu0"}
    allocation = {"devices": {"results": [given]}}
    claim = read(ResourceClaim, {**raw, "status": {"allocation": allocation}})
    assert [one.device for one in claim.results] == ["npu0"]


def test_a_device_has_plain_attributes() -> None:
    device = {
        "name": "npu0-cores-0-3",
        "attributes": {"type": {"string": "cores"}, "cores": {"int": 4}},
        "consumesCounters": [{"counterSet": "npu0", "counters": {"core-0": {"value": "1"}}}],
        "taints": [{"key": "npu.furiosa.ai/unhealthy", "effect": "NoSchedule", "timeAdded": "t"}],
    }
    pool = {"name": "n1", "generation": 3, "resourceSliceCount": 1}
    spec = {"driver": "npu.furiosa.ai", "nodeName": "n1", "pool": pool, "devices": [device]}
    [found] = read(ResourceSlice, {"metadata": {"name": "s"}, "spec": spec}).spec.devices
    assert (found.attribute("cores"), found.attribute("type")) == (4, "cores")
    assert found.attribute("none") is None
    assert found.consumes_counters[0].counters == {"core-0": {"value": "1"}}


def test_another_shape_is_an_error_that_names_the_field() -> None:
    with pytest.raises(InvalidJsonError, match=r"metadata\.name is missing"):
        read(Node, {"metadata": {}})
