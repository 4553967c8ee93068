"""A container runtime finds the cards by the names of `npu-agent cdi`; no kubelet is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster import settings
from tests.e2e.manifests import IMAGE
from tests.e2e.node import Node

CTR = ("ctr", "--address", settings.CONTAINERD_SOCKET, "--namespace", "k8s.io")

pytestmark = pytest.mark.one_kubelet


def run(
    node: Node, device: str, *command: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a container with a device of ours."""
    name = f"by-hand-{device.replace(':', '-')}"
    words = ("run", "--rm", "--device", f"furiosa.ai/npu={device}", IMAGE, name, *command)
    return node.cluster.enter(*CTR, *words, check=check)


def test_a_container_gets_what_the_name_stands_for(node: Node) -> None:
    root = node.cluster.host_root
    command = [sys.executable, "-m", "npu_agent", "cdi", "generate", "--host-root", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    node.cluster.enter("mkdir", "-p", "/etc/cdi")
    written = root / "etc" / "cdi" / "furiosa.ai-npu.json"
    node.cluster.enter("cp", str(written), "/etc/cdi/furiosa.ai-npu.json")
    for device, promised, count in (
        ("npu1", "FURIOSA_DEVICES=npu:1:0-1", 1),
        ("npu0:1", "FURIOSA_DEVICES=npu:0:1", 1),
        ("all", "FURIOSA_DEVICES=npu:0:0-1,npu:1:0-1", 2),
    ):
        said = run(node, device, "npu-agent", "verify", "--expect", str(count)).stdout
        assert promised in said
        assert "other cards" in said
    refused = run(node, "npu7", "true", check=False)
    assert refused.returncode != 0
    assert "furiosa.ai/npu=npu7" in refused.stderr
