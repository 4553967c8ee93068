"""The component dra on a node whose kubelet is too old for it: what it does, and what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.node import NAMESPACE, PROJECT, SOON, Node

pytestmark = pytest.mark.oldest_kubelet
OVERLAY = "tests/e2e/dra"
TOO_OLD = "this node's kubelet is v1.30.14, and DRA needs 1.34 or later"


@pytest.fixture(scope="module", autouse=True)
def component(node: Node) -> Iterator[None]:
    """The agent is deployed with the component, as it is rendered."""
    node.deploy({"allocation": {"api": "auto"}}, OVERLAY)
    yield
    base = str(PROJECT / "k8s" / "components" / "dra")
    node.deploy({"defaultPe": "Fusion"})
    for file in ("policy.yaml", "deviceclass.yaml"):
        node.cluster.kubectl("delete", "--filename", f"{base}/{file}")


def slices(node: Node) -> list[str]:
    return [one["metadata"]["name"] for one in node.cluster.objects("resourceslice")]


def log_of_the_newest(node: Node) -> str:
    newest = max(node.agent_pods(), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return node.cluster.logs(newest["metadata"]["name"], NAMESPACE)


def test_auto_is_the_device_plugin(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("one", 1)
    assert node.environment("one", "NPU_DEVNAME") in ("npu0pe0-1", "npu1pe0-1")
    assert slices(node) == []
    assert f'chosen=device-plugin reason="{TOO_OLD}"' in log_of_the_newest(node)


def test_dra_says_why_it_is_not_possible(node: Node) -> None:
    node.run("steady", 1)
    patch = '{"data": {"config.yaml": "allocation: {api: dra}\\n"}}'
    where = ("configmap", "npu-device-plugin", "--namespace", NAMESPACE)
    node.cluster.kubectl("patch", *where, "--patch", patch)
    before = {pod["metadata"]["uid"] for pod in node.agent_pods()}
    node.cluster.kubectl("rollout", "restart", "daemonset/npu-agent", "--namespace", NAMESPACE)

    def new_one() -> str:
        found = [one for one in node.agent_pods() if one["metadata"]["uid"] not in before]
        assert len(found) == 1, found
        pod = found[0]
        assert pod["status"]["containerStatuses"][0]["started"], pod["status"]
        assert not pod["status"]["containerStatuses"][0]["ready"]
        return str(pod["metadata"]["name"])

    try:
        name = node.cluster.wait_for("an agent that is not ready", new_one, 2 * SOON)
        node.cluster.wait_for(
            "its reason", lambda: TOO_OLD in node.cluster.logs(name, NAMESPACE), SOON
        )
        # So the rollout stops there, and the one before goes on.
        assert {pod["metadata"]["uid"] for pod in node.agent_pods()} > before
        assert slices(node) == []
        node.wait_allocatable(2)
        node.run("next", 1)
    finally:
        node.delete_pods()
        node.deploy({"allocation": {"api": "auto"}}, OVERLAY)
