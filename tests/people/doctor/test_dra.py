"""The lines on DRA: a node that does it, and one thing after the other broken on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu_agent.config.schema import AllocationConfig
from npu_agent.people.doctor.check import State
from npu_agent.people.simulator.apiserver import NODES
from tests.kube.helpers import status
from tests.people.doctor.helpers import NODE_NAME, Break, Node, check_break, unserved

DRIVER = "npu.furiosa.ai"
REGISTRY, DIRECTORY = f"DRA registry of {DRIVER}", f"DRA directory of {DRIVER}"
SLICES = f"DRA slices of {DRIVER}"
LINES = ["DRA", REGISTRY, DIRECTORY, SLICES]
OURS = "npu.furiosa.ai-0123456789ab-reg.sock"


@pytest.fixture
def claims(node: Node) -> Node:
    """The good node, where cards are offered by DRA."""
    kubelet = node.directory.parent
    (kubelet / "plugins_registry").mkdir()
    (kubelet / "plugins" / DRIVER).mkdir(parents=True)
    unserved(kubelet / "plugins_registry" / OURS)
    node.reconfigure(allocation=AllocationConfig(api="dra"))
    return node


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
    assert [check for check in found.values() if check.state is State.WRONG] == []


async def test_where_the_config_wants_no_dra_nothing_is_asked(node: Node) -> None:
    found = await lines(node)
    assert found == {"DRA": (State.UNUSED, "allocation.api is device-plugin", "")}
    assert not [path for path in node.api.asked if "resource.k8s.io" in path]


def old_kubelet(node: Node) -> None:
    node.api.objects[NODES][NODE_NAME]["status"]["nodeInfo"]["kubeletVersion"] = "v1.33.9"


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda node: node.api.groups.clear(), "the API server does not serve resource.k8s.io/v1"),
        (old_kubelet, "this node's kubelet is v1.33.9, and DRA needs 1.34 or later"),
    ],
    ids=["no API", "an old kubelet"],
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


def registers(name: str) -> Callable[[Node], None]:
    return lambda node: unserved(node.directory.parent / "plugins_registry" / name)


def no_registry(node: Node) -> None:
    registry = node.directory.parent / "plugins_registry"
    registry.rename(registry.with_name("elsewhere"))


def directory_is_a_file(node: Node) -> None:
    path = node.directory.parent / "plugins" / DRIVER
    path.rmdir()
    path.touch()


def nobody_serves(node: Node) -> None:
    node.lock.close()
    node.api.delete()


BREAKS = {
    "no registry": Break(no_registry, REGISTRY, "is missing", "mount the host's"),
    "a second driver": Break(
        registers(f"{DRIVER}-0d5a8e1c-1f3b-4d52-9d2e-0123456789ab-reg.sock"),
        REGISTRY,
        f"a second driver registers as {DRIVER}",
        "delete the vendor's DRA driver",
    ),
    "no directory": Break(directory_is_a_file, DIRECTORY, "is not a directory", "by the"),
    "somebody else's slices": Break(
        lambda node: node.api.publish("n1-npu.furiosa.ai-x7k2p", 8),
        SLICES,
        "n1-npu.furiosa.ai-x7k2p is not npu-agent's",
        "kubectl delete resourceslice n1-npu.furiosa.ai-x7k2p",
    ),
    "somebody else's pool": Break(
        lambda node: node.api.put(
            "x7k2p",
            driver=DRIVER,
            pool={"name": "theirs", "generation": 1, "resourceSliceCount": 1},
        ),
        SLICES,
        "x7k2p is not npu-agent's",
        "kubectl delete resourceslice x7k2p",
    ),
    "no slices": Break(
        lambda node: node.api.delete(), SLICES, "none, though an agent serves", "its log"
    ),
    "no slices, and nobody to write them": Break(
        nobody_serves,
        {SLICES: State.NOTE, "serving agent": State.NOTE},
        "none, and no npu-agent serves this node",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_exactly_the_broken_line_turns(claims: Node, name: str) -> None:
    await check_break(claims, BREAKS[name])


async def test_without_an_answer_of_the_api_server_only_the_host_is_judged(claims: Node) -> None:
    claims.api.trouble = status(503, "no")
    found = await lines(claims)
    good = {name for name in found if found[name][0] is State.OK}
    assert good == {REGISTRY, DIRECTORY}
    assert found["DRA"][0] is State.UNKNOWN
    assert SLICES not in found


async def test_all_missing_rights_are_one_thing_to_fix(claims: Node) -> None:
    """As after the ClusterRoleBinding was deleted."""
    claims.api.rights.clear()
    claims.api.denied = {
        ("get", "resourceclaims"),
        *((verb, "resourceslices") for verb in ("list", "watch", "create", "patch", "delete")),
    }
    found = [one for one in (await claims.examined()).values() if one.state is State.WRONG]
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
