"""The component dra on a node whose kubelet is too old for it: what it does, and what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.node import AGENT, NAMESPACE, PROJECT, SOON, Node

pytestmark = pytest.mark.oldest_kubelet
OVERLAY = "tests/e2e/dra"
AUTO = {"allocation": {"api": "auto"}}
TOO_OLD = "this node's kubelet is v1.30.14, and DRA needs 1.34 or later"


@pytest.fixture(scope="module", autouse=True)
def component(node: Node) -> Iterator[None]:
    """The agent is deployed with the component, as it is rendered."""
    node.deploy(AUTO, OVERLAY)
    yield
    base = str(PROJECT / "k8s" / "components" / "dra")
    node.deploy()
    for file in ("policy.yaml", "deviceclass.yaml", "rbac.yaml"):
        node.kubectl("delete", "--filename", f"{base}/{file}")


def test_auto_is_the_device_plugin_and_dra_says_why_it_is_not_possible(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("steady", 1)
    assert node.environment("steady", "NPU_DEVNAME") in ("npu0pe0-1", "npu1pe0-1")
    assert f'chosen=device-plugin reason="{TOO_OLD}"' in node.log()
    (before,) = node.agent_pods()
    node.configure({"allocation": {"api": "dra"}})
    node.kubectl("rollout", "restart", *AGENT)

    def new_one() -> str:
        (pod,) = (
            one for one in node.agent_pods() if one["metadata"]["uid"] != before["metadata"]["uid"]
        )
        assert pod["status"]["containerStatuses"][0]["started"], pod["status"]
        assert not pod["status"]["containerStatuses"][0]["ready"]
        name = str(pod["metadata"]["name"])
        assert TOO_OLD in node.cluster.logs(name, NAMESPACE)
        return name

    node.wait_for("an agent that is not ready, and says why", new_one, 2 * SOON)
    # So the rollout stops there, and the one before goes on.
    assert len(node.agent_pods()) == 2
    assert node.objects("resourceslice") == []
    node.wait_allocatable(2)
    node.run("next", 1)
