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


@pytest.fixture
def specs(node: Node) -> None:
    """The specs of the host's cards, where its container runtime reads them."""
    root = node.cluster.host_root
    command = [sys.executable, "-m", "npu_agent", "cdi", "generate", "--host-root", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    node.cluster.enter("mkdir", "-p", "/etc/cdi")
    written = root / "etc" / "cdi" / "furiosa.ai-npu.json"
    node.cluster.enter("cp", str(written), "/etc/cdi/furiosa.ai-npu.json")


@pytest.mark.usefixtures("specs")
@pytest.mark.parametrize(
    ("device", "promised", "count"),
    [
        ("npu1", "FURIOSA_DEVICES=npu:1:0-1", 1),
        ("npu0:1", "FURIOSA_DEVICES=npu:0:1", 1),
        ("all", "FURIOSA_DEVICES=npu:0:0-1,npu:1:0-1", 2),
    ],
)
def test_a_container_gets_what_the_name_stands_for(
    node: Node, device: str, promised: str, count: int
) -> None:
    name = f"by-hand-{device.replace(':', '-')}"
    verify = ("npu-agent", "verify", "--expect", str(count))
    said = node.cluster.enter(
        *CTR, "run", "--rm", "--device", f"furiosa.ai/npu={device}", IMAGE, name, *verify
    ).stdout
    assert promised in said
    assert "other cards" in said


@pytest.mark.usefixtures("specs")
def test_a_name_that_there_is_not_starts_no_container(node: Node) -> None:
    refused = node.cluster.enter(
        *CTR, "run", "--rm", "--device", "furiosa.ai/npu=npu7", IMAGE, "by-hand-7", "true",
        check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "furiosa.ai/npu=npu7" in refused.stderr
