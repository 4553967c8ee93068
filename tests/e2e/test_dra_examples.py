"""docs/examples/dra on a real API server and scheduler: accepted as they are, allocated as said.

On a Node that no kubelet serves, with slices as the agent publishes them, so that only the claims
and the scheduler are tried here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from npu_agent.core.hardware import CardState
from npu_agent.outputs.dra.slices import slices
from tests.e2e.api import ADMIN, ask
from tests.e2e.fakes import PAPER, paper
from tests.e2e.manifests import DRIVER
from tests.e2e.node import PROJECT, Node
from tests.k8s.tools import overlay
from tests.outputs.dra.cards import card, pool_of

pytestmark = pytest.mark.one_kubelet
EXAMPLES = PROJECT / "docs" / "examples" / "dra"
CLASSES = PROJECT / "k8s" / "components" / "dra-classes" / "deviceclasses.yaml"
NO_CARD = "cannot allocate all claims"
RNGD, WARBOY = card("rngd", 0), card("warboy", 1)

Objects = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def device_class(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The components' DeviceClasses are there."""
    rendered = overlay(tmp_path_factory.mktemp("overlay"), ["dra"])
    found = [one for one in rendered if one["kind"] == "DeviceClass"]
    found += yaml.safe_load_all(CLASSES.read_text(encoding="utf-8"))
    node.apply(found)
    yield
    node.kubectl("delete", "deviceclass", *(one["metadata"]["name"] for one in found))


@pytest.fixture(autouse=True)
def paper_node(node: Node) -> Iterator[None]:
    """A Node with room for Pods, as the scheduler sees it, and nothing left behind."""
    with paper(node):
        yield


def publish(node: Node, *cards: CardState, partitions: bool = False) -> None:
    """The Node offers these cards, as the agent publishes them."""
    devices = pool_of(*cards, partitions=partitions)
    for made in slices(devices, driver=DRIVER, node=PAPER, uid="", generation=1):
        node.apply({**made, "metadata": {"name": made["metadata"]["name"]}})


def rngd(*indexes: int) -> list[CardState]:
    """RNGD cards; the first four are on NUMA node 0, and the next four on 1."""
    return [card("rngd", index) for index in indexes]


def warboys(*indexes: int) -> list[CardState]:
    return [card("warboy", index) for index in indexes]


def names(*cards: CardState) -> list[str]:
    """Of their devices."""
    return [f"npu-{one.id.lower()}" for one in cards]


def example(name: str) -> Objects:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))


def apply(node: Node, things: Objects) -> None:
    """Applies each as it is in the file; the namespace's ServiceAccount takes a moment."""
    for thing in things:
        node.apply(thing)
        if thing["kind"] == "Namespace":
            path = f"/api/v1/namespaces/{thing['metadata']['name']}/serviceaccounts/default"

            def made(path: str = path) -> bool:
                return ask(node, ADMIN, "GET", path).status == 200

            node.wait_for("the namespace's account", made)


def scheduled(node: Node, pod: str, namespace: str = "default") -> dict[str, Any]:
    """The claim of a Pod, once the Pod is on the Node."""

    def found() -> dict[str, Any]:
        seen = node.get("pod", pod, namespace)
        assert seen["spec"].get("nodeName") == PAPER, seen["status"]
        (mine,) = seen["spec"]["resourceClaims"]
        made = {one["name"]: one for one in seen["status"].get("resourceClaimStatuses", ())}
        name = mine.get("resourceClaimName") or made[mine["name"]]["resourceClaimName"]
        claim = node.get("resourceclaim", name, namespace)
        assert any(pod == one["name"] for one in claim["status"]["reservedFor"])
        return claim

    return node.wait_for(f"Pod {pod} to be scheduled", found)


def on_node(node: Node, pod: str) -> None:
    """Waits until a Pod is on the Node."""
    node.wait_equal("a place", lambda: node.pod(pod)["spec"].get("nodeName"), PAPER)


def allocated(claim: dict[str, Any]) -> list[tuple[str, str]]:
    """The requests of a claim with the device that each got."""
    results = claim["status"]["allocation"]["devices"]["results"]
    assert {result["driver"] for result in results} == {DRIVER}
    return [(result["request"], result["device"]) for result in results]


def one_card(node: Node) -> None:
    publish(node, RNGD)
    apply(node, example("one-card"))
    assert allocated(scheduled(node, "one-npu")) == [("npu", *names(RNGD))]


def four_on_one_numa_node(node: Node) -> None:
    # Three and a Warboy here, and three there: not four of one kind beside one CPU.
    publish(node, *rngd(0, 1, 2, 4, 5, 6), *warboys(3))
    apply(node, example("four-on-one-numa-node"))
    node.wait_unschedulable("four-npus-on-one-numa-node", NO_CARD)
    publish(node, *rngd(0, 1, 2, 4, 5, 6, 7), *warboys(3))
    assert allocated(scheduled(node, "four-npus-on-one-numa-node")) == [
        ("npus", name) for name in names(*rngd(4, 5, 6, 7))
    ]


