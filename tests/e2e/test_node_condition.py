"""The Node condition on a real API server, written with the agent's own token and rights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.api import APPLY, MERGE, Asked, ask, is_policy, refusal
from tests.e2e.manifests import thing
from tests.e2e.node import Node
from tests.k8s.tools import overlay

pytestmark = pytest.mark.one_kubelet
TYPE = "furiosa.ai/NPUReady"
STRATEGIC = "application/strategic-merge-patch+json"
CONFIG = {"health": {"condition": {"type": TYPE}}}
CARDS = ("npu0", "npu1")


@pytest.fixture(scope="module", autouse=True)
def component(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The agent is deployed with the component."""
    directory = tmp_path_factory.mktemp("overlay")
    rendered = overlay(directory, ["node-condition"])
    node.deploy(CONFIG, str(directory))
    yield
    node.configure({})
    node.wait_for("the condition to be removed", lambda: not condition(node))
    for made in rendered:
        if is_policy(made):
            node.kubectl("delete", made["kind"], made["metadata"]["name"])
    node.deploy()


@pytest.fixture(autouse=True)
def ready(node: Node) -> Iterator[None]:
    """Each test begins with a Node that is ready, and leaves all cards well."""
    says(node, "True", "NPUsReady")
    yield
    node.fault("ok", *CARDS)


def condition(node: Node) -> dict[str, Any]:
    """Ours; empty if there is none."""
    return node.conditions().get(TYPE, {})


def says(node: Node, status: str, reason: str, timeout: float = 60.0) -> dict[str, Any]:
    def found() -> dict[str, Any]:
        one = condition(node)
        assert (one.get("status"), one.get("reason")) == (status, reason), one
        return one

    return node.wait_for(f"{TYPE} to be {status}", found, timeout)


def others(node: Node) -> set[tuple[str, str, str]]:
    """The kubelet's conditions, but for its heartbeat."""
    return {
        (type_, one["status"], one["lastTransitionTime"])
        for type_, one in node.conditions().items()
        if type_ != TYPE
    }


def test_a_fault_a_second_reason_a_new_agent_and_the_way_back(node: Node) -> None:
    first, kubelets = condition(node), others(node)
    assert first["message"] == "2 of 2 cards are healthy"
    began = time.monotonic()
    node.fault("dead", "npu0")
    failed = says(node, "False", "CardUnhealthy", 10.0)
    print(f"from the fault to False: {time.monotonic() - began:.1f} s")
    assert failed["message"].startswith("1 of 2 cards are healthy; npu0: the driver reports")
    since = failed["lastTransitionTime"]
    assert since > first["lastTransitionTime"]

    node.fault("dead", "npu1")
    node.wait_for("the second reason", lambda: "npu0, npu1" in condition(node)["message"])
    before = node.agent_run()
    node.kill_agent()
    node.wait_restarted(before)
    node.restart()
    assert condition(node)["lastTransitionTime"] == since
    assert condition(node)["status"] == "False"

    began = time.monotonic()
    node.fault("ok", *CARDS)
    back = says(node, "True", "NPUsReady")
    print(f"from the recovery to True: {time.monotonic() - began:.1f} s")
    assert back["lastTransitionTime"] > since
    assert others(node) == kubelets


WORK = "MaintenanceInProgress"


def test_work_that_is_under_way_is_said(node: Node) -> None:
    """The kubelet knows nothing of KEP-5683 yet: a person sets the condition."""

    def says_work(*words: str) -> bool:
        found, page = condition(node)["message"], node.page("/metrics")
        assert found.partition("the Node is under maintenance: ")[2] == ", ".join(words), found
        assert f"npu_agent_node_maintenance {int(bool(words))}" in page.splitlines()
        return True

    node.kubectl("cordon", node.name)
    try:
        patched(node, of_type(WORK, "True"))
        node.wait_for("both", lambda: says_work(WORK, "the Node is cordoned"))
        node.kubectl("uncordon", node.name)
        patched(node, of_type(WORK, "False"))
        node.wait_for("the end of the work", says_work)
    finally:
        node.kubectl("uncordon", node.name)
        patched(node, {"status": {"conditions": [{"type": WORK, "$patch": "delete"}]}})


def patched(node: Node, body: dict[str, Any]) -> None:
    """Changes the Node's status as an administrator."""
    patch = ("--type=strategic", "--patch", json.dumps(body))
    node.kubectl("patch", "node", node.name, "--subresource=status", *patch)


# --- attacks with the agent's token -------------------------------------------------------------


def status(node: Node, body: dict[str, Any], kind: str = STRATEGIC) -> Asked:
    forced = "&force=true" if kind == APPLY else ""
    return "PATCH", f"/api/v1/nodes/{node.name}/status?fieldManager=attack{forced}", body, kind


def of_type(type_: str, status: str = "False", **more: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": type_, "status": status, **more}]}}


def test_an_agent_may_write_its_own_condition(node: Node, token: str) -> None:
    applied = {**thing("Node", node.name, namespace=""), **of_type(TYPE, "Unknown")}
    for asked in (
        status(node, of_type(TYPE)),
        status(node, {"status": {"conditions": [{"type": TYPE, "$patch": "delete"}]}}),
        status(node, applied, APPLY),
    ):
        answer = ask(node, token, *asked)
        assert answer.status == 200, answer


OURS_AND_READY = [*of_type(TYPE)["status"]["conditions"], {"type": "Ready", "status": "False"}]
FOREIGN: tuple[dict[str, Any], ...] = (
    {"status": {"capacity": {"furiosa.ai/x": "1"}}},
    {"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.9"}]}},
    of_type("Ready"),
    of_type("example.com/New"),
    of_type("Ready", "True", message="x"),
    {"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}},
    {"status": {"conditions": OURS_AND_READY}},
)


def test_an_agent_may_write_nothing_else_of_its_nodes_status(node: Node, token: str) -> None:
    attacks = [status(node, body) for body in FOREIGN]
    attacks.append(status(node, of_type(TYPE), MERGE))  # a list in place of all
    for asked in attacks:
        message = refusal(ask(node, token, *asked))
        assert "'npu-agent-own-node'" in message, asked
        assert f"may change the condition {TYPE} of its Node and nothing else of its" in message
    path = f"/api/v1/nodes/{node.name}/status"
    replaced = ask(node, token, "PUT", path, node.get("node", node.name))
    assert "cannot update resource" in refusal(replaced)


def test_fields_outside_the_status_stay_by_this_way_too(node: Node, token: str) -> None:
    taints = [{"key": "furiosa.ai/x", "effect": "NoExecute"}]
    for spec in ({"taints": taints}, {"unschedulable": True}):
        answer = ask(node, token, *status(node, {"spec": spec}))
        assert (answer.status, answer.body["spec"]) == (200, node.get("node", node.name)["spec"])
    labels = {"metadata": {"labels": {"kubernetes.io/hostname": "x"}}}
    assert "not kubernetes.io/hostname" in refusal(ask(node, token, *status(node, labels)))
