"""`npu-agent doctor` in the agent's Pod, or on the host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e.node import NAMESPACE, PROJECT, Node

DOCTOR = ("doctor", "--format=json")
Check = dict[str, str]


def checks(node: Node, config: Path | None = None) -> list[Check]:
    """All that it says in the Pod, or with this config on the host, by a kubeconfig."""
    if config is None:
        place = ("--config-file=/etc/npu-agent/config.yaml", "--host-root=/host")
        inside = ("kubectl", "exec", f"--namespace={NAMESPACE}", "daemonset/npu-agent", "--")
        command = (*inside, "npu-agent", *DOCTOR, *place)
    else:
        place = (f"--config-file={config}", f"--host-root={node.cluster.host_root}")
        environment = ("env", f"NODE_NAME={node.name}", f"PYTHONPATH={PROJECT}")
        command = (*environment, sys.executable, "-m", "npu_agent", *DOCTOR, *place)
    done = node.cluster.enter(*command, check=False)
    assert done.stdout, done.stderr  # of a Pod that ends, while a new one comes
    found: list[Check] = json.loads(done.stdout)
    assert done.returncode == int(any(check["state"] == "wrong" for check in found)), done.stderr
    assert len(found) > 20
    return found


def wrong(node: Node) -> dict[str, str]:
    """What it finds wrong: the remark by the check's name."""
    return {
        check["name"]: f"{check['detail']} -> {check['remedy']}"
        for check in checks(node)
        if check["state"] == "wrong"
    }


def wait_well(node: Node) -> None:
    """Waits until it finds nothing wrong."""
    node.wait_equal("the doctor to find nothing wrong", lambda: wrong(node), {})
