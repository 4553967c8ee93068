"""The lines on DRA: a node that does it, and one thing after the other broken on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from npu_agent.config import AllocationConfig, ResourceSpec
from npu_agent.config.schema import DraConfig
from npu_agent.kube.objects import DeviceClass
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.doctor.dra import resource_names
from npu_agent.people.doctor.report import to_fix
from npu_agent.typedjson import convert
from tests.people.doctor.helpers import RESOURCE, Break, Node, check_break, unserved

DRIVER = "npu.furiosa.ai"
REGISTRY, DIRECTORY = f"DRA registry of {DRIVER}", f"DRA directory of {DRIVER}"
SLICES, FEATURES = f"DRA slices of {DRIVER}", f"DRA features for {DRIVER}"
CLASS, POLICY = f"DeviceClass {DRIVER}", "policy npu-agent-own-slices"
RESOURCES = f"resource names of {DRIVER}"
LINES = ["DRA", REGISTRY, DIRECTORY, SLICES, FEATURES, CLASS, RESOURCES, POLICY]
OURS = "npu.furiosa.ai-0123456789ab-reg.sock"


@pytest.fixture
def claims(node: Node) -> Node:
    """The good node, where cards are offered by DRA."""
    kubelet = node.directory.parent
    (kubelet / "plugins_registry").mkdir()
    (kubelet / "plugins" / DRIVER).mkdir(parents=True)
    unserved(kubelet / "plugins_registry" / OURS)
    node.reconfigure(allocation=AllocationConfig(api="dra"))
    node.api.node["status"]["allocatable"][RESOURCE] = "0"
    node.api.classes = [named("whole", RESOURCE)]
    return node


def named(name: str, resource: str, created: str = "2026-11-22T07:00:00Z") -> dict[str, Any]:
    """A DeviceClass for a resource name."""
    selector = f'device.driver == "{DRIVER}"'
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {
            "extendedResourceName": resource,
            "selectors": [{"cel": {"expression": selector}}],
        },
    }


async def lines(node: Node) -> dict[str, tuple[State, str, str]]:
    return {
        name: (check.state, check.detail, check.remedy)
        for name, check in (await node.examined()).items()
        if name in LINES
    }


async def test_a_node_that_does_dra(claims: Node) -> None:
    found = await claims.examined()
    assert [name for name in found if name in LINES] == LINES
    assert {found[name].state for name in LINES} == {State.OK}, found
    assert "the kubelet is v1.36.3" in found["DRA"].detail
    assert found[SLICES].detail == "1, with 2 device(s)"
    assert "1 of our sockets" in found[REGISTRY].detail
    # The kubelet's device manager is to know of none of these cards.
    assert f"resource {RESOURCE}" not in found
    assert f"allocatable {RESOURCE}" not in found
    assert [check for check in found.values() if check.state is State.WRONG] == []


async def test_claims_need_a_place_for_cdi_specs(claims: Node) -> None:
    assert (await claims.examined())["CDI directory"].state is State.OK
    (claims.root / "var/run").mkdir(parents=True)
    (claims.root / "var/run/cdi").write_text("a file")
    found = (await claims.examined())["CDI directory"]
    assert found.state is State.WRONG
    assert found.remedy.endswith("k8s/components/dra")


async def test_where_the_config_wants_no_dra_nothing_is_asked(node: Node) -> None:
    found = await lines(node)
    assert found == {"DRA": (State.UNUSED, "allocation.api is device-plugin", "")}
    assert not [path for path in node.api.asked if "resource.k8s.io" in path]


async def test_a_family_by_dra_beside_one_by_the_device_plugin(claims: Node) -> None:
    by_dra = ResourceSpec(name="furiosa.ai/rngd", family="rngd", api="dra")
    claims.reconfigure(allocation=AllocationConfig(), resources=(by_dra,))
    found = await claims.examined()
    assert found["DRA"].state is State.OK
    assert f"resource {RESOURCE}" in found
    assert "resource furiosa.ai/rngd" not in found


async def test_counters_are_tried_where_cards_are_cut(claims: Node) -> None:
    counters = f"DRA counters for {DRIVER}"
    assert counters not in await claims.examined()
    claims.reconfigure(allocation=AllocationConfig(api="dra"), dra=DraConfig(partitions=True))
    assert (await claims.examined())[counters].state is State.OK
    dropped = ["devices.consumesCounters", "sharedCounters"]
    claims.reports(dra=[{"driver": DRIVER, "slices": {"dropped": dropped}}])
    found = (await claims.examined())[counters]
    assert found.state is State.NOTE
    assert "drops devices.consumesCounters, sharedCounters" in found.detail
    assert "turn on the feature gate DRAPartitionableDevices" in found.remedy


def no_dra(node: Node) -> None:
    node.api.serves_dra = False


def old_kubelet(node: Node) -> None:
    node.api.node["status"]["nodeInfo"]["kubeletVersion"] = "v1.33.9"


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (no_dra, "the API server does not serve resource.k8s.io/v1"),
        (old_kubelet, "this node's kubelet is v1.33.9, and DRA needs 1.34 or later"),
    ],
)
async def test_where_dra_cannot_be(claims: Node, do: Callable[[Node], None], why: str) -> None:
    do(claims)
    found = await lines(claims)
    assert found.keys() == {"DRA"}
    assert found["DRA"][:2] == (State.WRONG, f"impossible: {why}")
    claims.reconfigure(allocation=AllocationConfig(api="auto"))
    every = await claims.examined()
    assert every["DRA"].state is State.OK
    assert every["DRA"].detail.endswith(f"that is the device plugin: {why}")
    assert every[f"resource {RESOURCE}"].state is State.OK


def says(**values: object) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        for name, value in values.items():
            setattr(node.api, name, value)

    return do


def registers(name: str) -> Callable[[Node], None]:
    return lambda node: unserved(node.directory.parent / "plugins_registry" / name)


def no_registry(node: Node) -> None:
    registry = node.directory.parent / "plugins_registry"
    registry.rename(registry.with_name("elsewhere"))


def directory_is_a_file(node: Node) -> None:
    path = node.directory.parent / "plugins" / DRIVER
    path.rmdir()
    path.touch()


def still_plugged(node: Node) -> None:
    node.api.node["status"]["allocatable"][RESOURCE] = "3"


def nobody_serves(node: Node) -> None:
    node.lock.close()
    node.api.slices = {}


BREAKS = {
    "no registry": Break(no_registry, REGISTRY, "is missing", "mount the host's"),
    "a second driver": Break(
        registers(f"{DRIVER}-0d5a8e1c-1f3b-4d52-9d2e-0123456789ab-reg.sock"),
        REGISTRY,
        f"a second driver registers as {DRIVER}",
        "delete the vendor's DRA driver",
    ),
    "no directory": Break(directory_is_a_file, DIRECTORY, "is missing", "by the"),
    "somebody else's slices": Break(
        says(slices={"00000-npu.furiosa.ai-n1": 2, "n1-npu.furiosa.ai-x7k2p": 8}),
        SLICES,
        "n1-npu.furiosa.ai-x7k2p is not npu-agent's",
        "kubectl delete resourceslice n1-npu.furiosa.ai-x7k2p",
    ),
    "no slices": Break(says(slices={}), SLICES, "none, though an agent serves", "readiness"),
    "no slices, and nobody to write them": Break(
        nobody_serves,
        {SLICES: State.NOTE, "serving agent": State.NOTE},
        "none, and no npu-agent serves this node",
    ),
    "taints are dropped": Break(
        says(keeps_taints=False), {FEATURES: State.NOTE}, "drops devices.taints", "DRADeviceTaints"
    ),
    "no class": Break(says(device_class=404), CLASS, "missing", "components/dra"),
    "a class that may not be read": Break(
        says(device_class=403), {CLASS: State.UNUSED}, f"kubectl get deviceclass {DRIVER}"
    ),
    "an API server that fails": Break(says(device_class=500), {CLASS: State.UNKNOWN}, "500"),
    "classes that may not be read": Break(
        says(classes=403),
        {RESOURCES: State.UNUSED},
        "ask an administrator, the agent does not read it: npu-agent doctor",
    ),
    "two classes for a name": Break(
        says(classes=[named("whole", RESOURCE), named("new", RESOURCE, "2026-11-22T07:00:01Z")]),
        RESOURCES,
        f"{RESOURCE} is the resource name of new and whole: the scheduler takes new",
        "kubectl delete deviceclass NAME",
    ),
    "a name that a device plugin serves": Break(
        still_plugged,
        {RESOURCES: State.NOTE},
        f"a device plugin still offers 3 {RESOURCE} here",
        "the other device plugin that registers that name",
    ),
    "no policy": Break(
        says(policy=None), {POLICY: State.NOTE}, "may write slices of other nodes", "ServiceAccount"
    ),
    "another policy": Break(
        says(policy="of-somebody"), {POLICY: State.UNKNOWN}, "refused, and not by that policy"
    ),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_exactly_the_broken_line_turns(claims: Node, name: str) -> None:
    await check_break(claims, BREAKS[name])


async def test_sockets_of_others_are_none_of_ours(claims: Node) -> None:
    before = await lines(claims)
    for name in ("gpu.nvidia.com-reg.sock", f"{DRIVER}.example-reg.sock", f"x{DRIVER}-reg.sock"):
        registers(name)(claims)
    assert await lines(claims) == before


def judged(classes: list[dict[str, Any]], allocatable: dict[str, str]) -> Check:
    return resource_names(DRIVER, convert(classes, list[DeviceClass]), allocatable)


def test_of_several_classes_the_newest_counts_and_else_the_first_by_name() -> None:
    old, new = "2026-11-22T07:00:00Z", "2026-11-22T07:00:01Z"
    rivals = [named("c", RESOURCE, old), named("b", RESOURCE, new), named("a", RESOURCE, old)]
    found = judged(rivals, {})
    assert found.state is State.WRONG
    assert found.detail == f"{RESOURCE} is the resource name of a, b and c: the scheduler takes b"
    del rivals[1]
    assert judged(rivals, {}).detail.endswith("of a and c: the scheduler takes a")


def test_classes_of_others_are_none_of_ours() -> None:
    others = [named("gpu", "nvidia.com/gpu"), named("lure", "notfuriosa.ai/npu")]
    for one in others:
        one["spec"]["selectors"] = []
    twins = [*others, *others]
    assert judged(twins, {"nvidia.com/gpu": "8"}).state is State.UNUSED
    assert judged([*twins, named("own", RESOURCE)], {}).state is State.OK


async def test_on_the_host_the_policy_is_not_judged(claims: Node) -> None:
    claims.context = replace(claims.context, in_pod=False)
    assert (await lines(claims))[POLICY][0] is State.UNUSED


@pytest.mark.parametrize("api", ["dra", "auto"])
async def test_without_an_answer_of_the_api_server_only_the_host_is_judged(
    claims: Node, api: str
) -> None:
    claims.reconfigure(allocation=AllocationConfig(api=api))  # type: ignore[arg-type]
    claims.api.refusal = 503
    found = await lines(claims)
    good = {name for name in found if found[name][0] is State.OK}
    assert good == {REGISTRY, DIRECTORY}
    assert {found[name][0] for name in LINES if name not in good} == {State.UNKNOWN}
    assert State.OK not in {
        check.state for name, check in (await claims.examined()).items() if name == POLICY
    }


async def test_without_a_name_of_the_node(claims: Node) -> None:
    claims.context = replace(claims.context, node_name=None)
    found = await lines(claims)
    for name in ("DRA", SLICES, FEATURES):
        assert found[name][:2] == (State.UNKNOWN, "NODE_NAME is not set")


@pytest.mark.parametrize("api", ["dra", "auto"])
async def test_all_missing_rights_are_one_thing_to_fix(claims: Node, api: Any) -> None:
    """As after the ClusterRoleBinding was deleted; what follows from that is folded."""
    claims.reconfigure(allocation=AllocationConfig(api=api))
    claims.api.rights.clear()
    claims.api.denied = {
        ("get", "resourceclaims"),
        *((verb, "resourceslices") for verb in ("list", "watch", "create", "patch", "delete")),
    }
    claims.reports(unready=["cannot list ResourceSlices: forbidden"])
    found = to_fix((await claims.examined()).values())
    assert [one.name for one in found] == ["rights"]
    assert found[0].detail == (
        "missing: nodes (get, watch, patch), events (create, patch), resourceclaims (get), "
        "resourceslices (list, watch, create, patch, delete)"
    )
    assert "add k8s/components/dra (Helm: dra.enabled)" in found[0].remedy


@pytest.mark.usefixtures("bound")
async def test_claims_and_slices_are_read_as_the_node_too(claims: Node) -> None:
    """As with the component dra behind impersonation, which has to be the last."""
    claims.api.rights.add(("impersonate-on:associated-node:get", "nodes"))
    claims.api.rights.add(("impersonate-on:associated-node:list", "nodes"))
    claims.api.rights.add(("impersonate-on:associated-node:watch", "nodes"))
    claims.api.denied = {
        ("impersonate-on:associated-node:get", "resourceclaims"),
        ("impersonate-on:associated-node:list", "resourceslices"),
    }
    assert (await claims.examined())["rights"].detail == (
        "missing: resourceclaims (impersonate-on:associated-node:get), "
        "resourceslices (impersonate-on:associated-node:list)"
    )


async def test_rights_for_dra_are_not_asked_for_where_it_cannot_be(claims: Node) -> None:
    claims.api.denied = {("get", "resourceclaims")}
    assert (await claims.examined())["rights"].detail == "missing: resourceclaims (get)"
    old_kubelet(claims)
    assert (await claims.examined())["rights"].state is State.OK
