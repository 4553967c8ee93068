"""Is all well, who says so, and how it stays so when a new release comes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from npu_agent import __version__
from tests.cluster import agent
from tests.docs.pages import page
from tests.docs.typed import commands
from tests.e2e.doctor import wait_well, wrong
from tests.e2e.journey.registry import Registry
from tests.e2e.journey.steps import AGENT, Journey
from tests.e2e.manifests import RESOURCE, container, deployment
from tests.e2e.node import NAMESPACE, PROJECT, SOON
from tests.e2e.test_it_keeps_working import no_gap, watched

NEXT = f"{__version__}-next"
"""The tag of a release that is this one by another name."""


# --- verify ------------------------------------------------------------------------------------


def verified(node: Journey, condition: str) -> str:
    """Waits until the verify Job is Complete, or Failed; returns what it printed."""
    make, _, _, delete = commands(*page("docs/install.md").below("Verify")[0])
    node.cluster.enter("sh", "-euc", f"cd {PROJECT} && {make}")
    try:
        wait = ("wait", f"--for=condition={condition}", "--timeout=50s", "job/npu-verify")
        node.kubectl("--namespace", NAMESPACE, *wait)
        return node.kubectl("--namespace", NAMESPACE, "logs", "job/npu-verify")
    finally:
        node.cluster.enter("sh", "-euc", delete)


@contextlib.contextmanager
def nothing_behind(node: Journey, name: str) -> Iterator[None]:
    """A device node of each card leads nowhere, as those of a driver that was unloaded."""
    listed = Path("/proc/devices").read_text().partition("Block")[0].splitlines()[1:]
    taken = {int(line.split()[0]) for line in listed if line}
    nobodys = next(major for major in range(255, 0, -1) if major not in taken)
    paths = [node.cluster.host_root / "dev" / f"{card}{name}" for card in ("npu0", "npu1")]
    good = [path.stat() for path in paths]

    def lead(devices: Iterable[int]) -> None:
        fresh = node.cluster.host_root / "fresh"
        for path, status, device in zip(paths, good, devices, strict=True):
            os.mknod(fresh, status.st_mode, device)
            fresh.rename(path)  # at once, as the agent must not miss it

    lead([os.makedev(nobodys, 0)] * 2)
    try:
        yield
    finally:
        lead(status.st_rdev for status in good)


def test_the_verify_job_says_what_is_wrong_with_a_node(installed: Journey) -> None:
    with nothing_behind(installed, "pe0"):
        printed = verified(installed, "failed")
    (failure,) = [line for line in printed.splitlines() if line.startswith("wrong")]
    assert failure.startswith("wrong  /dev/npu")
    assert "pe0: no device is behind it (ENXIO)" in failure
    assert "wrong" not in verified(installed, "complete")


# --- doctor ------------------------------------------------------------------------------------


def test_the_doctor_names_a_second_plugin(installed: Journey) -> None:
    wait_well(installed)
    directory = str(installed.cluster.kubelet_dir / "device-plugins")
    command = (sys.executable, "-m", "tests.e2e.journey.second", directory, RESOURCE)
    second = subprocess.Popen(command, cwd=PROJECT)
    try:
        installed.wait_allocatable(1)  # its one, and none of ours

        def named() -> str:
            found = wrong(installed)["other plugins"]
            assert "vendor-0" in found, found
            return found

        found = installed.wait_for("the doctor to name it", named)
        assert "a second plugin registers the same resource" in found
        assert "vendor.sock" in found
        assert "delete the vendor's DaemonSet" in found
    finally:
        second.terminate()
        second.wait(10)
    # The kubelet does not report it. The agent sees that its devices are no longer offered.
    installed.wait_allocatable(2, 4 * SOON)
    assert "check for another plugin that registered the same resource" in installed.log()
    wait_well(installed)


# --- a new release -----------------------------------------------------------------------------


def test_an_upgrade_is_seen_by_nobody(installed: Journey, registry: Registry) -> None:
    node = installed
    registry.push(agent(), f"npu-agent:{NEXT}")
    node.run("steady", 1)
    held, before = node.held()["steady"], node.pod("steady")
    ready: list[bool] = []

    def replaced() -> bool:
        ready.append(any(one["status"]["containerStatuses"][0]["ready"] for one in started(node)))
        return serves(node)

    with watched(node) as seen:
        node.apply_file(NEXT)
        node.apply(deployment("meanwhile", container(limits={RESOURCE: 1})))
        node.wait_for("the new agent to serve", replaced, 2 * SOON)
        node.rolled_out("deployment/meanwhile", "default")
        node.wait_allocatable(2)
    node.kubectl("delete", "deployment", "meanwhile", "--namespace=default")

    # The new one was ready before the old one was told to end.
    assert len(ready) > 2
    assert all(ready)
    no_gap(seen)
    after = node.pod("steady")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert node.restarts()["steady"] == 0
    assert node.held()["steady"] == held


def started(node: Journey) -> list[dict[str, Any]]:
    """The agent's Pods that are not to end, and that the kubelet knows."""
    return [pod for pod in node.agent_pods() if "containerStatuses" in pod["status"]]


def serves(node: Journey) -> bool:
    """Whether the one agent that is left is of the new release, and registered by its own log."""
    assert node.agent()["spec"]["containers"][0]["image"] == f"{AGENT}:{NEXT}"
    return node.serves()
