"""No container loses its card: neither by new device rules nor by new runtimes or agents.

The nodes of the cards are made of a device that no runtime allows by default, as /dev/null is: a
container opens one only as long as the rules of its own cgroup have it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.dra.claims import inside, run
from tests.e2e.dra.conftest import OVERLAY
from tests.e2e.manifests import Thing, container, npu_pod, pod, small
from tests.e2e.node import SOON, Node
from tests.e2e.rollout.conftest import CONFIG

DEVICE = 10, 237
"""loop-control, which every Linux has: to open it does nothing. Not one of the defaults of runc
(libcontainer/specconv, AllowedDevices)."""
BY_CDI = {**CONFIG, "allocation": {"method": "cdi"}}
HOLDERS = ("nodes", "cdi", "claim")
"""By what each Pod has its card: the device plugin's nodes, its CDI names, a DRA claim."""
WATCH = """
cd /; n=0; : >failed
while :; do
    for node in /dev/npu* /dev/rngd/*; do
        [ ! -c $node ] || { true <>$node; } 2>>failed || echo "$node after $n" >>failed
    done
    n=$((n + 1)); echo $n >new; mv new opened; usleep 10000
done
"""
ROUNDS = 20
"""In which each node of a Pod is opened once: at least 0.2 s."""


@pytest.fixture
def tidy() -> Callable[[], None]:
    """The Pods stay from test to test."""
    return lambda: None


@pytest.fixture(scope="module", autouse=True)
def holders(node: Node) -> Iterator[None]:
    """Three Pods that open the nodes of their card each 10 ms; the agent goes on by CDI."""
    old = remade(node, os.makedev(*DEVICE))
    plugin = {name: watching(npu_pod(name)) for name in ("nodes", "cdi")}
    run(node, plugin["nodes"])
    node.deploy(BY_CDI, OVERLAY)
    run(node, plugin["cdi"], watching(small("claim")))
    yield
    node.delete_pods()
    remade(node, old)
    node.deploy(CONFIG, OVERLAY)


def remade(node: Node, device: int) -> int:
    """Makes all nodes of cards anew, of this device; returns which it was."""
    dev = node.cluster.host_root / "dev"
    paths = [path for path in (*dev.glob("npu*"), *dev.glob("rngd/*")) if path.is_char_device()]
    (old,) = {path.stat().st_rdev for path in paths}
    for path in paths:
        fresh = dev / "fresh"
        os.mknod(fresh, path.stat().st_mode, device)
        fresh.rename(path)  # at once, as the agent must not miss it
    return old


def watching(made: Thing) -> Thing:
    """A Pod whose container does nothing but open its nodes; it asks for some CPU."""
    (one,) = made["spec"]["containers"]
    one["command"] = ["sh", "-c", WATCH]
    one["resources"]["requests"] = {"cpu": "10m"}
    return made


def opened(node: Node, name: str) -> int:
    """How often a Pod has opened its nodes."""
    return int(inside(node, name, "cat", "/opened"))


def failed(node: Node, name: str) -> str:
    """What a Pod failed to open."""
    return inside(node, name, "cat", "/failed")


def goes_on(node: Node, name: str) -> None:
    """Waits until a Pod has opened its nodes some more times."""
    before = node.wait_for(f"{name} to be asked", lambda: opened(node, name))
    node.wait_for(f"{name} to go on", lambda: opened(node, name) > before + ROUNDS)


def check_kept(node: Node) -> None:
    """Each Pod goes on, and has never failed to open a node."""
    for name in HOLDERS:
        goes_on(node, name)
        assert failed(node, name) == "", name
    assert node.restarts() == dict.fromkeys(HOLDERS, 0)


def spec(node: Node, name: str) -> dict[str, Any]:
    """The OCI spec of a Pod's container: what the runtime makes its rules of, each time."""
    (status,) = node.pod(name)["status"]["containerStatuses"]
    id_ = status["containerID"].rpartition("/")[2]
    bundles = node.cluster.run_dir / "containerd" / "io.containerd.runtime.v2.task" / "k8s.io"
    found: dict[str, Any] = json.loads((bundles / id_ / "config.json").read_text(encoding="utf-8"))
    return found


def test_a_container_opens_no_device_that_it_was_not_granted(node: Node) -> None:
    """Without this, the others would prove nothing."""
    major, minor = DEVICE
    script = f"mknod /null c 1 3; mknod /card c {major} {minor}; sleep 100000"
    run(node, pod("ungranted", container(command=script)))
    tried = [
        inside(node, "ungranted", "sh", "-c", f"true <>/{each} && echo opens")
        for each in ("null", "card")
    ]
    node.delete_pods("ungranted")
    assert tried[0] == "opens\n"
    assert "Operation not permitted" in tried[1]


@pytest.mark.parametrize("name", HOLDERS)
def test_the_runtime_has_each_device_node(node: Node, name: str) -> None:
    """So it knows them whenever it makes the rules anew, and so does systemd, which it tells."""
    linux = spec(node, name)["linux"]
    nodes = [one for one in linux["devices"] if (one["major"], one["minor"]) == DEVICE]
    assert nodes
    allowed = [
        (one.get("type"), one.get("major"), one.get("minor"))
        for one in linux["resources"]["devices"]
        if one["allow"]
    ]
    assert ("c", *DEVICE) in allowed


def test_the_kubelet_changes_the_resources_of_containers(node: Node) -> None:
    """By UpdateContainerResources, as for a Pod that is resized, and with CPU manager policies."""
    change = {"name": "main", "resources": {"requests": {"cpu": "20m"}}}
    patch = json.dumps({"spec": {"containers": [change]}})
    for name in HOLDERS:
        node.kubectl("patch", "pod", name, "-n=default", "--subresource=resize", f"--patch={patch}")

    def requests() -> dict[str, str]:
        statuses = {name: node.pod(name)["status"]["containerStatuses"][0] for name in HOLDERS}
        return {name: each["resources"]["requests"]["cpu"] for name, each in statuses.items()}

    node.wait_equal("all to be resized", requests, dict.fromkeys(HOLDERS, "20m"), 4 * SOON)
    check_kept(node)


def test_containerd_is_restarted(node: Node) -> None:
    node.cluster.restart_containerd()
    check_kept(node)


def test_the_agent_is_replaced_and_killed(node: Node) -> None:
    for by_hand in ({}, {"events": False}):
        node.deploy({**BY_CDI, **by_hand}, OVERLAY)
        check_kept(node)
    before = node.agent_run()
    node.kill_agent()
    node.wait_restarted(before)
    check_kept(node)
    with node.without_agent():
        check_kept(node)
    node.wait_for("an agent that is ready", node.agent_ready, 2 * SOON)
    check_kept(node)
