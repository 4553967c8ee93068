"""`npu-agent doctor` in the agent's Pod."""

from __future__ import annotations

import json

from tests.e2e.node import NAMESPACE, Node

DOCTOR = ("doctor", "--format=json")
Check = dict[str, str]


def checks(node: Node) -> list[Check]:
    """All that it says in the Pod."""
    command: tuple[str, ...] = (
        *("kubectl", "exec", f"--namespace={NAMESPACE}", "daemonset/npu-agent", "--"),
        *("npu-agent", *DOCTOR),
    )
    done = node.cluster.enter(*command, check=False)
    assert done.stdout, done.stderr  # of a Pod that ends, while a new one comes
    found: list[Check] = json.loads(done.stdout)
    assert done.returncode == int(any(check["state"] == "wrong" for check in found)), done.stderr
    assert len(found) > 10
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
