"""What a real Prometheus sees of the agent's Pod, scraped as docs/monitoring.md says."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from tests.cluster import Cluster
from tests.e2e.manifests import RESOURCE
from tests.e2e.node import PROJECT, SOON, Node

pytestmark = pytest.mark.one_kubelet
PAGE = (PROJECT / "docs/monitoring.md").read_text(encoding="utf-8")
PORT = 9099
CONFIG = {"metrics": {"interval": 1}}
Series = dict[str, str]


class Prometheus:
    """A Prometheus in the node's network, which finds the agent by asking the API server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def query(self, expression: str) -> list[tuple[Series, float]]:
        """An instant query: labels and value of each series."""
        result = self._get(f"query?query={quote(expression)}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """The alerts of this name that fire, with labels and annotations."""
        return [
            alert
            for alert in self._get("alerts")["alerts"]
            if alert["labels"]["alertname"] == name and alert["state"] == "firing"
        ]

    def wait(self, expression: str, count: int, timeout: float = SOON) -> list[Series]:
        """Waits until the query has this many series; returns their labels."""
        found: list[Series] = []

        def so() -> bool:
            found[:] = [labels for labels, _ in self.query(expression)]
            assert len(found) == count, found
            return True

        self._cluster.wait_for(expression, so, timeout)
        return found

    def _get(self, path: str) -> dict[str, Any]:
        answer = json.loads(self._cluster.inside(f"http://127.0.0.1:{PORT}/api/v1/{path}"))
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data


@pytest.fixture(scope="module")
def prometheus(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes every second, with the scrape job of docs/monitoring.md and the rules of k8s/."""
    directory = tmp_path_factory.mktemp("prometheus")
    rule = yaml.safe_load(
        (PROJECT / "k8s/components/alerts/prometheusrule.yaml").read_text(encoding="utf-8")
    )
    groups = [{**group, "interval": "2s"} for group in rule["spec"]["groups"]]
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    node.deploy(CONFIG)
    with scraping(node, directory, {}, rule_files=[str(directory / "rules.yaml")]) as made:
        yield made
    node.deploy()


def discovered(node: Node) -> list[dict[str, Any]]:
    """The agent's Pod as kubernetes_sd_configs of role pod would find it."""
    pod = node.agent()
    (container,) = pod["spec"]["containers"]
    meta = {
        "pod_name": pod["metadata"]["name"],
        "namespace": pod["metadata"]["namespace"],
        "pod_node_name": pod["spec"]["nodeName"],
        "pod_container_name": container["name"],
        "pod_container_port_name": container["ports"][0]["name"],
    }
    for key, value in pod["metadata"]["labels"].items():
        meta["pod_label_" + re.sub("[^A-Za-z0-9]", "_", key)] = value
    labels = {f"__meta_kubernetes_{name}": value for name, value in meta.items()}
    address = f"{pod['status']['podIP']}:{container['ports'][0]['containerPort']}"
    return [{"targets": [address], "labels": labels}]


@contextlib.contextmanager
def scraping(
    node: Node, directory: Path, more: dict[str, Any], **settings: Any
) -> Iterator[Prometheus]:
    """A Prometheus with the scrape job of docs/monitoring.md and `more`, each second."""
    found = re.search(r"```yaml\n(scrape_configs:.*?)```", PAGE, re.DOTALL)
    assert found, "docs/monitoring.md has no scrape_configs"
    config = yaml.safe_load(found[1]) | settings
    (job,) = config["scrape_configs"]
    # Debian's Prometheus is built without Kubernetes discovery: it gets the same labels by a file.
    del job["kubernetes_sd_configs"]
    job |= {**more, "file_sd_configs": [{"files": [str(directory / "targets.json")]}]}
    every = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config["global"] = dict.fromkeys(every, "1s")
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (directory / "targets.json").write_text(json.dumps(discovered(node)), encoding="utf-8")
    command = (
        "prometheus",
        f"--config.file={directory}/prometheus.yaml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{PORT}",
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(node.cluster.command(*command), stdout=log, stderr=log)
        try:
            made = Prometheus(node.cluster)
            made.wait("up == 1", 1, 2 * SOON)
            yield made
        finally:
            kill = node.cluster.command("pkill", "-KILL", "-f", f"config.file={directory}")
            subprocess.run(kill, check=False)
            process.wait(10)
            print((directory / "log").read_text(encoding="utf-8")[-2000:])


@pytest.fixture(autouse=True)
def kept(node: Node, prometheus: Prometheus, repaired: None) -> Iterator[None]:  # noqa: ARG001
    """What a test did to cards and config is undone."""
    yield
    node.configure(CONFIG)


def test_a_pod_shows_up_with_its_card_and_is_gone_after_it(
    node: Node, prometheus: Prometheus
) -> None:
    alive = prometheus.wait("furiosa_npu_alive == 1", 2)
    assert {series["device"] for series in alive} == {"npu0", "npu1"}
    assert {series["arch"] for series in alive} == {"warboy"}
    assert {series["hostname"] for series in alive} == {"npu-node-1"}
    prometheus.wait("avg by (uuid) (furiosa_npu_core_utilization)", 2)
    # A card without a holder is not taken for the agent's own.
    assert not any("pod" in series for series in alive), alive
    prometheus.wait(f'npu_agent_registered{{resource="{RESOURCE}"}} == 1', 1)

    node.run("worker", 1)
    (held,) = prometheus.wait('furiosa_npu_assigned{pod="worker"}', 1)
    assert (held["namespace"], held["container"]) == ("default", "main")
    assert held["device"] == node.environment("worker", "NPU_DEVNAME")[:4]
    (card,) = prometheus.wait('furiosa_npu_alive{pod="worker"}', 1)
    assert card["device"] == held["device"]
    prometheus.wait('npu:core_seconds:used30s{pod="worker"} > 0', 1)
    node.delete_pods("worker")
    prometheus.wait("furiosa_npu_assigned", 0)
    prometheus.wait('furiosa_npu_alive{pod=""}', 2)


def test_a_broken_edit_makes_the_agent_unready_and_changes_nothing(
    node: Node, prometheus: Prometheus
) -> None:
    node.wait_for("the agent to be ready", node.agent_ready)
    before = node.agent_run()
    node.configure("defaultPe: Single\ninterval: soon\n")
    node.wait_equal("the agent to be unready", node.agent_ready, False)
    prometheus.wait("npu_agent_config_last_load_successful == 0", 1)
    # The log names line and key.
    assert "config.yaml:2: interval" in node.log()
    assert (node.capacity(), node.allocatable()) == (2, 2)
    node.run("served", 1)
    node.configure(CONFIG)
    node.wait_for("the agent to be ready again", node.agent_ready)
    assert node.agent_run() == before
