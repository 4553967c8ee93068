"""A good node, and one thing after the other broken on it: exactly that line has to turn.

What follows from a break by necessity is named with it; every other line stays as it was, word for
word.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from npu_agent import simulator
from npu_agent.config import AllocationConfig, LabelsConfig, TlsConfig
from npu_agent.doctor import examine, probe
from npu_agent.doctor.check import Verdict
from npu_agent.kubelet.pods import CHECKPOINT
from npu_agent.simulator.tree import STATE_DIR
from tests.doctor.helpers import RESOURCE, STATUS, Node, Port, own, unserved

OF_RESOURCE = f"resource {RESOURCE}"
ALLOCATABLE = f"allocatable {RESOURCE}"
WARBOY, RNGD = simulator.card("warboy", 0), simulator.card("rngd", 1)


@dataclass(frozen=True)
class Break:
    """Something that is wrong with a node."""

    do: Callable[[Node], object]
    """What it returns is awaited, if it can be."""
    lines: dict[str, Verdict]
    """The lines that change, the broken one first."""
    detail: str = ""
    """Words of the first one."""
    remedy: str = ""
    gone: tuple[str, ...] = field(default=())
    """Lines that are there no more."""


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
        node.situation = replace(node.situation, **values)  # type: ignore[arg-type]

    return do


def configured(**values: object) -> Callable[[Node], None]:
    return lambda node: node.reconfigure(**values)


def registers(resource: str, *ids: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        node.registered[resource] = [*node.registered.get(resource, ()), *ids]
        node.write_checkpoint()

    return do


def forgets(id_: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        node.registered[RESOURCE].remove(id_)
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


def labelled(**labels: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        for key, value in labels.items():
            node.api.node["metadata"]["labels"][f"beta.furiosa.ai/npu.{key}"] = value

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


def taken(port: Callable[[Node], Port]) -> Callable[[Node], Awaitable[None]]:
    return lambda node: _taken(node, port(node))


async def _taken(node: Node, port: Port) -> None:
    await port.stop()
    port.words = "I am nginx"
    await port.start()
    (node.proc / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")


async def no_agent_listens(node: Node) -> None:
    await node.port.stop()
    await node.pages.stop()


def certificate(path: str) -> Callable[[Node], Awaitable[None]]:
    async def configured(node: Node) -> None:
        await node.pages.stop()  # an agent without a good one does not listen there
        metrics = node.situation.config.metrics
        none = TlsConfig(cert_file=path, key_file="/none/tls.key")
        node.reconfigure(metrics=replace(metrics, tls=none))

    return configured


def plain_file_for_a_node(node: Node) -> None:
    """Where no simulator says that plain files stand for nodes."""
    shutil.rmtree(node.root / STATE_DIR)


BLIND = Verdict.UNKNOWN
UNKNOWN_CLUSTER = dict.fromkeys(("rights", "Node", ALLOCATABLE, "labels"), Verdict.UNKNOWN)

BREAKS: dict[str, Break] = {
    # --- what this process may do
    "privileged": Break(
        lambda node: (node.proc / "self/status").write_text(
            "CapEff:\t000001ffffffffff\nNoNewPrivs:\t0\nSeccomp:\t0\n"
        ),
        {"privileges": Verdict.NOTE},
        "is privileged (CapEff 000001ffffffffff)",
        'capabilities: {drop: ["ALL"]}',
    ),
    "more privileges to be gained": Break(
        lambda node: (node.proc / "self/status").write_text(
            STATUS.replace("NoNewPrivs:\t1", "NoNewPrivs:\t0")
        ),
        {"privileges": Verdict.NOTE},
        "it may gain privileges",
        "allowPrivilegeEscalation: false",
    ),
    "no seccomp": Break(
        lambda node: (node.proc / "self/status").write_text(
            STATUS.replace("Seccomp:\t2", "Seccomp:\t0")
        ),
        {"privileges": Verdict.NOTE},
        "it has no seccomp filter",
        "seccompProfile: {type: RuntimeDefault}",
    ),
    "writable root": Break(
        lambda node: (node.proc / "self/mounts").write_text("overlay / overlay rw 0 0\n"),
        {"privileges": Verdict.NOTE},
        "writable root file system",
        "readOnlyRootFilesystem: true",
    ),
    # --- hardware
    "no sysfs": Break(
        removed("sys"),
        {
            "/sys": Verdict.WRONG,
            **dict.fromkeys(
                ("cards", "driver warboy", "driver rngd", "PCI", OF_RESOURCE, ALLOCATABLE), BLIND
            ),
            "cgroups": Verdict.UNUSED,
            "labels": BLIND,
        },
        "is missing",
        "mount the host's /sys",
        gone=("card npu0", "card npu1"),
    ),
    "no dev": Break(
        removed("dev"),
        {
            "/dev": Verdict.WRONG,
            "card npu0": Verdict.WRONG,
            "card npu1": Verdict.WRONG,
            ALLOCATABLE: Verdict.WRONG,
        },
        "is missing",
        "mount the host's /dev",
    ),
    "no driver": Break(
        unbound,
        {"PCI": Verdict.WRONG},
        "no driver is bound to 0000:99:00.0 (1ed2:0000)",
        "load the vendor's driver",
    ),
    "a driver that shows nothing": Break(
        bound_to("npu"), {"PCI": Verdict.WRONG}, "has a driver (npu)", "dmesg"
    ),
    "handed on to a virtual machine": Break(
        bound_to("vfio-pci"), {"PCI": Verdict.NOTE}, "handed on by vfio-pci"
    ),
    "a dead card": Break(
        fault("npu0", "dead"),
        {"card npu0": Verdict.WRONG, ALLOCATABLE: Verdict.WRONG},
        "unhealthy: alive says 0",
        "reload its driver",
    ),
    "a card that hangs": Break(
        fault("npu0", "hang"),
        {"card npu0": Verdict.WRONG, ALLOCATABLE: Verdict.WRONG},
        "no answer within",
        "reload its driver",
    ),
    "a missing node": Break(
        fault("npu0", "no-node"),
        {"card npu0": Verdict.WRONG},
        "/dev/npu0pe0 is missing",
        "udev",
    ),
    "a node that is none": Break(
        plain_file_for_a_node,
        {"card npu0": Verdict.WRONG, "card npu1": Verdict.WRONG},
        "/dev/npu0_mgmt is no character device",
        "udev",
    ),
    "a card of no known type": Break(
        written("sys/class/npu_mgmt/npu7_mgmt/device_type", "Frobnicator\n"),
        {"odd npu7_mgmt": Verdict.NOTE},
        "'Frobnicator' is not known",
        "a newer one",
    ),
    "a card that cannot be read": Break(
        lambda node: (node.root / "sys/class/npu_mgmt/npu7_mgmt/device_type").mkdir(parents=True),
        {"odd npu7_mgmt": Verdict.WRONG, "labels": Verdict.UNKNOWN},
        "Is a directory",
        "dmesg",
    ),
    "no cards": Break(
        lambda node: [fault(card, "gone")(node) for card in ("npu0", "npu1")],
        {
            "cards": Verdict.NOTE,
            "PCI": Verdict.OK,
            OF_RESOURCE: Verdict.WRONG,
            ALLOCATABLE: Verdict.WRONG,
            "labels": Verdict.WRONG,
        },
        "waits for some",
        gone=("card npu0", "card npu1"),
    ),
    # --- the kubelet
    "no plugin directory": Break(
        lambda node: shutil.rmtree(node.directory),
        {
            "plugin directory": Verdict.WRONG,
            "kubelet.sock": Verdict.WRONG,
            "our sockets": Verdict.OK,
            "other plugins": Verdict.OK,
            "serving agent": Verdict.NOTE,
            OF_RESOURCE: Verdict.NOTE,
        },
        "is missing",
        "pluginDir",
    ),
    "no kubelet.sock": Break(
        no_kubelet_socket,
        {"kubelet.sock": Verdict.WRONG},
        "is missing",
        "start the kubelet",
    ),
    "a kubelet that has ended": Break(
        kubelet_gone,
        {"kubelet.sock": Verdict.WRONG, "pod-resources": Verdict.WRONG},
        "Connection refused",
        "journalctl -u kubelet",
    ),
    "a socket left behind": Break(
        lambda node: unserved(node.directory / "furiosa-npu-00000000.sock"),
        {"our sockets": Verdict.NOTE},
        "nobody serves furiosa-npu-00000000.sock",
        "harmless",
    ),
    "no pod-resources": Break(
        removed("../pod-resources"),
        {"pod-resources": Verdict.WRONG},
        "is missing",
        "mount the host's",
    ),
    "a second agent's Pod": Break(
        situated(hostname="npu-agent-other"),
        {"serving agent": Verdict.NOTE},
        "stands by",
        "two DaemonSets",
    ),
    "no agent": Break(
        unlocked, {"serving agent": Verdict.NOTE}, "no npu-agent serves", "check that its Pod runs"
    ),
    # --- who else owns the resource
    "the vendor's plugin": Break(
        lambda node: node.serve_plugin("furiosa-npu.sock"),
        {"other plugins": Verdict.WRONG},
        "furiosa-npu.sock",
        "delete the vendor's DaemonSet",
    ),
    "the vendor's plugin on a socket of another name": Break(
        lambda node: node.serve_plugin("furiosa-device-plugin.sock"),
        {"other plugins": Verdict.WRONG},
        "furiosa-device-plugin.sock",
        "grep -i -e furiosa -e npu",
    ),
    "the vendor's plugin on a socket named after its resource": Break(
        lambda node: node.serve_plugin("rngd-4core.24gb.sock"),
        {"other plugins": Verdict.WRONG},
        "rngd-4core.24gb.sock",
        "delete the vendor's DaemonSet",
    ),
    "devices of a second plugin": Break(
        registers(RESOURCE, "NOT-OURS"),
        {OF_RESOURCE: Verdict.WRONG},
        "device NOT-OURS of it, which no card of this host has: a second plugin",
        "delete the vendor's DaemonSet",
    ),
    "our cards under another name": Break(
        registers("furiosa.ai/warboy", WARBOY.uuid),
        {OF_RESOURCE: Verdict.WRONG},
        f"has {WARBOY.uuid} as furiosa.ai/warboy, too",
        "delete the vendor's DaemonSet",
    ),
    "our cards by another identity": Break(
        registers("furiosa.ai/warboy", f"{WARBOY.serial}_cores_1"),
        {OF_RESOURCE: Verdict.WRONG},
        f"has {WARBOY.serial}_cores_1 as furiosa.ai/warboy, too",
        "delete the vendor's DaemonSet",
    ),
    "a device that the kubelet does not know": Break(
        forgets(WARBOY.uuid),
        {OF_RESOURCE: Verdict.WRONG},
        "knows 1 of 2",
        "readiness",
    ),
    "a checkpoint that is none": Break(
        lambda node: (node.directory / CHECKPOINT).write_text("[]"),
        {OF_RESOURCE: Verdict.UNKNOWN},
        "not as kubelets write it",
    ),
    # --- directories
    "no CDI directory": Break(
        cdi_is_a_file,
        {"CDI directory": Verdict.WRONG},
        "is missing",
        "k8s/components/cdi",
    ),
    "no NFD": Break(
        configured(labels=LabelsConfig(output="nfd")),
        {
            "NFD directory": Verdict.WRONG,
            "labels": Verdict.WRONG,
            "rights": Verdict.OK,  # of one less
        },
        "is missing",
        "install Node Feature Discovery",
    ),
    # --- metrics.listen
    "somebody else's port": Break(
        taken(lambda node: node.pages),
        {
            "metrics.listen": Verdict.WRONG,
            "other plugins": Verdict.OK,  # whose process has a name now
        },
        f"held by pid {os.getpid()}",
        "give metrics.listen another one",
    ),
    "somebody else's port of the probes": Break(
        taken(lambda node: node.port),
        {
            "metrics.probes": Verdict.WRONG,
            "other plugins": Verdict.OK,  # as above
        },
        f"held by pid {os.getpid()}",
        "give metrics.probes another one",
    ),
    "nobody at its port of the probes": Break(
        lambda node: node.port.stop(),
        {"metrics.probes": Verdict.NOTE},
        "while an npu-agent answers on its other address",
        "see its log",
    ),
    "no agent on its ports": Break(
        no_agent_listens,
        {
            "metrics.listen": Verdict.OK,
            "metrics.probes": Verdict.OK,
            "readiness": Verdict.UNUSED,
        },
        "is free",
    ),
    "no such address": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.situation.config.metrics, listen="192.0.2.1:9100")
        ),
        {"metrics.listen": Verdict.WRONG},
        "192.0.2.1:9100",
        "no such address",
    ),
    "no certificate": Break(
        certificate("/none/tls.crt"),
        {"metrics.tls": Verdict.WRONG, "metrics.listen": Verdict.NOTE},
        "/none/tls.crt is missing",
        "mount the Secret",
    ),
    "no certificate that can be read": Break(
        certificate("/proc/self"),  # as where a file of a Secret is mounted that it does not have
        {"metrics.tls": Verdict.WRONG, "metrics.listen": Verdict.NOTE},
        "/proc/self cannot be read: this is a directory",
        "may the agent read it?",
    ),
    "no right to ask about clients' tokens": Break(
        lambda node: node.reconfigure(
            metrics=replace(node.situation.config.metrics, authorization="kubernetes")
        ),
        {"rights": Verdict.WRONG},
        "missing: tokenreviews (create), subjectaccessreviews (create)",
        "add k8s/components/metrics-authorization",
    ),
    "an agent that is not ready": Break(
        lambda node: node.port.reasons.append("config: config.yaml:3: unknown key"),
        {"readiness": Verdict.WRONG},
        "config: config.yaml:3: unknown key",
        "/readyz",
    ),
    # --- the cluster
    "no NODE_NAME": Break(
        situated(node_name=None),
        {
            "NODE_NAME": Verdict.WRONG,
            "Node": Verdict.UNKNOWN,
            ALLOCATABLE: Verdict.UNKNOWN,
            "labels": Verdict.UNKNOWN,
        },
        "not set",
        "spec.nodeName",
    ),
    "another NODE_NAME": Break(
        situated(node_name="n2"),
        {
            "Node": Verdict.WRONG,
            "NODE_NAME": Verdict.OK,
            ALLOCATABLE: Verdict.UNKNOWN,
            "labels": Verdict.UNKNOWN,
        },
        "404",
        "`kubectl get nodes`",
    ),
    "a token that is no good": Break(
        lambda node: setattr(node.api, "refusal", 401),
        {"API server": Verdict.WRONG, **UNKNOWN_CLUSTER},
        "401 Unauthorized",
        "delete the Pod to have another",
    ),
    "no system:basic-user": Break(
        lambda node: setattr(node.api, "refusal", 403),
        UNKNOWN_CLUSTER,
        "does not say",
    ),
    "no right to get nodes": Break(
        denies(("get", "nodes")),
        {
            "rights": Verdict.WRONG,
            "Node": Verdict.UNKNOWN,
            ALLOCATABLE: Verdict.UNKNOWN,
            "labels": Verdict.UNKNOWN,
        },
        "missing: nodes (get)",
        "restore the agent's ServiceAccount",
    ),
    "no right to patch nodes": Break(
        denies(("patch", "nodes")), {"rights": Verdict.WRONG}, "missing: nodes (patch)", "OVERLAY"
    ),
    "no right to create Events": Break(
        denies(("create", "events")),
        {"rights": Verdict.WRONG},
        "missing: events (create)",
    ),
    "a cordoned Node": Break(
        node_says(spec={"unschedulable": True}), {"Node": Verdict.NOTE}, "cordoned", "uncordon"
    ),
    "a Node that is not Ready": Break(
        node_says(
            status={"conditions": [{"type": "Ready", "status": "False", "message": "no network"}]}
        ),
        {"Node": Verdict.NOTE},
        "not Ready: no network",
        "journalctl -u kubelet",
    ),
    "nothing allocatable": Break(
        node_says(status={"allocatable": {}}),
        {ALLOCATABLE: Verdict.WRONG},
        "0 on the Node, 2 healthy",
        "a second plugin owns the resource",
    ),
    "a label that somebody changed": Break(
        labelled(count="7"),
        {"labels": Verdict.WRONG},
        "npu.count is 7 and should be 2",
        "labels.resync",
    ),
    "labels of somebody else": Break(
        lambda node: own(node, "nfd-master"),
        {"labels": Verdict.NOTE},
        "set by nfd-master",
        "delete the vendor's feature discovery",
    ),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs here hangs for good: no need to wait for it as long as for a real card."""
    monkeypatch.setattr(probe, "DEADLINE", 2.0)


