"""From the vendor's programs to npu-agent and back, by the commands of docs/migration.md.

They are read from the page and run as they stand there. What differs from a user's cluster: the
vendor's programs are stand-ins, and the cards are Warboy ones, where the page's values say RNGD.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.doctor import wrong
from tests.e2e.journey.reader import Reader
from tests.e2e.journey.registry import Registry
from tests.e2e.journey.steps import Journey
from tests.e2e.journey.vendors import CHARTS, MANIFESTS, cards, charts, manifests
from tests.e2e.manifests import RESOURCE, container, deployment, npu_pod
from tests.e2e.node import NAMESPACE

PAGE = "docs/migration.md"
WARBOY = "furiosa.ai/warboy"
PCI = "feature.node.kubernetes.io/pci-{}1ed2.present"
VENDORS = "furiosa-system"
LABELS = {
    "furiosa.ai/npu.count",
    "furiosa.ai/npu.family",
    "furiosa.ai/npu.product",
    *(
        f"furiosa.ai/{what}.version{part}"
        for what in ("driver", "firmware")
        for part in ("", ".major", ".minor", ".patch", ".metadata")
    ),
}
"""What the vendor's feature discovery sets through NFD: see docs/labels.md."""
METRICS = {
    f"furiosa_npu_{name}"
    for name in ("alive", "hw_temperature", "hw_power", "core_utilization", "core_frequency")
}
METRIC_LABELS = {
    *("arch", "core", "device", "uuid", "pci_bus_id", "firmware_version", "driver_version"),
    *("hostname", "namespace", "pod", "container"),
}
"""What the vendor's exporter of 2025 on writes, as its page has it."""


def nfd(node: Journey, keys: set[str], value: str | None) -> None:
    """Does to the Node what Node Feature Discovery does when it comes, or when it goes."""
    if keys:
        node.label(dict.fromkeys(keys, value))


@pytest.fixture
def reader(bare: Journey, registry: Registry, tmp_path: Path) -> Iterator[Reader]:
    """A node without npu-agent and its image, as Node Feature Discovery has labelled it."""
    node = bare
    registry.forget()
    node.label({"npu-agent/enabled": None})
    found = Reader(node, tmp_path)
    yield found
    node.delete_pods()
    for name in ("npu-agent", *CHARTS):
        namespace = VENDORS if name in CHARTS else NAMESPACE
        node.helm("uninstall", name, "--namespace", namespace, "--ignore-not-found", "--wait")
    node.clear_labels()
    keys = node.labels()
    nfd(node, {key for key in keys if "furiosa.ai/" in key or "1ed2" in key}, None)
    node.label({"npu-agent/enabled": "true"})
    node.clear_disk()


def run(node: Journey, name: str, resource: str) -> str:
    """A Pod that asks for one of the resource, and runs; returns the card whose nodes it has."""
    node.apply(npu_pod(name, 1, resource))
    node.wait_phase(name, "Running")
    return card_of(node, name)


def card_of(node: Journey, name: str) -> str:
    """The one card whose nodes a Pod has, all of them."""
    nodes = node.nodes_in(name)
    (card,) = {match[1] for path in nodes if (match := re.match(r"/dev/(npu\d+)", path))}
    assert len(nodes) == 9, nodes
    return card


def metrics_of(node: Journey, pod: str, uuid: str) -> str:
    """The agent's metrics, once it knows that a Pod holds this card, and has read each card twice.

    Of the vendor's metrics one, the utilization, is about the time between two readings.
    """

    def known() -> str:
        found = node.page("/metrics")
        held = [
            line
            for line in found.splitlines()
            if line.startswith("furiosa_npu_assigned") and f'uuid="{uuid}"' in line
        ]
        assert held
        assert all(f'pod="{pod}"' in line for line in held), held
        missing = METRICS - set(re.findall(r"^(furiosa_npu_\w+){", found, re.MULTILINE))
        assert not missing, missing
        return found

    return node.wait_for(f"the agent to know of {pod}", known)


