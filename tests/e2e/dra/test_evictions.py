"""A card dies, and its Pod and no other one is evicted, whichever way it got the card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.dra.claims import CONFIG, prepared, run, seen, taints
from tests.e2e.dra.conftest import OVERLAY, published
from tests.e2e.manifests import (
    DRIVER,
    Thing,
    container,
    deployment,
    pod,
    small,
    thing,
)
from tests.e2e.node import NAMESPACE, SOON, Node
from tests.k8s.tools import overlay

pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("classes", "evicting")]
PLUGIN = "beta.furiosa.ai/by-plugin"
"""The resource by which npu0 and npu1 are handed out; the others are DRA's."""
BY_NAME = "furiosa.ai/rngd"
"""The resource by which the scheduler makes a claim that is not in the Pod's spec."""
AFTER = 4
EVICTING: dict[str, Any] = {
    "resources": [
        {"name": PLUGIN, "family": "warboy", "api": "device-plugin"},
        {"name": "beta.furiosa.ai/rngd", "family": "rngd", "api": "dra"},
    ],
    "health": {"evict": True, "evictAfter": AFTER},
}


@pytest.fixture(scope="module")
def evicting(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The agent may evict the Pods of its Node, and serves both APIs."""
    directory = tmp_path_factory.mktemp("overlay")
    overlay(directory, ["dra", "impersonation", "eviction"])
    node.deploy(EVICTING, str(directory))
    node.wait_equal("the device plugin's cards", lambda: node.allocatable(PLUGIN), 2)
    yield
    node.deploy(CONFIG, OVERLAY)
    published(node)


@pytest.fixture
def tidy(node: Node) -> Callable[[], None]:
    """Leaves no workloads, and nothing prepared."""

    def tidy() -> None:
        for kind in ("deployments", "statefulsets", "jobs", "poddisruptionbudgets"):
            node.kubectl("delete", kind, "--all", "--namespace", "default")
        node.delete_pods()
        node.kubectl("delete", "resourceclaims", "--all", "--namespace", "default")
        node.wait_equal("no claim to be prepared", lambda: prepared(node), set())
        node.wait_equal("healthy cards", lambda: node.allocatable(PLUGIN), 2)

    return tidy


@pytest.fixture
def bystanders(node: Node) -> Iterator[None]:
    """Pods on healthy cards, which are the same Pods after the test."""
    run(node, small("by-claim"), pod("by-name", container(limits={BY_NAME: "1"})))
    names = ("by-claim", "by-name")
    before = {name: node.pod(name)["metadata"]["uid"] for name in names}
    yield
    after = {name: node.pod(name) for name in names}
    assert {name: each["metadata"]["uid"] for name, each in after.items()} == before
    assert not any("deletionTimestamp" in each["metadata"] for each in after.values())


def of_app(node: Node, app: str) -> list[dict[str, Any]]:
    """The Pods of a workload that do not end."""
    return [
        each
        for each in node.objects("pod", "default")
        if each["metadata"].get("labels", {}).get("app") == app
        and "deletionTimestamp" not in each["metadata"]
        and each["status"]["phase"] == "Running"
    ]


def holder(node: Node, app: str) -> tuple[str, str, int]:
    """Name and UID of the one Pod of a workload that runs, and the number of its card."""
    node.wait_for(f"{app} to run", lambda: bool(of_app(node, app)), 2 * SOON)
    (found,) = of_app(node, app)
    name = found["metadata"]["name"]
    node.wait_known(name)
    (card,) = seen(node, name).cards
    return name, found["metadata"]["uid"], card


def events(node: Node) -> list[dict[str, Any]]:
    """The Events about Pods that the agent evicted."""
    return [
        each
        for each in node.objects("event", "default")
        if each["reason"] == "PodEvicted" and each["involvedObject"]["kind"] == "Pod"
    ]


def waits(node: Node) -> list[str]:
    """What is said of Pods that are not evicted yet."""
    problems = json.loads(node.page("/status.json"))["problems"]
    return [each["text"] for each in problems if each["kind"] == "EvictionWaits"]


def runs_again(node: Node, uid: str, app: str, timeout: float = 2 * SOON) -> None:
    """Waits until the workload runs in another Pod."""

    def again() -> bool:
        return bool({each["metadata"]["uid"] for each in of_app(node, app)} - {uid})

    node.wait_for(f"{app} to run again", again, timeout)


def evicted(node: Node, uid: str, app: str, card: int, timeout: float = 2 * SOON) -> None:
    """Waits until the workload runs again, in another Pod and on another card."""
    runs_again(node, uid, app, timeout)
    _, other_uid, other = holder(node, app)
    assert other_uid != uid
    assert other != card


def of_deployment(name: str = "serves") -> Thing:
    return deployment(name, container(limits={PLUGIN: "1"}))


def of_stateful_set(name: str = "keeps") -> Thing:
    made = deployment(name, container(limits={BY_NAME: "1"}))
    return {**made, "kind": "StatefulSet"}


def of_job(name: str = "trains") -> Thing:
    """A Job that fails with its first Pod, unless that was evicted."""
    made = small(name)
    spec = {**made["spec"], "restartPolicy": "Never"}
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    evictions = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [{"action": "Ignore", "onPodConditions": evictions}]
    return thing(
        "Job",
        name,
        "batch/v1",
        spec={"backoffLimit": 0, "podFailurePolicy": {"rules": rules}, "template": template},
    )


def messages(node: Node, uid: str) -> list[str]:
    """What the Events about a Pod that the agent evicted say."""
    return [each["message"] for each in events(node) if each["involvedObject"]["uid"] == uid]


def tainted(node: Node, uid: str) -> bool:
    """Whether the taint's controller marked the Pod; since 1.37 also one with such a resource."""
    return any(
        each["reason"] == "DeviceTaintManagerEviction" and each["involvedObject"]["uid"] == uid
        for each in node.objects("event", "default")
    )


def asked(node: Node, name: str) -> list[dict[str, Any]]:
    """The API server's audit of requests for a Pod's eviction: who asked as whom, the answer."""
    found = [
        {
            "user": each["user"]["username"],
            "as": each.get("impersonatedUser", {}).get("username"),
            "code": each["responseStatus"]["code"],
        }
        for each in node.cluster.audit()
        if each.get("objectRef", {}).get("subresource") == "eviction"
        and each["objectRef"]["name"] == name
    ]
    print(name, json.dumps(found))
    return found


@pytest.mark.usefixtures("bystanders")
@pytest.mark.parametrize(
    "made", [of_deployment(), of_stateful_set()], ids=["device plugin", "extended resource"]
)
def test_the_pod_of_a_dead_card_runs_again_on_a_healthy_one(
    node: Node, kill: Callable[[int], None], made: Thing
) -> None:
    app = made["metadata"]["name"]
    node.apply(made)
    name, uid, card = holder(node, app)
    kill(card)
    evicted(node, uid, app, card)
    if app == "keeps" and tainted(node, uid):  # the cluster's controller was first
        return
    node.wait_for("an Event on the Pod", lambda: bool(messages(node, uid)))
    (message,) = messages(node, uid)
    assert message.startswith(f"its card npu{card} failed ")
    (request,) = asked(node, name)
    assert request == {
        "user": f"system:serviceaccount:{NAMESPACE}:npu-agent",
        "as": f"system:node:{node.name}",
        "code": 201,
    }


@pytest.mark.usefixtures("bystanders")
def test_a_job_by_a_claim_is_evicted_by_its_taint_and_has_not_failed(
    node: Node, kill: Callable[[int], None]
) -> None:
    node.apply(of_job())
    name, uid, card = holder(node, "trains")
    kill(card)
    evicted(node, uid, "trains", card)
    assert taints(node, card) == {f"{DRIVER}/unhealthy": "NoExecute"}
    assert not node.get("job", "trains", "default")["status"].get("failed")
    assert asked(node, name) == [], "the taint's controller was first"


@pytest.mark.usefixtures("bystanders")
def test_a_budget_is_heeded_and_named(node: Node, kill: Callable[[int], None]) -> None:
    node.apply(of_deployment())
    budget = {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "serves"}}}
    node.apply(thing("PodDisruptionBudget", "keeps-all", "policy/v1", spec=budget))
    name, uid, card = holder(node, "serves")
    kill(card)
    node.wait_for(
        "the budget to be named", lambda: any("keeps-all" in text for text in waits(node))
    )
    (again, same, _) = holder(node, "serves")
    assert (again, same) == (name, uid)
    node.kubectl("delete", "poddisruptionbudget", "keeps-all", "--namespace", "default")
    evicted(node, uid, "serves", card, 4 * SOON)
    assert {each["code"] for each in asked(node, name)} == {429, 201}