def one_of_two_kinds(node: Node) -> None:
    publish(node, *warboys(0, 1), RNGD)
    things = example("one-of-two-kinds")
    apply(node, things)
    first = scheduled(node, "rngd-or-two-warboys")
    assert allocated(first) == [("npu/rngd", *names(RNGD))]
    (pod,) = (thing for thing in things if thing["kind"] == "Pod")
    apply(node, [{**pod, "metadata": {**pod["metadata"], "name": "second"}}])
    assert allocated(scheduled(node, "second")) == [
        ("npu/warboys", name) for name in names(*warboys(0, 1))
    ]


def two_containers_one_card(node: Node) -> None:
    publish(node, RNGD)
    apply(node, example("two-containers-one-card"))
    assert allocated(scheduled(node, "shared-in-the-pod")) == [("npu", *names(RNGD))]


def two_pods_one_card(node: Node) -> None:
    publish(node, RNGD)
    apply(node, example("two-pods-one-card"))
    first, second = (scheduled(node, f"shared-npu-{number}") for number in (1, 2))
    assert first["metadata"]["uid"] == second["metadata"]["uid"]
    assert allocated(second) == [("npu", *names(RNGD))]
    assert len(node.objects("resourceclaim", "default")) == 1


def several_requests(node: Node) -> None:
    publish(node, RNGD, WARBOY)
    apply(node, example("several-requests"))
    assert allocated(scheduled(node, "model-and-draft")) == [
        ("model", *names(RNGD)),
        ("draft", *names(WARBOY)),
    ]


def admin_access(node: Node) -> None:
    publish(node, RNGD, WARBOY)
    apply(node, example("one-card"))
    held = allocated(scheduled(node, "one-npu"))
    things = example("admin-access")
    # Without its label the namespace takes no such template.
    (namespace,) = (thing for thing in things if thing["kind"] == "Namespace")
    (template,) = (thing for thing in things if thing["kind"] == "ResourceClaimTemplate")
    elsewhere = {**template, "metadata": {**template["metadata"], "namespace": "default"}}
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
    answer = ask(node, ADMIN, "POST", path, elsewhere)
    assert "resource.kubernetes.io/admin-access" in answer.body["message"], answer

    apply(node, things)
    where = namespace["metadata"]["name"]
    claim = scheduled(node, "all-npus", where)
    node.kubectl("delete", "pods", "--all", "-n", where, "--force", "--grace-period=0")
    node.kubectl("delete", "namespace", where)
    assert allocated(claim) == [("npus", name) for name in names(RNGD, WARBOY)]
    results = claim["status"]["allocation"]["devices"]["results"]
    assert all(result["adminAccess"] for result in results)
    assert held == [("npu", *names(RNGD))], "beside its holder"


def one_card_in_three(node: Node) -> None:
    publish(node, RNGD, partitions=True)
    things = example("one-card-in-three")
    # One after the other, so that it is known who finds which cores free.
    for pod in ("one-core", "four-cores", "four-cores-or-two"):
        apply(node, [each for each in things if each["metadata"]["name"] == pod])
        on_node(node, pod)
    (name,) = names(RNGD)
    assert allocated(scheduled(node, "four-cores")) == [("npu", f"{name}-cores-4-7")]
    assert allocated(scheduled(node, "four-cores-or-two")) == [("npu/two", f"{name}-cores-2-3")]
    (by_name,) = (
        one
        for one in node.objects("resourceclaim", "default")
        if one["metadata"]["name"].startswith("one-core-extended-resources-")
    )
    assert [device for _, device in allocated(by_name)] == [f"{name}-cores-0"]


COURSES: dict[str, Callable[[Node], None]] = {
    "admin-access": admin_access,
    "four-on-one-numa-node": four_on_one_numa_node,
    "one-card": one_card,
    "one-card-in-three": one_card_in_three,
    "one-of-two-kinds": one_of_two_kinds,
    "several-requests": several_requests,
    "two-containers-one-card": two_containers_one_card,
    "two-pods-one-card": two_pods_one_card,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.iterdir()))
def test_an_example_is_allocated_as_it_says(node: Node, name: str) -> None:
    COURSES[name](node)


def test_the_selectors_of_the_page_find_the_card_that_they_describe(node: Node) -> None:
    page = (PROJECT / "docs" / "dra-reference.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cel\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    facts = {
        "uuid": "D3EF98F6-9B23-5F1B-B073-6C1BEEDBDB25",
        "driver_version": "2025.4.0~dev0, 7e25130",
        "pci_bus_id": "0000:17:00.0",
    }
    described, nowhere = card("rngd", 1, **facts), card("rngd", 0, **facts, numa_node=None)
    publish(node, nowhere, described)
    template, pod = example("one-card")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    request["exactly"]["selectors"] = [{"cel": {"expression": e}} for e in block.splitlines()]
    apply(node, [template, pod])
    assert allocated(scheduled(node, "one-npu")) == [("npu", *names(described))]