def test_from_the_charts_and_back(reader: Reader) -> None:
    node = reader.node
    uuids = cards(node)
    charts(reader.checkout, WARBOY, [f"{uuid}={card}" for card, uuid in uuids.items()])
    found_by_nfd = {PCI.format("1200_"), *LABELS}
    nfd(node, found_by_nfd, "true")
    install = [
        line
        for line in reader.blocks(PAGE, "Back to the charts")[0].splitlines()
        if "furiosa/" in line
    ]
    first = [line.partition(" --values")[0] + " --create-namespace --wait" for line in install]
    reader.types("\n".join(first))
    node.wait_allocatable(2, resource=WARBOY)
    before = run(node, "before", WARBOY)

    save, remove, then = reader.blocks(PAGE, "From the charts")
    reader.types(save)
    reader.types(remove)
    node.wait_allocatable(0, resource=WARBOY)
    nfd(node, found_by_nfd, None)  # as its last Job does when its chart is taken away
    assert "before" in reader.types(then)

    # Who ran goes on, and is known; a new one gets the other card, and a third one none.
    node.wait_allocatable(2, resource=WARBOY)
    page_ = metrics_of(node, "before", uuids[before])
    after = run(node, "after", WARBOY)
    assert {before, after} == set(uuids)
    assert node.environment("after", "NPU_DEVNAME") == f"{after}pe0-1"
    assert node.environment("after", "FURIOSA_DEVICES") == f"npu:{after[3:]}:0-1"
    node.apply(npu_pod("none", 1, WARBOY))
    node.wait_unschedulable("none", f"Insufficient {WARBOY}")
    node.delete_pods("none")
    assert node.restarts() == {"before": 0, "after": 0}
    node.wait_for("the vendor's labels", lambda: labelled(node))
    alive = re.search(rf'^furiosa_npu_alive{{(.*uuid="{uuids[before]}".*)}} 1', page_, re.MULTILINE)
    assert alive
    assert set(re.findall(r'(\w+)="', alive[1])) >= METRIC_LABELS

    # And back, while both Pods run.
    (back,) = reader.blocks(PAGE, "Back to the charts")
    away, vendors = back.split("helm install", 1)
    reader.types(away)
    nfd(node, found_by_nfd, "true")
    reader.types(f"helm install{vendors}")
    node.wait_allocatable(2, resource=WARBOY)
    node.delete_pods("after")
    assert run(node, "again", WARBOY) == after
    assert node.environment("again", "NPU_DEVNAME") == ""  # the vendor's sets none
    assert node.restarts() == {"before": 0, "again": 0}

    # Whoever installs before the vendor's is away: all Pods get cards, and the agent stays.
    node.delete_pods("again")
    reader.types(then)
    node.wait_for("the doctor to name it", lambda: rivals(node))
    assert run(node, "meanwhile", WARBOY) == after
    assert node.environment("meanwhile", "NPU_DEVNAME") == f"{after}pe0-1"
    reader.types(remove.splitlines()[-1])
    # A kubelet before 1.37 has forgotten the agent by then, which registers again.
    node.wait_allocatable(2, resource=WARBOY)
    node.delete_pods("meanwhile")
    assert run(node, "last", WARBOY) == after
    assert node.environment("last", "NPU_DEVNAME") == f"{after}pe0-1"
    assert node.restarts() == {"before": 0, "last": 0}
    reader.check()


def test_from_the_manifests_and_back(reader: Reader) -> None:
    node = reader.node
    node.label({PCI.format(""): "true"})
    config = "defaultPe: Fusion\ndisabledDevices: []\ninterval: 15\n"
    named = [f"{card}-whole={card}:{card}pe0-1" for card in cards(node)]
    manifests(reader.checkout, RESOURCE, named, config)
    back = reader.blocks(PAGE, "Back to the manifests")[0].splitlines()
    reader.types(next(line for line in back if "apply -f" in line))
    node.wait_allocatable(2)
    node.apply(deployment("work", container(limits={RESOURCE: 1})))
    try:
        assert re.fullmatch(r"npu[01]pe0-1", devname(node, "work"))

        save, drain, remove, install = reader.blocks(PAGE, "From the manifests")
        for block in (save, drain, remove, install):
            reader.types(block)
        node.wait_allocatable(2)
        assert re.fullmatch(r"npu[01]pe0-1", devname(node, "work"))
        assert yaml.safe_load(config).items() <= yaml.safe_load(config_of(node)).items()

        reader.types(drain)
        reader.types("\n".join(back))
        node.wait_allocatable(2)
        assert re.fullmatch(r"npu[01]pe0-1", devname(node, "work"))
        assert config_of(node) == config
        reader.check()
    finally:
        node.kubectl("uncordon", node.name)
        node.kubectl("delete", "deployment", "work", "--namespace=default")
        files = [f"--filename={reader.checkout / name}.yaml" for name in MANIFESTS]
        node.kubectl("delete", "--ignore-not-found", *files)


def devname(node: Journey, app: str) -> str:
    """Waits until the one Pod of a Deployment runs; returns its NPU_DEVNAME."""

    def name() -> str:
        pods = node.objects("pod", "default", labelSelector=f"app={app}")
        (pod,) = [one for one in pods if one["status"]["phase"] == "Running"]
        return node.environment(pod["metadata"]["name"], "NPU_DEVNAME")

    return node.wait_for(f"a Pod of {app}", name)


def config_of(node: Journey) -> str:
    """The config file in the cluster."""
    where = ("configmap", "npu-device-plugin", "--namespace", NAMESPACE)
    return node.kubectl("get", *where, "--output=jsonpath={.data.config\\.yaml}")


def rivals(node: Journey) -> str:
    """What the doctor says of a second plugin for the same cards."""
    found = wrong(node)["other plugins"]
    assert "warboy.sock" in found, found
    return found


def labelled(node: Journey) -> bool:
    """Whether the Node has every label that the vendor's feature discovery set."""
    missing = LABELS - node.labels().keys()
    assert not missing, missing
    return True
