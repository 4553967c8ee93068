"""The component impersonation (KEP-5284) on a real API server: what a stolen token is worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.api import ACCOUNT, ADMIN, MERGE, Asked, ask, delete_dra, is_policy, refusal
from tests.e2e.doctor import checks
from tests.e2e.dra.claims import claim_of, prepared, run, running, said, slices, verified
from tests.e2e.manifests import (
    ONE,
    Thing,
    claim,
    claim_pod,
    container,
    pod,
    resource_slice,
    template,
    thing,
)
from tests.e2e.node import NAMESPACE, PROJECT, SOON, Node
from tests.k8s.tools import overlay

pytestmark = [pytest.mark.one_kubelet, pytest.mark.since("1.36")]
OTHER = "other-node"
COUNT = "beta.furiosa.ai/npu.count"
TYPE = "furiosa.ai/NPUReady"
CONFIG = {"health": {"condition": {"type": TYPE}}, "allocation": {"api": "dra"}}
NODES = "/api/v1/nodes"
WATCH = f"{NODES}?watch=true&resourceVersion=0&timeoutSeconds=1"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CORE = "/api/v1/namespaces/default"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
JSON = "application/json"
COMPONENTS = ("dra", "node-condition")

Rights = dict[str, list[Thing]]
"""By mode: the roles and their bindings."""


@pytest.fixture(scope="module", autouse=True)
def rights(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    """The agent serves claims and writes its condition, with the component; another Node."""
    directory = tmp_path_factory.mktemp("overlay")
    without = overlay(directory, COMPONENTS)
    evicting = overlay(directory, [*COMPONENTS, "impersonation", "eviction"])
    rendered = overlay(directory, [*COMPONENTS, "impersonation"])
    node.deploy(CONFIG, str(directory))
    theirs = thing("Node", OTHER, namespace=""), resource_slice("theirs", OTHER, [{"name": "n"}])
    node.apply([*theirs, claim("theirs"), template(ONE)])
    yield {
        "policies": [one for one in without if one["kind"].startswith("ClusterRole")],
        "impersonation": [one for one in rendered if is_right(one)],
        "eviction": [one for one in evicting if is_right(one)],
    }
    node.configure_and_restart({"allocation": {"api": "device-plugin"}})
    node.wait_equal("its slices to be gone", lambda: slices(node), [], 4 * SOON)
    node.wait_for("the condition to be gone", lambda: TYPE not in node.conditions())
    node.kubectl("delete", "node", OTHER)
    node.kubectl("delete", "resourceslice", "theirs", "--ignore-not-found")
    node.kubectl("delete", "-n=default", "resourceclaim/theirs", f"resourceclaimtemplate/{ONE}")
    delete_dra(node, rendered)
    node.deploy()


def is_right(made: Thing) -> bool:
    """Whether it gives the agent a right, or takes one."""
    return is_policy(made) or str(made["kind"]).startswith("ClusterRole")


@pytest.fixture
def pods(node: Node) -> None:
    """A Pod with a claim on this Node, and one on the other."""
    run(node, claim_pod("mine"))
    node.apply(pod("theirs", container(), nodeName=OTHER))


def reads(node: Node) -> dict[str, Any] | None:
    """As whom the agent reads, by its status page."""
    found: dict[str, Any] | None = json.loads(node.page("/status.json"))["reads"]
    return found


def answers(node: Node, token: str, attack: Asked) -> set[int]:
    """The HTTP statuses for the account, its Node, another Node, and an administrator."""
    users = ("", f"system:node:{node.name}", f"system:node:{OTHER}", "admin")
    return {ask(node, token, *attack, user=user).status for user in users}


def promised(mode: str) -> dict[str, bool]:
    """What a stolen token reads in a mode, by the table of docs/security.md."""
    lines = (PROJECT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    start = next(at for at, one in enumerate(lines) if one.startswith("| a stolen token reads"))
    modes = [cell.strip(" `") for cell in lines[start].split("|")]
    found: dict[str, bool] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        cells = [cell.strip(" *") for cell in line.split("|")]
        found[cells[1]] = cells[modes.index(mode)].startswith("yes")
    raise AssertionError("the table has no end")


def check_reads(node: Node, token: str, mode: str) -> None:
    """A stolen token reads what the table says, and nothing else."""
    own = f"{SLICES}?fieldSelector=spec.nodeName="
    paths = {
        "its own Node and, with `dra`, its slices and claims": [
            f"{NODES}/{node.name}",
            f"{WATCH}&fieldSelector=metadata.name={node.name}",
            own + node.name,
            f"{CLAIMS}/{claim_of(node, 'mine')['metadata']['name']}",
        ],
        "all other Nodes and, with `dra`, all slices, and any claim by its name": [
            WATCH,
            f"{NODES}/{OTHER}",
            f"{WATCH}&fieldSelector=metadata.name={OTHER}",
            SLICES,
            own + OTHER,
            f"{CLAIMS}/theirs",
        ],
        "Pods, Secrets, ConfigMaps": [
            "/api/v1/pods",
            f"/api/v1/pods?fieldSelector=spec.nodeName={node.name}",
            *(f"{CORE}/{kind}" for kind in ("pods", "secrets", "configmaps")),
            *(f"{CORE}/{one}" for one in ("pods/mine", "pods/theirs", "pods/theirs/log")),
            f"{CORE}/configmaps/kube-root-ca.crt",
            f"{CORE}/secrets/any",
        ],
    }
    table = promised(mode)
    assert table.keys() == paths.keys()
    for row, of_row in paths.items():
        for path in of_row:
            statuses = answers(node, token, ("GET", path, None, JSON))
            assert statuses == ({200, 403} if table[row] else {403}), (mode, path)


def attacks(node: Node) -> Iterator[Asked]:
    """Each is refused in both modes, whoever is impersonated; test_policies.py has more."""
    for name in (node.name, OTHER):
        yield "PATCH", f"{NODES}/{name}", {"metadata": {"labels": {"a": "b"}}}, MERGE
        yield "PATCH", f"{NODES}/{name}/status", {"status": {"addresses": []}}, MERGE
        yield "DELETE", f"{NODES}/{name}", None, JSON
        yield "GET", f"{NODES}/{name}/proxy/pods", None, JSON
    yield "PATCH", f"{NODES}/{OTHER}", {"metadata": {"labels": {COUNT: "9"}}}, MERGE
    yield "POST", NODES, thing("Node", "new", namespace=""), JSON
    yield "GET", NODES, None, JSON
    yield "POST", SLICES, resource_slice("new", OTHER, [{"name": "n"}]), JSON
    yield "PATCH", f"{SLICES}/theirs", {"spec": {"pool": {"generation": 2}}}, MERGE
    yield "DELETE", SLICES, None, JSON
    yield "GET", CLAIMS, None, JSON
    for claimed in ("theirs", claim_of(node, "mine")["metadata"]["name"]):
        yield "PATCH", f"{CLAIMS}/{claimed}/status", {"status": {"devices": []}}, MERGE
        yield "DELETE", f"{CLAIMS}/{claimed}", None, JSON
    for name in ("mine", "theirs"):
        yield "PATCH", f"{CORE}/pods/{name}/status", {"status": {"phase": "Failed"}}, MERGE
        yield "DELETE", f"{CORE}/pods/{name}", None, JSON
        yield "POST", f"{CORE}/pods/{name}/eviction", thing("Eviction", name, "policy/v1"), JSON
        yield "GET", f"{CORE}/pods/{name}/exec?command=id&stdout=1", None, JSON
    yield "POST", f"{CORE}/pods", pod("new", container(), nodeName=node.name), JSON
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    yield "POST", path, {"spec": {}}, JSON
    where = {"apiVersion": "v1", "kind": "Node", "name": OTHER}
    event = thing("Event", "x", involvedObject=where, reason="x", message="x", type="Normal")
    yield "POST", f"{CORE}/events", event, JSON


def check_attacks(node: Node, token: str) -> None:
    for attack in attacks(node):
        assert answers(node, token, attack) == {403}, attack


def test_the_agent_works_whole_as_its_node(node: Node) -> None:
    def whole() -> bool:
        assert node.labels()[COUNT] == "2"
        assert node.conditions()[TYPE]["status"] == "True"
        return reads(node) == {"as_node": True, "refusal": ""} and bool(slices(node))

    node.wait_for("labels, condition and slices", whole)
    node.label({COUNT: None})  # which it sees by its watch
    node.wait_for("the label to be put back", whole)
    lines = {one["name"]: one for one in checks(node)}
    assert lines["API server"]["detail"].endswith("reads as its Node (constrained impersonation)")
    assert lines["rights"]["state"] == "ok", lines["rights"]


def test_a_claim_is_prepared_and_unprepared_and_then_gone(node: Node, token: str) -> None:
    run(node, claim_pod("mine"))
    verified(node, "mine", 1)
    name = claim_of(node, "mine")["metadata"]["name"]
    assert prepared(node) == {f"default/{name}"}
    node.delete_pods("mine")
    node.wait_equal("the claim to be unprepared", lambda: prepared(node), set())

    def gone() -> bool:
        """As for a claim of another node: a Node is not told which of them there are."""
        answer = ask(node, token, "GET", f"{CLAIMS}/{name}", user=f"system:node:{node.name}")
        return "no relationship found between node" in refusal(answer)

    node.wait_for("the claim to be gone", gone)


@pytest.mark.usefixtures("pods")
def test_a_stolen_token_is_worth_its_own_node(node: Node, token: str) -> None:
    check_reads(node, token, "impersonation")
    check_attacks(node, token)


def pod_event(host: str) -> Asked:
    """An Event about a Pod, which the agent of that node says that it is from."""
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "mine"}
    source = {"component": ACCOUNT, "host": host}
    event = thing("Event", "x", involvedObject=about, source=source, reason="x", message="x")
    return "POST", f"{CORE}/events", {**event, "type": "Warning"}, JSON


@pytest.mark.usefixtures("pods")
def test_with_the_component_eviction_a_stolen_token_evicts_pods_of_its_node_and_no_others(
    node: Node, token: str, rights: Rights
) -> None:
    mine = f"system:node:{node.name}"

    def status(attack: Asked, user: str = mine) -> int:
        return ask(node, token, *attack, user=user).status

    def evict(name: str) -> Asked:
        body = thing("Eviction", name, "policy/v1")
        return "POST", f"{CORE}/pods/{name}/eviction", body, JSON

    def read(name: str) -> Asked:
        return "GET", f"{CORE}/pods/{name}", None, JSON

    assert status(pod_event(node.name), "") == 403
    node.apply(rights["eviction"])
    try:
        node.wait_equal("the right to evict", lambda: status(evict("mine")), 201)
        node.wait_equal("Events about Pods", lambda: status(pod_event(node.name), ""), 201)

        assert status(read("mine")) == 200
        answer = ask(node, token, *evict("theirs"), user=mine)
        assert "can only evict pods with spec.nodeName set to itself" in refusal(answer)
        assert status(read("theirs")) == 403
        assert status(pod_event(OTHER), "") == 403
        for user in ("", f"system:node:{OTHER}", "admin"):
            for name in ("mine", "theirs"):
                assert status(evict(name), user) == status(read(name), user) == 403

        theirs = {"/pods/mine/eviction", "/pods/theirs/eviction"}
        for attack in attacks(node):
            if not any(attack[1].endswith(path) for path in theirs):
                assert answers(node, token, attack) == {403}, attack
        for path in ("/api/v1/pods", f"{CORE}/secrets", f"{CORE}/configmaps"):
            assert answers(node, token, ("GET", path, None, JSON)) == {403}

        assert ask(node, token, *evict("mine"), real=True, user=mine).status == 201
        node.wait_for(
            "the Pod to be evicted", lambda: ask(node, ADMIN, *read("mine")).status == 404
        )
    finally:
        node.apply(rights["impersonation"])


def test_api_servers_before_1_36_have_the_agent_read_by_its_own_rights(
    node: Node, token: str, rights: Rights
) -> None:
    """What `rbac.mode: auto` installs there; their features, APIs and gates are emulated."""

    def emulate(version: str) -> str:
        """Restarts the API server as one of this version; returns as whom the agent reads."""
        node.cluster.stop_api_server()
        node.cluster.start_api_server(f"--emulated-version={version}")
        node.delete_pods()
        node.apply([claim_pod("mine"), pod("theirs", container(), nodeName=OTHER)])
        running(node, "mine", timeout=4 * SOON)
        (line,) = (one["detail"] for one in checks(node) if one["name"] == "API server")
        return line.partition("; reads as its ")[2].partition(" ")[0]

    agent = node.agent_run()
    node.apply(rights["policies"])
    try:
        assert emulate("1.35") == "account"
        check_reads(node, token, "policies")
        check_attacks(node, token)
        node.apply(rights["impersonation"])
        assert emulate("1.36") == "Node"
    finally:
        node.apply(rights["impersonation"])
        node.cluster.stop_api_server()
        node.cluster.start_api_server()
    assert node.agent_run() == agent


@pytest.mark.usefixtures("pods")
def test_rights_are_taken_and_others_given_while_it_runs(
    node: Node, token: str, rights: Rights
) -> None:
    agent = node.agent_run()
    bindings = [each for each in rights["policies"] if each["kind"] == "ClusterRoleBinding"]
    for each in bindings:
        node.kubectl("delete", "clusterrolebinding", each["metadata"]["name"])
    node.apply(claim_pod("late"))
    said(node, "late", "has no right to get resourceclaims")
    verified(node, "mine", 1)

    node.apply(rights["policies"])
    running(node, "late", timeout=3 * SOON)
    found = reads(node)
    assert found is not None
    assert not found["as_node"]
    assert "cannot impersonate" in found["refusal"]
    assert "own rights" in node.log()
    check_reads(node, token, "policies")

    name = claim_of(node, "mine")["metadata"]["name"]
    node.delete_pods("late")  # after which the kubelet of a busy node takes its time
    node.wait_equal("its claim to be unprepared", lambda: prepared(node), {f"default/{name}"})
    node.apply(rights["impersonation"])
    node.apply(claim_pod("last"))
    running(node, "last", timeout=3 * SOON)
    assert reads(node) == {"as_node": True, "refusal": ""}
    assert node.agent_run() == agent
