"""What the agent's container may write of the host, tried in a Pod that has its mounts.

Not in the agent's own Pod: its /sys is the simulated one here, and has no mounts below it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ClusterError
from tests.e2e.manifests import IMAGE
from tests.e2e.node import CGROUPS, NAMESPACE, Node, unified
from tests.k8s.tools import overlay

PYTHON = "/opt/npu-agent/bin/python"
ATTEMPTS = """
import json, os, pathlib
mounts = [line.split() for line in open("/proc/self/mountinfo")]
places = {m[4] for m in mounts if m[4].startswith("/host/")}
# The cgroups wherever they can be seen, each a folder in which making a folder makes a cgroup.
places |= {str(p.parent) for p in pathlib.Path("/host/sys").glob("fs/cgroup/**/cgroup.procs")}
places |= {"/host", "/host/sys", "/host/sys/class/dmi", "/host/dev/shm"}
written = []
for place in sorted(places):
    try:
        os.mkdir(place + "/npu-agent-attack")
        os.rmdir(place + "/npu-agent-attack")
        written.append(place)
    except OSError:
        pass
print(json.dumps({"tried": sorted(places), "written": written, "dev": os.listdir("/host/dev/shm"),
                  "classes": os.listdir("/host/sys/class")}))
"""

LISTENS = """
import asyncio
from npu_agent.inventory.uevents import KernelEvents

async def main():
    kernel = KernelEvents(["mem"])
    running = asyncio.create_task(kernel.run())
    async with asyncio.timeout(60):
        await kernel.news.until(lambda news: news.heard)
    print("heard")

asyncio.run(main())
"""


@pytest.fixture
def directory(node: Node, tmp_path: Path) -> Iterator[Path]:
    """For an overlay; the Pods are gone at the end."""
    yield tmp_path
    where = ("--namespace", NAMESPACE, "--timeout=60s")
    node.kubectl("delete", "pod", "--selector=of=least-privilege", *where)


def create(node: Node, directory: Path, *components: str, cgroups: str) -> str:
    """A Pod like the agent's, with the node's own /sys and /dev, that does nothing; its name.

    Another one each time: `exec` finds a container by its Pod's name, also one that is ending.
    """
    (daemonset,) = (t for t in overlay(directory, components) if t["kind"] == "DaemonSet")
    spec: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    spec |= {"nodeName": node.name, "terminationGracePeriodSeconds": 0, "restartPolicy": "Never"}
    for volume in spec["volumes"]:
        if volume.get("hostPath", {}).get("path") == CGROUPS:
            volume["hostPath"]["path"] = cgroups
    (container,) = spec["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        del container[probe]
    container |= {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [PYTHON, "-c", "import signal; signal.pause()"],
        "args": [],
    }
    name = f"same-mounts-{uuid.uuid4()}"
    meta = {"name": name, "namespace": NAMESPACE, "labels": {"of": "least-privilege"}}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    return name


def attempts(
    node: Node, directory: Path, *components: str, cgroups: str = ""
) -> dict[str, list[str]]:
    """What the Pod could write below /host; its cgroups are those of version 2 by default."""
    name = create(node, directory, *components, cgroups=cgroups or unified())

    def tried() -> dict[str, list[str]]:
        try:
            said = node.cluster.exec(name, PYTHON, "-c", ATTEMPTS, namespace=NAMESPACE)
        except ClusterError as error:  # not running yet
            raise AssertionError(str(error)) from None
        found: dict[str, list[str]] = json.loads(said)
        return found

    return node.wait_for("the Pod's attempts", tried)


def test_the_hosts_sys_and_dev_are_not_writable(node: Node, directory: Path) -> None:
    found = attempts(node, directory)
    assert found["written"] == []
    # It does see the host's classes; and of /dev/shm neither what is there nor what comes.
    assert "net" in found["classes"]
    assert found["dev"] == []
    assert {"/host/dev", "/host/dev/pts", "/host/dev/shm", "/host/sys/class"} < set(found["tried"])
    assert "/host/sys/fs/cgroup" in found["tried"]


@pytest.mark.one_kubelet
def test_other_mounts_are_closed_by_the_component(node: Node, directory: Path) -> None:
    """Cgroups of version 1, a mount for each controller, and what some hosts have below /dev.

    There it is /dev/mqueue and /dev/hugepages; who mounts over what is not there fails.
    """
    (node.cluster.host_root / "dev" / "mqueue").mkdir()
    node.cluster.enter("mount", "-t", "tmpfs", "tmpfs", "/dev/mqueue")
    try:
        open_to_it = attempts(node, directory, cgroups=CGROUPS)
        found = attempts(node, directory, "recursive-read-only", cgroups=CGROUPS)
    finally:
        node.cluster.enter("umount", "--lazy", "/dev/mqueue")
        (node.cluster.host_root / "dev" / "mqueue").rmdir()
    mqueue, *cgroups = open_to_it["written"]
    assert mqueue == "/host/dev/mqueue"
    # A machine without version 1 has nothing to close.
    assert bool(cgroups) is not Path(CGROUPS, "cgroup.controllers").exists()
    assert all(place.startswith("/host/sys/fs/cgroup/") for place in cgroups)
    assert {"/host/dev/mqueue", "/host/sys/fs/cgroup"} < set(found["tried"])
    assert found["written"] == []


@pytest.mark.one_kubelet
def test_the_kernel_is_heard_in_the_agent_s_own_network_namespace(
    node: Node, directory: Path
) -> None:
    """Without a capability. `mem` stands for a driver's class: /dev/null's event is sent again."""
    name = create(node, directory, cgroups=unified())
    runs = partial(node.cluster.exec, name, PYTHON, "--version", namespace=NAMESPACE)
    node.wait_for("the Pod to run", runs)
    with ThreadPoolExecutor(1) as pool:
        listens = pool.submit(node.cluster.exec, name, PYTHON, "-c", LISTENS, namespace=NAMESPACE)

        def ended() -> bool:
            Path("/sys/class/mem/null/uevent").write_text("change", encoding="utf-8")
            return listens.done()

        node.wait_for("an event of the kernel", ended, timeout=90)
        assert listens.result().strip() == "heard"
