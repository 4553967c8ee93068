"""A good node, and one thing after the other broken on it: exactly that line has to turn.

What follows from a break by necessity is named with it; every other line stays as it was, word for
word.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from npu_agent.people import simulator
from npu_agent.people.doctor.check import State
from npu_agent.people.simulator.apiserver import NODES
from npu_agent.people.simulator.tree import STATE_DIR
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.kube.helpers import status
from tests.people.doctor.helpers import NODE_NAME, Break, Node, check_break, unserved


def fault(card: str, name: str) -> Callable[[Node], None]:
    return lambda node: simulator.apply_fault(node.root, card, name)


def removed(path: str) -> Callable[[Node], None]:
    """Below the host's root, or beside it."""

    def do(node: Node) -> None:
        target = node.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()

    return do


def written(path: str, text: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        (node.root / path).parent.mkdir(parents=True, exist_ok=True)
        (node.root / path).write_text(text, encoding="utf-8")

    return do


def situated(**values: object) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        node.context = replace(node.context, **values)  # type: ignore[arg-type]

    return do


def node_says(**parts: dict[str, object]) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        for part, values in parts.items():
            node.api.objects[NODES][NODE_NAME][part].update(values)

    return do


async def kubelet_gone(node: Node) -> None:
    await node.kubelet.stop()
    unserved(node.directory / "kubelet.sock")


def third_card(driver: str = "") -> Callable[[Node], None]:
    """On the bus, bound to this driver or to none."""

    def do(node: Node) -> None:
        directory = node.root / "sys/bus/pci/devices/0000:99:00.0"
        directory.mkdir()
        (directory / "vendor").write_text("0x1ed2\n", encoding="utf-8")
        (directory / "device").write_text("0x0000\n", encoding="utf-8")
        if driver:
            made = node.root / "sys/bus/pci/drivers" / driver
            made.mkdir(parents=True)
            (directory / "driver").symlink_to(made)

    return do


def api_answers(code: int) -> Callable[[Node], None]:
    return lambda node: setattr(node.api, "trouble", status(code, "no"))


def denies(right: tuple[str, str]) -> Callable[[Node], None]:
    return lambda node: node.api.rights.discard(right)


async def no_agent_listens(node: Node) -> None:
    await node.probes.stop()
    await node.pages.stop()


def reports(**problem: object) -> Callable[[Node], None]:
    return lambda node: node.reports(problems=[problem])


TAINT = {"key": "beta.furiosa.ai/npu", "value": "present", "effect": "NoSchedule"}

TUNING = ("io_uring", "huge pages", "ACS")
BREAKS: dict[str, Break] = {
    # --- hardware
    "no sysfs": Break(
        removed("sys"),
        {"/sys": State.WRONG, "cgroups": State.UNUSED},
        "is missing",
        "mount the host's /sys",
        gone=("PCI", "cards", *TUNING),
    ),
    "no dev": Break(removed("dev"), {"/dev": State.WRONG}, "is missing", "mount the host's /dev"),
    "no driver": Break(
        third_card(),
        "PCI",
        "no driver is bound to 0000:99:00.0 (1ed2:0000)",
        "load the vendor's driver",
    ),
    "a driver that shows nothing": Break(third_card("npu"), "PCI", "has a driver (npu)", "dmesg"),
    "handed on to a virtual machine": Break(
        third_card("vfio-pci"), {"PCI": State.NOTE}, "passed through by vfio-pci"
    ),
    "a card of no known type": Break(
        written("sys/class/npu_mgmt/npu7_mgmt/device_type", "Frobnicator\n"),
        {"odd npu7_mgmt": State.NOTE},
        "'Frobnicator' is not known",
        "install a newer npu-agent",
    ),
    "a card that cannot be read": Break(
        lambda node: (node.root / "sys/class/npu_mgmt/npu7_mgmt/device_type").mkdir(parents=True),
        {"odd npu7_mgmt": State.WRONG},
        "Is a directory",
        "dmesg",
    ),
    "no cards": Break(
        lambda node: [fault(card, "gone")(node) for card in ("npu0", "npu1")],
        {"cards": State.NOTE, "PCI": State.UNUSED},
        "waits for cards",
        "run npu-agent demo",
        gone=TUNING,
    ),
    # --- the kubelet, and other plugins
    "no plugin directory": Break(
        removed("../device-plugins"),
        {"plugin directory": State.WRONG, "serving agent": State.NOTE},
        "is missing",
        "pluginDir",
        gone=("kubelet.sock", "other plugins"),
    ),
    "no kubelet.sock": Break(
        removed("../device-plugins/kubelet.sock"), "kubelet.sock", "is missing", "start the kubelet"
    ),
    "a kubelet that has ended": Break(
        kubelet_gone, "kubelet.sock", "Connection refused", "journalctl -u kubelet"
    ),
    "the vendor's plugin": Break(
        lambda node: node.serve_plugin("furiosa-npu.sock"),
        "other plugins",
        "furiosa-npu.sock",
        "delete the vendor's DaemonSet",
    ),
    "the vendor's plugin of 2026": Break(
        lambda node: node.serve_plugin("rngd.sock"),
        "other plugins",
        "rngd.sock answers as a device plugin",
        "delete the vendor's DaemonSet",
    ),
    # --- the running agent
    "a second agent's Pod": Break(
        situated(hostname="npu-agent-other"),
        {"serving agent": State.NOTE},
        "stands by",
        "two DaemonSets",
    ),
    "no agent serves": Break(
        lambda node: node.lock.close(),
        {"serving agent": State.NOTE},
        "no npu-agent serves",
        "check that its Pod runs",
    ),
    "no agent on its ports": Break(
        no_agent_listens,
        {"agent": State.NOTE, "metrics.listen": State.OK, "metrics.probes": State.OK},
        "no npu-agent answers here",
        "kubectl -n kube-system exec daemonset/npu-agent -- npu-agent doctor",
    ),
    "another program's port": Break(
        lambda node: setattr(node.pages, "healthz", "I am nginx"),
        {"metrics.listen": State.WRONG, "agent": State.OK},
        "cannot be used: another program has it",
        "give metrics.listen another one",
    ),
    "no such address": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.context.config.metrics, listen="192.0.2.1:9100")
        ),
        {"metrics.listen": State.WRONG, "agent": State.OK},
        "192.0.2.1:9100",
        ": correct metrics.listen",
    ),
    "a problem that the agent reports": Break(
        reports(subject="card", text="npu1 is hot: 96 °C", remedy="cool it", command="dmesg"),
        {"agent card": State.WRONG, "agent": State.OK},
        "npu1 is hot: 96 °C",
        "cool it",
    ),
    "a problem without a remedy of its own": Break(
        reports(subject="labels", text="not applied", command="npu-agent doctor"),
        {"agent labels": State.WRONG, "agent": State.OK},
        "not applied",
        "fix what else is wrong here",
    ),
    # --- the cluster
    "no right to ask about clients' tokens": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.context.config.metrics, authorization="kubernetes")
        ),
        "rights",
        "missing: tokenreviews (create), subjectaccessreviews (create)",
        "add k8s/components/metrics-authorization",
    ),
    "no NODE_NAME": Break(
        situated(node_name=None),
        {"NODE_NAME": State.WRONG},
        "not set",
        "spec.nodeName",
        gone=("Node",),
    ),
    "another NODE_NAME": Break(
        situated(node_name="n2"),
        {"Node": State.WRONG, "NODE_NAME": State.OK},
        "404",
        "`kubectl get nodes`",
    ),
    "a token that is no good": Break(
        api_answers(401),
        "API server",
        "401 Unauthorized",
        "delete the Pod to get a new token",
        gone=("rights", "Node"),
    ),
    "an API server that is away": Break(
        api_answers(503),
        "API server",
        "503",
        gone=("rights", "Node"),
    ),
    "no system:basic-user": Break(
        api_answers(403),
        {"rights": State.UNKNOWN, "Node": State.UNKNOWN},
        "does not answer that",
    ),
    "no right to get nodes": Break(
        denies(("get", "nodes")),
        {"rights": State.WRONG, "Node": State.UNKNOWN},
        "missing: nodes (get)",
        "restore the agent's ServiceAccount",
    ),
    "no right to patch nodes": Break(
        denies(("patch", "nodes")), "rights", "missing: nodes (patch)", "OVERLAY"
    ),
    "a cordoned Node": Break(
        node_says(spec={"unschedulable": True}), {"Node": State.NOTE}, "cordoned", "uncordon"
    ),
    "a taint of ours, and no label of NFD": Break(
        node_says(spec={"taints": [TAINT]}),
        {"Node": State.NOTE},
        "this Node has our taint (beta.furiosa.ai/npu) and no NFD label: NFD's worker may not "
        "tolerate it",
        "worker.tolerations",
    ),
    "a Node that is not Ready": Break(
        node_says(
            status={"conditions": [{"type": "Ready", "status": "Unknown", "message": "no network"}]}
        ),
        {"Node": State.NOTE},
        "not Ready: no network",
        "journalctl -u kubelet",
    ),
}


