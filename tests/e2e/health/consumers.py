"""Programs of others that read Node conditions, built from their sources, on a cluster's node."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.node import PROJECT, Node

EXAMPLES = PROJECT / "k8s" / "examples" / "health"
TYPE = "furiosa.ai/NPUReady"


def example(name: str) -> Any:
    """A file of k8s/examples/health."""
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())


@contextlib.contextmanager
def running(node: Node, program: Path, *arguments: str, **environment: str) -> Iterator[Path]:
    """Runs a program in the cluster's namespaces meanwhile; yields the file with its log."""
    log = node.cluster.workdir / "logs" / f"{program.name}.log"
    number = log.with_suffix(".pid")
    script = 'echo $$ >"$0"; exec "$@"'
    variables = (f"{name}={value}" for name, value in environment.items())
    command = ("sh", "-c", script, str(number), "env", *variables, str(program), *arguments)
    with log.open("w") as output:
        process = subprocess.Popen(
            node.cluster.command(*command), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield log
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        node.cluster.enter("kill", number.read_text().strip(), check=False)
        process.wait(20)


def kubeconfig(node: Node, account: str, namespace: str) -> Path:
    """A kubeconfig with a token of a service account."""
    config = json.loads(node.cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": node.cluster.token_for(account, namespace)}
    path = node.cluster.workdir / f"{account}.kubeconfig"
    path.write_text(json.dumps(config))
    return path


def condition(node: Node) -> dict[str, Any] | None:
    """The Node's condition of our type."""
    found = node.get("node", node.name)["status"]["conditions"]
    return next((one for one in found if one["type"] == TYPE), None)


def wait_condition(node: Node, status: str, timeout: float = 90) -> dict[str, Any]:
    """Waits until the condition has this status; returns it."""

    def reached() -> dict[str, Any]:
        found = condition(node)
        assert found, "none"
        assert found["status"] == status, found
        return found

    return node.wait_for(f"the condition to be {status}", reached, timeout)


def forget(node: Node) -> None:
    """Takes the condition away, as of a Node that is new."""
    gone = {"status": {"conditions": [{"type": TYPE, "$patch": "delete"}]}}
    patch = ("--type=strategic", "--patch", json.dumps(gone))
    node.kubectl("patch", "node", node.name, "--subresource=status", *patch)
