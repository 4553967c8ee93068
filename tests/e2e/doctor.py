"""`npu-agent doctor` in the agent's Pod."""

from __future__ import annotations

import json

from tests.e2e.node import NAMESPACE, SOON, Node

DOCTOR = (
    *("npu-agent", "doctor", "--format=json"),
    *("--config-file=/etc/npu-agent/config.yaml", "--host-root=/host"),
)
Check = dict[str, str]


def checks(node: Node) -> list[Check]:
    """All that it says."""
    asked = ("kubectl", "exec", f"--namespace={NAMESPACE}", "daemonset/npu-agent", "--", *DOCTOR)
    done = node.cluster.enter(*asked, check=False)
    assert done.stdout, done.stderr  # of a Pod that is going, while a new one comes
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

    def well() -> bool:
        found = wrong(node)
        assert not found, found
        return True

    node.cluster.wait_for("the doctor to find nothing wrong", well, SOON)
