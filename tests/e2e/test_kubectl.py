"""`kubectl npu` on a real cluster whose node offers its cards by the device plugin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import settings
from tests.e2e.api import ADMIN, MERGE, ask, turned_away
from tests.e2e.manifests import container, thing
from tests.e2e.node import PROJECT, Node
from tests.e2e.test_cordon import card_of

PLUGIN = Path(sys.executable).with_name("kubectl-npu")
VIEWER = PROJECT / "k8s/examples/npu-viewer.yaml"


@pytest.fixture(autouse=True)
def _repaired(repaired: None) -> None:
    """What a test did to the cards is undone."""


def npu(node: Node, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs it with an administrator's kubeconfig."""
    done = node.cluster.enter(str(PLUGIN), *words, check=False)
    assert not check or done.returncode == 0, done
    print(f"$ kubectl npu {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done


def row(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The only row of a table, by its headings."""
    headings, cells = (line.split() for line in done.stdout.splitlines())
    return dict(zip(headings, cells, strict=True))


def test_a_pod_is_shown_with_its_card_and_one_that_waits_with_its_reason(node: Node) -> None:
    def nodes() -> dict[str, str]:
        found = row(npu(node))
        # The agent may have started while the test before brought a card back.
        assert (found["NODE"], found["CARDS"], found["HEALTHY"]) == (node.name, "2", "2")
        return found

    before = node.wait_for("both cards in kubectl npu", nodes)
    assert before["ALLOCATED"] == "0"
    node.run("holds", 1)
    card = card_of(node, "holds")
    held = row(npu(node, "pods"))
    assert (held["POD"], held["NODE"], held["CARD"]) == ("holds", node.name, card)
    assert row(npu(node))["FREE"] == str(int(before["CORES"]) // 2)
    assert row(npu(node, "top"))["POD"] == "holds"

    node.create("waits", 2)
    node.wait_unschedulable("waits")
    said = npu(node, "why", "waits").stdout
    assert "Pod default/waits is Pending." in said
    assert "Insufficient" in said.splitlines()[1]
    assert "default/holds" in said
    assert "waits" in npu(node, "pods", "-A").stdout


def test_one_card_is_taken_out_of_service_from_outside(node: Node) -> None:
    node.run("holds", 1)
    card = card_of(node, "holds")
    done = npu(node, "drain", node.name, card, "--reason", "swap fan")
    assert "evicted default/holds" in done.stdout
    node.wait_allocatable(1)
    assert "swap fan" in npu(node, "node", node.name).stdout
    npu(node, "uncordon", node.name, card)
    node.wait_allocatable(2)


def test_kubectl_completes_it(node: Node) -> None:
    def complete(*words: str) -> list[str]:
        path = f"PATH={PLUGIN.parent}:{node.cluster._state.path}"
        return node.cluster.enter("env", path, "kubectl", "__complete", *words).stdout.splitlines()

    assert complete("npu", "unc") == ["uncordon\tBring it back", ":4"]
    assert complete("furiosa-npu", "node", "") == [node.name, ":4"]
    # It ends within 5 s, whatever is slow: then it offers nothing, and a person presses Tab again.
    cards = ["npu0", "npu1", ":4"]
    node.wait_equal("cards", lambda: complete("npu", "drain", node.name, ""), cards)


@pytest.fixture
def viewer(node: Node) -> Iterator[str]:
    """A user with the rights of the example, and no others."""
    things = list(yaml.safe_load_all(VIEWER.read_text()))
    (role,) = (one["metadata"]["name"] for one in things if one["kind"] == "ClusterRole")
    node.kubectl("apply", "-f", str(VIEWER))
    node.kubectl("create", "clusterrolebinding", "viewer", f"--clusterrole={role}", "--user=eve")
    yield "eve"
    node.kubectl("delete", "clusterrolebinding", "viewer")
    node.kubectl("delete", "-f", str(VIEWER))


def test_the_rights_of_the_example_are_enough_to_see_all_and_change_nothing(
    node: Node, viewer: str
) -> None:
    for words in ((), ("pods", "-A"), ("top", "-A"), ("node", node.name)):
        assert not npu(node, *words, "--as", viewer).stderr
    refused = npu(node, "cordon", node.name, "npu0", "--as", viewer, check=False)
    assert refused.returncode == 1
    assert "forbidden" in refused.stderr.lower()


def test_what_a_user_may_not_read_is_said_once(node: Node) -> None:
    done = npu(node, "--as", "mallory")
    (line,) = done.stderr.splitlines()
    assert "you may not list" in line


def refused(node: Node, *words: str) -> str:
    """What it says, kubectl's own lines first, and fails."""
    done = npu(node, *words, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kubectl npu: error: ")
    return done.stderr


def test_a_kubeconfig_that_is_missing_expired_or_another_clusters(
    node: Node, tmp_path: Path
) -> None:
    assert "/none" in refused(node, "--kubeconfig=/none")
    settings.write(tmp_path, node="other", cgroup="none", kubelet={})
    other = tmp_path / "admin.kubeconfig"  # with the CA of another cluster
    assert "certificate" in refused(node, f"--kubeconfig={other}")
    config = json.loads(Path(node.cluster.kubeconfig).read_text())
    (user,), (cluster,) = config["users"], config["clusters"]
    user["user"]["token"] = "expired"
    other.write_text(json.dumps(config))
    assert "log in again" in refused(node, "pods", f"--kubeconfig={other}")
    cluster["cluster"]["server"] = f"{settings.SERVER}:444"
    other.write_text(json.dumps(config))
    assert f"{settings.SERVER}:444" in refused(node, "top", f"--kubeconfig={other}")


def test_an_api_server_that_has_too_much_to_do_is_waited_for(node: Node, viewer: str) -> None:
    before = len(node.cluster.audit())

    def refused() -> bool:
        asked = [one for one in node.cluster.audit()[before:] if one["verb"] == "list"]
        return any(one["responseStatus"]["code"] == 429 for one in asked)

    headers = {"Authorization": f"Bearer {ADMIN}", "Impersonate-User": viewer}
    with turned_away(node, {"kind": "User", "user": {"name": viewer}}, headers):
        waits = subprocess.Popen(
            node.cluster.command(str(PLUGIN), "--as", viewer), stdout=subprocess.PIPE, text=True
        )
        node.wait_for("a list to be refused", refused)
    said, _ = waits.communicate(timeout=60)
    assert waits.returncode == 0
    assert node.name in said


def test_an_api_server_that_answers_slowly_is_waited_for(node: Node) -> None:
    server = node.cluster._state.processes["apiserver"]
    node.cluster._sandbox.signal(server, signal.SIGSTOP)
    try:
        waits = subprocess.Popen(
            node.cluster.command(str(PLUGIN)), stdout=subprocess.PIPE, text=True
        )
        time.sleep(5)  # how slow it is
    finally:
        node.cluster._sandbox.signal(server, signal.SIGCONT)
    said, _ = waits.communicate(timeout=60)
    assert waits.returncode == 0
    assert node.name in said


@pytest.fixture
def old_agent(node: Node, tmp_path: Path) -> Iterator[str]:
    """A Node with an agent whose page has what none of today's lacks."""
    port = 9199
    (tmp_path / "status.json").write_text('{"version": "0.0.1", "cards": [{"name": "npu0"}]}')
    server = [sys.executable, "-m", "http.server", str(port), f"--directory={tmp_path}"]
    node.cluster.start_program("pages", server, port)
    made = container(image="x/npu-agent:0.0.1", ports=[{"containerPort": port}])
    labels = {"app.kubernetes.io/name": "npu-agent", "age": "old"}
    spec = {
        "containers": [made],
        "serviceAccountName": "default",
        "nodeSelector": {"age": "old"},
        "tolerations": [{"operator": "Exists"}],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    agents = {"selector": {"matchLabels": {"age": "old"}}, "template": template}
    sets = thing("DaemonSet", "old", "apps/v1", spec=agents)
    old = thing("Node", "old", namespace="")
    sets["metadata"]["labels"] = old["metadata"]["labels"] = labels
    node.apply(old)
    room = {"pods": "10", "cpu": "1", "memory": "1Gi"}  # else the scheduler leaves it out
    status = json.dumps({"status": {"capacity": room, "allocatable": room}})
    node.kubectl("patch", "node", "old", "--subresource=status", "--type=merge", "--patch", status)
    node.apply(sets)
    selector = {"labelSelector": "age=old"}

    def placed() -> list[str]:
        pods = node.objects("pod", "default", **selector)
        return [one["metadata"]["name"] for one in pods if one["spec"].get("nodeName") == "old"]

    (name,) = node.wait_for("the agent of another version", placed)
    answers(node, name)
    yield "old"
    node.kubectl("delete", "daemonset", "old", "-n", "default")
    node.kubectl("delete", "node", "old")
    node.delete_by_force(name)


def answers(node: Node, name: str) -> None:
    """Says of a Pod of no node that it runs here, where a program answers for it."""
    address = {"podIP": settings.NODE_ADDRESS, "podIPs": [{"ip": settings.NODE_ADDRESS}]}
    path = f"/api/v1/namespaces/default/pods/{name}/status"
    status = {"status": {"phase": "Running", **address}}
    assert ask(node, ADMIN, "PATCH", path, status, MERGE, real=True).status == 200


def test_an_agent_of_another_version_is_named(node: Node, old_agent: str) -> None:
    rows = [line.split() for line in npu(node, "--no-headers").stdout.splitlines()]
    assert {row[0] for row in rows} == {node.name, old_agent}
    assert "0.0.1" in next(" ".join(row) for row in rows if row[0] == old_agent)
    said = refused(node, "node", old_agent)
    assert "(another version?)" in said
    assert "core_count" in said