async def test_a_good_node(node: Node) -> None:
    lines = await examine.examine(node.situation)
    assert {line.name: line.state for line in lines if line.state is not Verdict.OK} == {
        "CDI directory": Verdict.UNUSED,
        "NFD directory": Verdict.UNUSED,
        "DRA": Verdict.UNUSED,
    }
    assert len(lines) == len({line.name for line in lines})
    assert not [line for line in lines if line.remedy]


@pytest.mark.parametrize("name", BREAKS)
async def test_one_break_turns_one_line(name: str, node: Node) -> None:
    broken = BREAKS[name]
    before = await node.examined()
    doing = broken.do(node)
    if isinstance(doing, Awaitable):
        await doing
    after = await node.examined()
    changed = {key: after[key].state for key in after if after[key] != before.get(key)}
    assert changed == broken.lines
    assert before.keys() - after.keys() == set(broken.gone)
    line = after[next(iter(broken.lines))]
    assert broken.detail in line.detail
    assert broken.remedy in line.remedy
    assert line.remedy or line.state is not Verdict.WRONG
    # It is what to fix, and there is something to type for it.
    assert line.follows == ""
    assert bool(line.command) is (line.state is Verdict.WRONG)
    follow = {key for key in changed if after[key].follows}
    assert {after[key].follows for key in follow} <= {line.name, *broken.lines}
