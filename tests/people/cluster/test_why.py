"""Each reason that `kubectl npu why` gives has a case; tests/e2e/why asks the real scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from npu_agent.kube.objects import Pod
from npu_agent.people.cluster.why import Verdict, why
from tests.people.cluster.build import (
    DRIVER,
    NPU,
    SPACE,
    Json,
    claim,
    claims,
    class_,
    cluster,
    cut,
    device,
    held,
    node,
    pod,
    read,
    request,
    slice_,
    thing,
)

ALL = {"operator": "Exists"}


def answer(asked: Json, *objects: Json) -> Verdict:
    return why(read(Pod, asked), cluster(asked, *objects))


def lines(verdict: Verdict) -> str:
    return "\n".join(f"{each.node}: {each}" for each in verdict.nodes)


def with_claim(*requests: Json, **options: Any) -> list[Json]:
    """A Pod with one claim, and its class."""
    asked = pod(resourceClaims=claims(npu="mine"))
    return [asked, claim("mine", *requests, **options), class_()]


def test_it_could_be_scheduled() -> None:
    found = answer(pod(requests={NPU: "2"}), node("n1", {NPU: "2"}), node("n2", {NPU: "1"}))
    assert found.fitting == ["n1"]
    assert found.schedulable
    assert found.sentence == "Pod ml/train could be scheduled now, on n1."
    assert "n2: wants 2 of beta.furiosa.ai/npu, 1 of 1 are free" in lines(found)


def test_a_name_that_no_node_offers() -> None:
    found = answer(pod(requests={"beta.furiosa.ai/npuu": "1"}), node("n1", {NPU: "8"}))
    assert "no Node that it may use offers" in found.sentence
    assert f"is {NPU} meant?" in found.sentence
    assert "n1: offers no beta.furiosa.ai/npuu" in lines(found)


def test_all_in_use_and_by_whom() -> None:
    users = [pod("a", {NPU: "4"}, on="n1"), pod("b", {NPU: "3"}, on="n1")]
    found = answer(pod(requests={NPU: "2"}), node("n1", {NPU: "8"}), *users)
    assert found.sentence == "Pod ml/train waits: all that it requests is in use (on Node n1)."
    assert "1 of 8 are free; ml/a has 4, ml/b has 3" in lines(found)


def test_enough_is_free_but_on_two_nodes() -> None:
    users = [pod("a", {NPU: "1"}, on="n1"), pod("b", {NPU: "1"}, on="n2")]
    nodes = [node("n1", {NPU: "2"}), node("n2", {NPU: "2"})]
    found = answer(pod(requests={NPU: "2"}), *nodes, *users)
    assert "no Node has 2 together: it is fragmented" in found.sentence


def test_more_than_any_node_has() -> None:
    found = answer(pod(requests={NPU: "4"}), node("n1", {NPU: "2"}))
    assert "more than any Node has" in found.sentence


def test_unhealthy_cards() -> None:
    status = {"capacity": {NPU: "4"}}
    found = answer(pod(requests={NPU: "2"}), node("n1", {NPU: "1"}, status=status))
    assert "too few devices are healthy" in found.sentence
    assert "3 are unhealthy or cordoned" in lines(found)


def test_cordoned_node_and_tolerated_cordon() -> None:
    cordoned = node("n1", {NPU: "2"}, spec={"unschedulable": True})
    found = answer(pod(requests={NPU: "1"}), cordoned)
    assert "n1: is cordoned" in lines(found)
    assert answer(pod(requests={NPU: "1"}, tolerations=[ALL]), cordoned).schedulable


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "team", "value": "a"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "operator": "Equal", "value": "b"}, False),
        ({"key": "team", "operator": "Exists", "tolerationSeconds": 0}, True),
    ],
)
def test_a_taint_of_the_node(toleration: Json, fits: bool) -> None:
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    tainted = node("n1", {NPU: "2"}, spec={"taints": [taint]})
    found = answer(pod(requests={NPU: "1"}, tolerations=[toleration]), tainted)
    assert found.schedulable is fits
    assert fits or "has the taint team=a:NoSchedule" in lines(found)


def test_node_selector_and_affinity() -> None:
    found = answer(pod(requests={NPU: "1"}, nodeSelector={"disk": "ssd"}), node("n1", {NPU: "1"}))
    assert "lacks the label disk=ssd" in lines(found)
    assert "node selector and affinity" in found.sentence


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "gen", "operator": "Gt", "values": ["2"]}, True),
        ({"key": "gen", "operator": "Lt", "values": ["3"]}, False),
        ({"key": "gen", "operator": "In", "values": ["3", "4"]}, True),
        ({"key": "gen", "operator": "NotIn", "values": ["3"]}, False),
        ({"key": "none", "operator": "NotIn", "values": ["3"]}, True),
        ({"key": "none", "operator": "Exists"}, False),
        ({"key": "none", "operator": "DoesNotExist"}, True),
    ],
)
def test_operators_of_node_affinity(expression: Json, fits: bool) -> None:
    terms = {"nodeSelectorTerms": [{}, {"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    asked = pod(requests={NPU: "1"}, affinity=affinity)
    assert answer(asked, node("n1", {NPU: "1"}, labels={"gen": "3"})).schedulable is fits


def test_affinity_between_pods_is_not_judged() -> None:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    found = answer(pod(requests={NPU: "1"}, affinity=affinity), node("n1", {NPU: "1"}))
    assert found.schedulable is None
    assert found.nodes[0].fits is None
    assert "cannot be judged here: its podAffinity" in lines(found)


def test_cpu_and_init_containers() -> None:
    init = {"name": "init", "resources": {"requests": {"cpu": "9"}}}
    found = answer(pod(requests={NPU: "1"}, initContainers=[init]), node("n1", {NPU: "1"}))
    assert "wants 9 cpu, 8 are free" in lines(found)


def test_a_host_port_in_use() -> None:
    def with_port(name: str, **fields: Any) -> Json:
        made = pod(name, {NPU: "1"}, **fields)
        made["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
        return made

    found = answer(with_port("train"), node("n1", {NPU: "4"}), with_port("web", on="n1"))
    assert "its host port 80 is in use by Pod ml/web" in lines(found)


def test_scheduling_gate_and_scheduler_name() -> None:
    gated = pod(requests={NPU: "1"}, schedulingGates=[{"name": "quota"}])
    assert "the scheduling gates quota" in answer(gated, node("n1", {NPU: "1"})).sentence
    other = pod(requests={NPU: "1"}, schedulerName="npu-binpack")
    assert "its schedulerName is npu-binpack" in answer(other, node("n1", {NPU: "1"})).sentence


def test_claim_class_and_template_that_are_missing() -> None:
    asked, mine, there = with_claim()
    assert "ResourceClaim mine does not exist" in answer(asked, node("n1"), there).sentence
    assert f"DeviceClass {DRIVER} of ResourceClaim mine" in answer(asked, mine, node("n1")).sentence
    asked = pod(resourceClaims=[{"name": "npu", "resourceClaimTemplateName": "one"}])
    assert "ResourceClaimTemplate one" in answer(asked, node("n1")).sentence
    made = thing("ResourceClaimTemplate", "one", SPACE, spec={"spec": {}})
    assert "is not created yet" in answer(asked, made, node("n1")).sentence
    name = f"{DRIVER}.deviceclass.resource.k8s.io/devices"
    spec, status = {"hard": {name: "2"}}, {"used": {name: "2"}}
    quota = thing("ResourceQuota", "team", SPACE, spec=spec, status=status)
    assert "ResourceQuota team allows 2" in answer(asked, made, quota, node("n1")).sentence


def test_a_claim_is_allocated_and_takes_the_first_device_that_is_free() -> None:
    objects = with_claim(request("npu", f'device.attributes["{DRIVER}"].cores == 8'))
    cards = slice_("n1", device("npu-a"), device("npu-b"))
    found = answer(*objects, node("n1"), node("n2"), cards)
    assert found.fitting == ["n1"]
    assert "n2: offers no devices by DRA" in lines(found)


def test_which_term_of_a_selector_no_device_meets() -> None:
    cores, kind = f'device.attributes["{DRIVER}"].cores == 16', f'device.driver == "{DRIVER}"'
    found = answer(
        *with_claim(request("npu", f"{kind} && {cores}")), node("n1"), slice_("n1", device("npu-a"))
    )
    assert "no device is one that it asks for" in found.sentence
    assert f"meets {cores} of request npu" in lines(found)
    assert f"{kind} &&" not in lines(found)


def test_a_selector_that_fails_ends_scheduling_on_all_nodes() -> None:
    """As the scheduler does it: also where another Node would do."""
    objects = with_claim(request("npu", f'device.attributes["{DRIVER}"].speed > 3'))
    fast = device("npu-a", attributes={"speed": {"int": 4}})
    nodes = [node("n1"), node("n2"), slice_("n1", fast), slice_("n2", device("npu-b"))]
    found = answer(*objects, *nodes)
    assert found.schedulable is False
    assert not found.fitting
    assert "the scheduler fails at its claims" in found.sentence
    assert "n1: would do, but" in lines(found)


def test_a_selector_that_is_not_known_is_not_judged() -> None:
    objects = with_claim(request("npu", "[1, 2].sum() == 3"))
    found = answer(*objects, node("n1"), slice_("n1", device("npu-a")))
    assert found.schedulable is None


@pytest.mark.parametrize(
    ("tolerations", "fits"),
    [
        ([], False),
        ([{"key": f"{DRIVER}/unhealthy", "operator": "Exists", "tolerationSeconds": 5}], True),
        ([{"operator": "Exists", "effect": "NoExecute"}], False),
    ],
)
def test_a_taint_of_a_device(tolerations: list[Json], fits: bool) -> None:
    taints = [{"key": f"{DRIVER}/unhealthy", "effect": "NoSchedule"}]
    objects = with_claim(request(tolerations=tolerations))
    found = answer(*objects, node("n1"), slice_("n1", device("npu-a", taints=taints)))
    assert found.schedulable is fits
    assert fits or f"1 have the taint {DRIVER}/unhealthy:NoSchedule" in lines(found)


def test_a_taint_by_rule() -> None:
    taint = {"key": "repair", "effect": "NoExecute"}
    rule = thing(
        "DeviceTaintRule", "rule", spec={"deviceSelector": {"device": "npu-a"}, "taint": taint}
    )
    found = answer(*with_claim(), node("n1"), slice_("n1", device("npu-a")), rule)
    assert "devices that it could have are tainted" in found.sentence
    assert "repair:NoExecute" in lines(found)


def test_devices_in_use_and_by_whom() -> None:
    found = answer(
        *with_claim(),
        node("n1"),
        slice_("n1", device("npu-a")),
        held("h", "n1", "npu-a", by="other"),
    )
    assert "all that it requests is in use" in found.sentence
    assert "1 in use by ml/other" in lines(found)


def test_admin_access_takes_what_is_in_use() -> None:
    objects = with_claim(request(adminAccess=True))
    in_use = held("h", "n1", "npu-a", by="other")
    assert answer(*objects, node("n1"), slice_("n1", device("npu-a")), in_use).schedulable


def test_counters_used_up_and_the_widest_partition_left() -> None:
    objects = with_claim(request("npu", f'device.attributes["{DRIVER}"].cores == 8'))
    parts = [held("h", "n1", "npu-a-cores-0-3", by="other")]
    found = answer(*objects, node("n1"), *cut("n1", "npu-a"), *parts)
    assert "1 share cores with devices in use by ml/other" in lines(found)
    assert "the widest that is left is npu-a-cores-4-7 (4 cores)" in lines(found)


def test_what_is_left_of_a_card_can_be_had() -> None:
    objects = with_claim(request("npu", f'device.attributes["{DRIVER}"].cores == 4'))
    parts = [held("h", "n1", "npu-a-cores-0-0", by="other")]
    assert answer(*objects, node("n1"), *cut("n1", "npu-a"), *parts).schedulable


def test_a_constraint_that_the_free_devices_do_not_meet() -> None:
    roots = [device(f"npu-{n}", attributes={"root": {"string": str(n)}}) for n in range(2)]
    constraint = [{"matchAttribute": f"{DRIVER}/root"}]
    objects = with_claim(request(count=2), constraints=constraint)
    found = answer(*objects, node("n1"), slice_("n1", *roots))
    assert f"the constraint on {DRIVER}/root" in lines(found)
    constraint = [{"distinctAttribute": f"{DRIVER}/root"}]
    objects = with_claim(request(count=2), constraints=constraint)
    assert answer(*objects, node("n1"), slice_("n1", *roots)).schedulable


def test_the_search_goes_back() -> None:
    """The first request would take the only device that the second can have."""
    wide = request("b", f'device.attributes["{DRIVER}"].cores == 8')
    objects = with_claim(request("a"), wide)
    devices = [device("npu-a"), device("npu-b", 4)]
    assert answer(*objects, node("n1"), slice_("n1", *devices)).schedulable


def test_alternatives() -> None:
    first = [
        {"name": "wide", "deviceClassName": DRIVER, "count": 2},
        {"name": "one", "deviceClassName": DRIVER},
    ]
    objects = with_claim({"name": "npu", "firstAvailable": first})
    assert answer(*objects, node("n1"), slice_("n1", device("npu-a"))).schedulable


def test_all_devices() -> None:
    objects = with_claim(request(allocationMode="All"))
    cards = slice_("n1", device("npu-a"), device("npu-b"))
    assert answer(*objects, node("n1"), cards).schedulable
    found = answer(*objects, node("n1"), cards, held("h", "n1", "npu-a", by="other"))
    assert "wants all of 2 devices, 1 are free" in lines(found)


def test_a_pool_that_is_being_updated() -> None:
    found = answer(*with_claim(), node("n1"), slice_("n1", device("npu-a"), of=2))
    assert "its pool n1 is being updated" in lines(found)


def test_an_allocated_claim_binds_the_pod_to_its_node() -> None:
    asked = pod(resourceClaims=claims(npu="h"))
    cards = slice_("n1", device("npu-a"))
    found = answer(asked, held("h", "n1", "npu-a"), class_(), node("n1"), node("n2"), cards)
    assert found.fitting == ["n1"]
    assert "n2: claim h is allocated, and its devices are not there" in lines(found)


def test_a_resource_name_that_dra_serves() -> None:
    named = class_(DRIVER, extended=NPU)
    asked = pod(requests={NPU: "2"})
    cards = [slice_("n1", device("npu-a"), device("npu-b")), slice_("n2", device("npu-c"))]
    found = answer(asked, named, node("n1"), node("n2"), node("n3", {NPU: "2"}), *cards)
    assert found.fitting == ["n1", "n3"]
    assert "n2: request container-0-request-0 wants 2 of 1 devices" in lines(found)


def test_cards_that_the_other_api_offers() -> None:
    found = answer(pod(requests={NPU: "1"}), node("n1"), slice_("n1", device("npu-a")))
    assert "no DeviceClass has the extendedResourceName beta.furiosa.ai/npu" in lines(found)
    found = answer(*with_claim(), node("n1", {NPU: "2"}))
    assert "offered by a device plugin, as beta.furiosa.ai/npu" in lines(found)
    taints = [{"key": f"{DRIVER}/moving", "effect": "NoSchedule"}]
    found = answer(*with_claim(), node("n1"), slice_("n1", device("npu-a", taints=taints)))
    assert "moving to the device plugin" in lines(found)


def test_what_the_agent_and_its_node_say() -> None:
    bad = {"type": "furiosa.ai/NPUReady", "status": "False", "message": "npu3 is unhealthy"}
    agent = pod("npu-agent-x", on="n1")
    agent["metadata"]["labels"] = {"app.kubernetes.io/name": "npu-agent"}
    annotations = {"annotations": {"npu-agent/cordoned": '{"npu1": "fan"}'}}
    noted = node("n1", metadata=annotations, status={"conditions": [bad]})
    found = lines(answer(pod(requests={NPU: "1"}), noted, agent))
    assert "furiosa.ai/NPUReady is False: npu3 is unhealthy" in found
    assert "its agent, Pod ml/npu-agent-x, is not ready" in found
    assert "cards are cordoned" in found
    assert "npu1" in found


def test_volumes() -> None:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    asked = pod(requests={NPU: "1"}, volumes=volumes)
    there = node("n1", {NPU: "1"})
    assert "PersistentVolumeClaim data does not exist" in answer(asked, there).sentence
    unbound = thing("PersistentVolumeClaim", "data", SPACE, spec={"storageClassName": "ssd"})
    assert "is not bound" in answer(asked, there, unbound).sentence
    late = thing("StorageClass", "ssd", volumeBindingMode="WaitForFirstConsumer")
    assert answer(asked, there, unbound, late).schedulable is None
    bound = thing("PersistentVolumeClaim", "data", SPACE, spec={"volumeName": "pv"})
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    spec = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
    volume = thing("PersistentVolume", "pv", spec=spec)
    found = answer(asked, there, bound, volume)
    assert "PersistentVolume pv cannot be used there" in lines(found)


def test_a_pod_that_runs_and_why_these_devices() -> None:
    asked = pod(on="n1", resourceClaims=claims(npu="h"))
    found = answer(asked, class_(), node("n1"), held("h", "n1", "npu-a", by="train"))
    assert found.sentence == "Pod ml/train runs on Node n1."
    (line,) = found.details
    assert line.startswith(
        "claim h, request npu: npu-a, the first that was free of those that meet"
    )
    health = [{"name": NPU, "resources": [{"resourceID": "npu0", "health": "Healthy"}]}]
    status = {"containerStatuses": [{"name": "main", "allocatedResourcesStatus": health}]}
    found = answer(pod(requests={NPU: "1"}, on="n1", status=status), node("n1", {NPU: "1"}))
    assert "npu0 (Healthy), chosen by the kubelet" in found.details[0]


def test_a_pod_that_asks_for_no_npu_has_ended_or_has_a_hostile_name() -> None:
    found = answer(pod(requests={"cpu": "9"}), node("n1"))
    assert found.details == ("It asks for no NPU and no other device.",)
    assert "wants 9 cpu" in lines(found)
    assert "has ended" in answer(pod(status={"phase": "Failed"}), node("n1")).sentence
    hostile = node("n1", labels={"disk": "\x1b[31m" + "x" * 5000})
    found = answer(pod(nodeSelector={"disk": "ssd"}), hostile)
    assert "\x1b" not in lines(found)
    assert len(lines(found)) < 1000