@pytest.mark.usefixtures("bystanders")
def test_a_card_that_recovers_in_time_keeps_its_pod(
    node: Node, kill: Callable[[int], None]
) -> None:
    node.apply(of_deployment())
    name, uid, card = holder(node, "serves")
    kill(card)
    node.wait_equal("one card", lambda: node.allocatable(PLUGIN), 1)
    time.sleep(AFTER - 3)
    node.fault("ok", f"npu{card}")
    node.wait_equal("both cards", lambda: node.allocatable(PLUGIN), 2)
    time.sleep(AFTER + 1)  # in which it would have been evicted
    assert holder(node, "serves") == (name, uid, card)
    assert asked(node, name) == []


def test_where_all_cards_die_no_pod_is_evicted(node: Node, kill: Callable[[int], None]) -> None:
    made = (of_deployment(), of_stateful_set(), of_job())
    node.apply(list(made))
    before = {each["metadata"]["name"]: holder(node, each["metadata"]["name"]) for each in made}
    for card in range(8):
        kill(card)
    node.wait_for(
        "the reason", lambda: any("driver and host" in text for text in waits(node)), 2 * SOON
    )
    time.sleep(AFTER + 1)  # in which they would have been evicted
    for app, (name, uid, _) in before.items():
        assert [each["metadata"]["uid"] for each in of_app(node, app)] == [uid]
        assert asked(node, name) == []


@pytest.mark.usefixtures("bystanders")
def test_an_agent_that_is_killed_before_it_evicts_does_so_when_it_is_back(
    node: Node, kill: Callable[[int], None]
) -> None:
    node.apply(of_deployment())
    name, uid, card = holder(node, "serves")
    before = node.agent_run()
    kill(card)
    node.wait_equal("one card", lambda: node.allocatable(PLUGIN), 1)
    node.kill_agent()
    node.wait_restarted(before)
    evicted(node, uid, "serves", card, 4 * SOON)
    assert [each["code"] for each in asked(node, name)] == [201]


@pytest.mark.usefixtures("bystanders")
def test_an_api_server_that_is_away_is_asked_when_it_is_back(
    node: Node, kill: Callable[[int], None]
) -> None:
    node.apply(of_deployment())
    name, uid, card = holder(node, "serves")
    node.cluster.stop_api_server()
    kill(card)
    time.sleep(AFTER + 3)
    node.cluster.start_api_server()
    evicted(node, uid, "serves", card, 6 * SOON)
    assert [each["code"] for each in asked(node, name)] == [201]
