"""What `npu-agent doctor` says of DRA, in the agent's Pod."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.doctor import checks, wait_well, wrong
from tests.e2e.dra.claims import API, CONFIG, DRIVER, Thing, pod, run
from tests.e2e.node import PROJECT, SOON, Node


def test_on_a_good_node_all_of_dra_is_well(node: Node) -> None:
    run(node, pod("claims"))
    wait_well(node)
    found = {check["name"]: check for check in checks(node) if DRIVER in check["name"]}
    assert found[f"DRA slices of {DRIVER}"]["detail"] == "1, with 8 device(s)"
    assert found[f"DRA features for {DRIVER}"]["detail"] == "the API server keeps taints of devices"
    assert found[f"DRA registry of {DRIVER}"]["detail"].endswith("; 1 of our sockets")
    # It reads no DeviceClass: the agent has no right to, and needs none.
    states = {name: check["state"] for name, check in found.items()}
    assert states.pop(f"DeviceClass {DRIVER}") == "n/a"
    assert states.pop(f"resource names of {DRIVER}") == "n/a"
    assert set(states.values()) == {"ok"}, states
    by_name = {check["name"]: check for check in checks(node)}
    assert by_name["rights"]["state"] == "ok"
    refused = by_name["policy npu-agent-own-slices"]
    assert refused["detail"] == "this account may not write slices of other nodes"


def test_a_second_driver_of_our_name_is_named(node: Node) -> None:
    socket = node.cluster.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
    socket.touch()  # no socket, so that the kubelet leaves it alone
    try:
        found = wrong(node)
        assert list(found) == [f"DRA registry of {DRIVER}"]
        said = found[f"DRA registry of {DRIVER}"]
        assert f"{socket.name} in /var/lib/kubelet/plugins_registry: a second driver" in said
        assert "delete the vendor's DRA driver" in said
    finally:
        socket.unlink()
    wait_well(node)


@pytest.mark.usefixtures("classes")
def test_an_administrator_is_told_of_classes_that_are_in_the_way(
    node: Node, tmp_path: Path
) -> None:
    """On the host, with a kubeconfig: the agent's account reads no DeviceClass."""
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))

    def said() -> tuple[str, str]:
        done = node.cluster.enter(
            *("env", f"NODE_NAME={node.name}", f"PYTHONPATH={PROJECT}"),
            *(sys.executable, "-m", "npu_agent", "doctor", "--format=json"),
            *(f"--host-root={node.cluster.host_root}", f"--config-file={config}"),
            check=False,
        )
        found = {check["name"]: check for check in json.loads(done.stdout)}
        assert found[f"DeviceClass {DRIVER}"]["state"] == "ok"
        one = found[f"resource names of {DRIVER}"]
        return one["state"], one["detail"]

    assert said() == ("ok", "9 resource name(s), each of one class")
    twin = device_class("twin", "beta.furiosa.ai/npu", f'device.driver == "{DRIVER}"')
    node.cluster.apply([twin])
    try:
        clash = "beta.furiosa.ai/npu is the resource name of beta.furiosa.ai-npu and twin"
        assert said() == ("wrong", f"{clash}: the scheduler takes twin")
    finally:
        node.cluster.kubectl("delete", "deviceclass", "twin", "--ignore-not-found")


def device_class(name: str, resource: str, expression: str) -> Thing:
    spec = {"extendedResourceName": resource, "selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def test_a_right_that_is_missing_is_named(node: Node) -> None:
    role = ("clusterrole", "npu-agent")
    rules = json.loads(node.cluster.kubectl("get", *role, "--output=json"))["rules"]
    (ours,) = [number for number, rule in enumerate(rules) if "resourceslices" in rule["resources"]]
    patch = {"op": "replace", "path": f"/rules/{ours}/verbs"}
    less = [{**patch, "value": ["get", "list", "watch"]}]
    node.cluster.kubectl("patch", *role, "--type=json", "--patch", json.dumps(less))
    try:
        said = node.cluster.wait_for("a finding", lambda: wrong(node)["rights"], SOON)
        assert said.startswith(
            "missing: resourceslices (create, patch, delete) -> restore the agent's ServiceAccount"
        )
    finally:
        back = [{**patch, "value": rules[ours]["verbs"]}]
        node.cluster.kubectl("patch", *role, "--type=json", "--patch", json.dumps(back))
    wait_well(node)