async def test_a_node_that_nfd_labels_or_that_others_have_tainted_is_good(node: Node) -> None:
    labels = {"feature.node.kubernetes.io/pci-1200_1ed2.present": "true"}
    node_says(spec={"taints": [TAINT]}, metadata={"labels": labels})(node)
    assert (await node.examined())["Node"].state is State.OK
    others = {**TAINT, "key": "example.com/batch"}
    node_says(spec={"taints": [others]}, metadata={"labels": {}})(node)
    assert (await node.examined())["Node"].state is State.OK


@pytest.mark.parametrize("name", BREAKS)
async def test_a_break_turns_one_line(name: str, node: Node) -> None:
    await check_break(node, BREAKS[name])


def plain_files(node: Node) -> None:
    """Takes away what says that plain files stand for nodes."""
    removed(STATE_DIR)(node)
    node.context = replace(node.context, vendor=Furiosa(node.root))


@pytest.mark.parametrize("name", ["dead", "no-node", "hot"])
async def test_an_agent_that_answers_judges_its_cards(node: Node, name: str) -> None:
    before = await node.examined()
    fault("npu1", name)(node)
    assert await node.examined() == before


@pytest.mark.parametrize(
    ("break_", "detail", "remedy"),
    [
        (
            fault("npu0", "dead"),
            "npu0 is unhealthy: the driver reports the card dead (alive says 0)",
            "reload the driver",
        ),
        (
            fault("npu1", "no-node"),
            "npu1 is unhealthy: its device nodes are missing (/dev/rngd/npu1pe0 missing)",
            "udev",
        ),
        (
            plain_files,
            "npu0, npu1 are unhealthy: its device nodes are missing (/dev/npu0",
            "cordon the Node",
        ),
        (fault("npu1", "narrow"), "npu1 has a slow PCIe link: 8 of 16 lanes", "reseat it"),
    ],
    ids=["dead", "no node", "files that are no nodes", "narrow"],
)
async def test_cards_are_judged_where_no_agent_reports_them(
    node: Node,
    break_: Callable[[Node], None],
    detail: str,
    remedy: str,
) -> None:
    await no_agent_listens(node)
    await check_break(node, Break(break_, "card", detail, remedy))
