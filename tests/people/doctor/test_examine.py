"""A good node, and one thing after the other broken on it: exactly that line has to turn.

What follows from a break by necessity is named with it; every other line stays as it was, word for
word.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from npu_agent.config import AllocationConfig, LabelsConfig, TlsConfig
from npu_agent.kubelet.pods import CHECKPOINT
from npu_agent.people import simulator
from npu_agent.people.doctor import examine
from npu_agent.people.doctor.check import State
from npu_agent.people.simulator.tree import STATE_DIR
from tests.people.doctor.helpers import RESOURCE, Break, Node, check_break, own, unserved

OF_RESOURCE = f"resource {RESOURCE}"
ALLOCATABLE = f"allocatable {RESOURCE}"
WARBOY, RNGD = simulator.card("warboy", 0), simulator.card("rngd", 1)


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
        (node.root / path).write_text(text)

    return do


def situated(**values: object) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        node.context = replace(node.context, **values)  # type: ignore[arg-type]

    return do


def configured(**values: object) -> Callable[[Node], None]:
    return lambda node: node.reconfigure(**values)


def registers(resource: str, *ids: str) -> Callable[[Node], None]:
    """These are the devices that the kubelet knows of a resource."""

    def do(node: Node) -> None:
        node.registered[resource] = list(ids)
        node.write_checkpoint()

    return do


def cdi_is_a_file(node: Node) -> None:
    node.reconfigure(allocation=AllocationConfig(method="cdi"))
    written("var/run/cdi", "a file")(node)


def node_says(**parts: dict[str, object]) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        for part, values in parts.items():
            node.api.node[part].update(values)

    return do


def unlocked(node: Node) -> None:
    node.lock.close()


def no_kubelet_socket(node: Node) -> None:
    (node.directory / "kubelet.sock").unlink()


async def kubelet_gone(node: Node) -> None:
    await node.kubelet.stop()
    unserved(node.directory / "kubelet.sock")


def unbound(node: Node) -> None:
    """A third card on the bus, without a driver."""
    directory = node.root / "sys/bus/pci/devices/0000:99:00.0"
    directory.mkdir()
    (directory / "vendor").write_text("0x1ed2\n")
    (directory / "device").write_text("0x0000\n")


def bound_to(driver: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        unbound(node)
        made = node.root / "sys/bus/pci/drivers" / driver
        made.mkdir(parents=True)
        (node.root / "sys/bus/pci/devices/0000:99:00.0/driver").symlink_to(made)

    return do


def denies(right: tuple[str, str]) -> Callable[[Node], None]:
    return lambda node: node.api.rights.discard(right)


def another_program(node: Node) -> None:
    node.pages.healthz = "I am nginx"


async def no_agent_listens(node: Node) -> None:
    await node.probes.stop()
    await node.pages.stop()


def certificate(path: str) -> Callable[[Node], Awaitable[None]]:
    async def configured(node: Node) -> None:
        await node.pages.stop()  # an agent without a good one does not listen there
        metrics = node.context.config.metrics
        none = TlsConfig(cert_file=path, key_file="/none/tls.key")
        node.reconfigure(metrics=replace(metrics, tls=none))

    return configured


def plain_file_for_a_node(node: Node) -> None:
    """Where no simulator says that plain files stand for nodes."""
    shutil.rmtree(node.root / STATE_DIR)


BLIND = State.UNKNOWN
UNKNOWN_CLUSTER = dict.fromkeys(("rights", "Node", ALLOCATABLE, "labels"), State.UNKNOWN)

BREAKS: dict[str, Break] = {
    # --- hardware
    "no sysfs": Break(
        removed("sys"),
        {
            "/sys": State.WRONG,
            **dict.fromkeys(
                ("cards", "driver warboy", "driver rngd", "PCI", OF_RESOURCE, ALLOCATABLE), BLIND
            ),
            "cgroups": State.UNUSED,
        },
        "is missing",
        "mount the host's /sys",
        gone=("card npu0", "card npu1"),
    ),
    "no dev": Break(
        removed("dev"),
        {"/dev": State.WRONG, "card npu0": State.WRONG, "card npu1": State.WRONG},
        "is missing",
        "mount the host's /dev",
    ),
    "no driver": Break(
        unbound, "PCI", "no driver is bound to 0000:99:00.0 (1ed2:0000)", "load the vendor's driver"
    ),
    "a driver that shows nothing": Break(bound_to("npu"), "PCI", "has a driver (npu)", "dmesg"),
    "handed on to a virtual machine": Break(
        bound_to("vfio-pci"), {"PCI": State.NOTE}, "passed through by vfio-pci"
    ),
    "a dead card": Break(
        fault("npu0", "dead"),
        "card npu0",
        "unhealthy, and not handed out: the driver reports the card dead (alive says 0)",
        "reload the driver",
    ),
    "a missing node": Break(
        fault("npu0", "no-node"), "card npu0", "/dev/npu0pe0 is missing", "udev"
    ),
    "a node that is none": Break(
        plain_file_for_a_node,
        {"card npu0": State.WRONG, "card npu1": State.WRONG},
        "/dev/npu0_mgmt is not a character device",
        "udev",
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
        {"cards": State.NOTE, "PCI": State.OK, OF_RESOURCE: State.WRONG},
        "waits for cards",
        gone=("card npu0", "card npu1"),
    ),
    # --- the kubelet
    "no plugin directory": Break(
        lambda node: shutil.rmtree(node.directory),
        {
            "plugin directory": State.WRONG,
            "kubelet.sock": State.WRONG,
            "other plugins": State.OK,
            "serving agent": State.NOTE,
            OF_RESOURCE: State.NOTE,
        },
        "is missing",
        "pluginDir",
    ),
    "no kubelet.sock": Break(no_kubelet_socket, "kubelet.sock", "is missing", "start the kubelet"),
    "a kubelet that has ended": Break(
        kubelet_gone,
        {"kubelet.sock": State.WRONG, "pod-resources": State.WRONG},
        "Connection refused",
        "journalctl -u kubelet",
    ),
    "no pod-resources": Break(
        removed("../pod-resources"), "pod-resources", "is missing", "mount the host's"
    ),
    "a second agent's Pod": Break(
        situated(hostname="npu-agent-other"),
        {"serving agent": State.NOTE},
        "stands by",
        "two DaemonSets",
    ),
    "no agent": Break(
        unlocked, {"serving agent": State.NOTE}, "no npu-agent serves", "check that its Pod runs"
    ),
    # --- who else owns the resource
    "the vendor's plugin": Break(
        lambda node: node.serve_plugin("furiosa-npu.sock"),
        "other plugins",
        "furiosa-npu.sock",
        "delete the vendor's DaemonSet",
    ),
    "the vendor's plugin on a socket named after its resource": Break(
        lambda node: node.serve_plugin("rngd-4core.24gb.sock"),
        "other plugins",
        "rngd-4core.24gb.sock",
        "delete the vendor's DaemonSet",
    ),
    "devices of a second plugin": Break(
        registers(RESOURCE, WARBOY.uuid, RNGD.uuid, "NOT-OURS"),
        OF_RESOURCE,
        "device NOT-OURS of it, which no card of this host has: a second plugin",
        "delete the vendor's DaemonSet",
    ),
    "our cards under another name": Break(
        registers("furiosa.ai/warboy", WARBOY.uuid),
        OF_RESOURCE,
        f"has {WARBOY.uuid} as furiosa.ai/warboy, too",
        "delete the vendor's DaemonSet",
    ),
    "a device that the kubelet does not know": Break(
        registers(RESOURCE, RNGD.uuid), OF_RESOURCE, "knows 1 of 2", "readiness"
    ),
    "a checkpoint that is none": Break(
        lambda node: (node.directory / CHECKPOINT).write_text("[]"),
        {OF_RESOURCE: State.UNKNOWN},
        "not in a format that kubelets write",
    ),
    # --- directories
    "no CDI directory": Break(cdi_is_a_file, "CDI directory", "is missing", "k8s/components/cdi"),
    "no NFD": Break(
        configured(labels=LabelsConfig(output="nfd")),
        {
            "NFD directory": State.WRONG,
            "labels": State.OK,
            "rights": State.OK,  # of one less
        },
        "is missing",
        "install Node Feature Discovery",
    ),
    # --- metrics.listen
    "another program's port": Break(
        another_program,
        {"metrics.listen": State.WRONG, "labels": State.UNKNOWN},
        "cannot be used: another program has it",
        "give metrics.listen another one",
    ),
    "nobody at its port of the probes": Break(
        lambda node: node.probes.stop(),
        {"metrics.probes": State.NOTE},
        "while an npu-agent answers on its other address",
        "read its log",
    ),
    "no agent on its ports": Break(
        no_agent_listens,
        {
            "metrics.listen": State.OK,
            "metrics.probes": State.OK,
            "readiness": State.UNUSED,
            "labels": State.UNKNOWN,
        },
        "is free",
    ),
    "no such address": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.context.config.metrics, listen="192.0.2.1:9100")
        ),
        {"metrics.listen": State.WRONG, "labels": State.UNKNOWN},
        "192.0.2.1:9100",
        "no such address",
    ),
    "no certificate": Break(
        certificate("/none/tls.crt"),
        {"metrics.tls": State.WRONG, "metrics.listen": State.NOTE, "labels": State.UNKNOWN},
        "/none/tls.crt is missing",
        "mount the Secret",
    ),
    "no right to ask about clients' tokens": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.context.config.metrics, authorization="kubernetes")
        ),
        "rights",
        "missing: tokenreviews (create), subjectaccessreviews (create)",
        "add k8s/components/metrics-authorization",
    ),
    "an agent that is not ready": Break(
        lambda node: node.reports(unready=["config: config.yaml:3: unknown key"]),
        "readiness",
        "config: config.yaml:3: unknown key",
        "/readyz",
    ),
    # --- the cluster
    "no NODE_NAME": Break(
        situated(node_name=None),
        {
            "NODE_NAME": State.WRONG,
            "Node": State.UNKNOWN,
            ALLOCATABLE: State.UNKNOWN,
            "labels": State.UNKNOWN,
        },
        "not set",
        "spec.nodeName",
    ),
    "another NODE_NAME": Break(
        situated(node_name="n2"),
        {
            "Node": State.WRONG,
            "NODE_NAME": State.OK,
            ALLOCATABLE: State.UNKNOWN,
            "labels": State.UNKNOWN,
        },
        "404",
        "`kubectl get nodes`",
    ),
    "a token that is no good": Break(
        lambda node: setattr(node.api, "refusal", 401),
        {"API server": State.WRONG, **UNKNOWN_CLUSTER},
        "401 Unauthorized",
        "delete the Pod to get a new token",
    ),
    "no system:basic-user": Break(
        lambda node: setattr(node.api, "refusal", 403), UNKNOWN_CLUSTER, "does not answer that"
    ),
    "no right to get nodes": Break(
        denies(("get", "nodes")),
        {
            "rights": State.WRONG,
            "Node": State.UNKNOWN,
            ALLOCATABLE: State.UNKNOWN,
            "labels": State.UNKNOWN,
        },
        "missing: nodes (get)",
        "restore the agent's ServiceAccount",
    ),
    "no right to patch nodes": Break(
        denies(("patch", "nodes")), "rights", "missing: nodes (patch)", "OVERLAY"
    ),
    "no right to create Events": Break(
        denies(("create", "events")), "rights", "missing: events (create)"
    ),
    "a cordoned Node": Break(
        node_says(spec={"unschedulable": True}), {"Node": State.NOTE}, "cordoned", "uncordon"
    ),
    "a Node that is not Ready": Break(
        node_says(
            status={"conditions": [{"type": "Ready", "status": "False", "message": "no network"}]}
        ),
        {"Node": State.NOTE},
        "not Ready: no network",
        "journalctl -u kubelet",
    ),
    "nothing allocatable": Break(
        node_says(status={"allocatable": {}}),
        ALLOCATABLE,
        "0 on the Node, 2 healthy",
        "no second plugin owns the resource",
    ),
    "labels that cannot be applied": Break(
        lambda node: node.reports(labels={"in_place": False, "error": "no", "labels": {}}),
        "labels",
        "no",
        "tries again",
    ),
    "labels of somebody else": Break(
        lambda node: own(node, "nfd-master"),
        {"labels": State.NOTE},
        "set by nfd-master",
        "delete the vendor's feature discovery",
    ),
}


async def test_a_good_node(node: Node) -> None:
    lines = await examine.examine(node.context)
    assert {line.name: line.state for line in lines if line.state is not State.OK} == {
        "CDI directory": State.UNUSED,
        "NFD directory": State.UNUSED,
        "DRA": State.UNUSED,
    }
    assert len(lines) == len({line.name for line in lines})
    assert not [line for line in lines if line.remedy]


@pytest.mark.parametrize("name", BREAKS)
async def test_one_break_turns_one_line(name: str, node: Node) -> None:
    await check_break(node, BREAKS[name])
