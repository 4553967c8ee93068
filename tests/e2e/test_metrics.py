"""What a real Prometheus sees of the agent's Pod, scraped as docs/monitoring.md says."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from tests.cluster import Cluster
from tests.e2e.node import NAMESPACE, PROJECT, SOON, Node

PORT = 9099
Series = dict[str, str]


class Prometheus:
    """A Prometheus in the node's network, which finds the agent by asking the API server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def query(self, expression: str) -> list[tuple[Series, float]]:
        """An instant query: labels and value of each series."""
        url = f"http://127.0.0.1:{PORT}/api/v1/query?query={quote(expression)}"
        answer = json.loads(self._cluster.inside(url))
        assert answer["status"] == "success", answer
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def wait(self, expression: str, count: int, timeout: float = SOON) -> list[Series]:
        """Waits until the query has this many series; returns their labels."""
        found: list[Series] = []

        def so() -> bool:
            found[:] = [labels for labels, _ in self.query(expression)]
            assert len(found) == count, found
            return True

        self._cluster.wait_for(expression, so, timeout)
        return found


@pytest.fixture(scope="module")
def prometheus(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes every second, with the scrape job of docs/monitoring.md and the rules of k8s/."""
    cluster, directory = node.cluster, tmp_path_factory.mktemp("prometheus")
    text = (PROJECT / "docs/monitoring.md").read_text()
    found = re.search(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    assert found, "docs/monitoring.md has no scrape_configs"
    config = yaml.safe_load(found[1])
    # Debian's Prometheus is built without Kubernetes discovery: it gets the same labels by a file.
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]
        job["file_sd_configs"] = [{"files": [str(directory / "targets.json")]}]
    rule = yaml.safe_load((PROJECT / "k8s/components/alerts/prometheusrule.yaml").read_text())
    groups = [{**group, "interval": "2s"} for group in rule["spec"]["groups"]]
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "2s",
    }
    config["rule_files"] = [str(directory / "rules.yaml")]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    node.deploy({"metrics": {"interval": 1}})
    (directory / "targets.json").write_text(json.dumps(discovered(node)))
    with running(cluster, directory):
        made = Prometheus(cluster)
        made.wait("up == 1", 1, 2 * SOON)
        yield made
    node.deploy({"defaultPe": "Fusion"})


def discovered(node: Node) -> list[dict[str, Any]]:
    """The agent's Pod as kubernetes_sd_configs of role pod would find it."""
    (pod,) = node.agent_pods()
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
def running(cluster: Cluster, directory: Path) -> Iterator[None]:
    """A Prometheus with the prometheus.yaml of this directory."""
    command = (
        "prometheus",
        f"--config.file={directory}/prometheus.yaml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{PORT}",
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(cluster.command(*command), stdout=log, stderr=log)
        try:
            yield
        finally:
            kill = cluster.command("pkill", "-KILL", "-f", f"config.file={directory}")
            subprocess.run(kill, check=False)
            process.wait(10)
            print((directory / "log").read_text()[-2000:])


@pytest.fixture(autouse=True)
def well_again(node: Node, prometheus: Prometheus) -> Iterator[None]:  # noqa: ARG001 (it deploys)
    """Whatever a test did to cards and config is undone."""
    node.wait_allocatable(2)
    yield
    node.delete_pods()
    for card in ("npu0", "npu1"):
        node.fault(card, "ok")
    node.configure("metrics: {interval: 1}\n")
    node.wait_allocatable(2)


def test_the_page_has_cards_and_proof_of_registration(prometheus: Prometheus) -> None:
    alive = prometheus.wait("furiosa_npu_alive == 1", 2)
    assert {series["device"] for series in alive} == {"npu0", "npu1"}
    assert {series["arch"] for series in alive} == {"warboy"}
    prometheus.wait('npu_agent_registered{resource="beta.furiosa.ai/npu"} == 1', 1)
    # A card that nobody holds is not taken for the agent's own.
    assert not any("pod" in series for series in alive), alive
    assert {series["hostname"] for series in alive} == {"npu-node-1"}


def test_a_pod_shows_up_with_its_card_and_is_gone_after_it(
    node: Node, prometheus: Prometheus
) -> None:
    node.run("worker", 1)
    began = time.monotonic()
    (held,) = prometheus.wait('furiosa_npu_assigned{pod="worker"}', 1)
    print(f"a Pod that runs is on the page after {time.monotonic() - began:.1f} s")
    assert (held["namespace"], held["container"]) == ("default", "main")
    assert held["device"] == node.environment("worker", "NPU_DEVNAME")[:4]
    (temperature, *_) = [
        series for series, _ in prometheus.query(f'furiosa_npu_alive{{device="{held["device"]}"}}')
    ]
    assert temperature["pod"] == "worker"
    node.delete_pods("worker")
    began = time.monotonic()
    prometheus.wait("furiosa_npu_assigned", 0)
    prometheus.wait('furiosa_npu_alive{pod=""}', 2)
    print(f"a Pod that ended is off the page after {time.monotonic() - began:.1f} s")


def test_two_pods_on_one_card_are_told_apart_by_core(node: Node, prometheus: Prometheus) -> None:
    node.configure("defaultPe: Single\nmetrics: {interval: 1}\n")
    node.wait_allocatable(4)
    # Filling cards that are partly used comes first, so the two share a card.
    for name in ("first", "second"):
        node.run(name, 1)
    held = prometheus.wait("furiosa_npu_assigned", 2)
    assert len({series["device"] for series in held}) == 1, held
    assert {series["core"] for series in held} == {"0", "1"}
    cores = {series["core"]: series["pod"] for series in held}
    for series in prometheus.wait("furiosa_npu_core_utilization{pod!=''}", 2):
        assert series["pod"] == cores[series["core"]]
    # The card is nobody's alone.
    assert all("pod" not in series for series, _ in prometheus.query("furiosa_npu_alive"))


@pytest.mark.one_kubelet
def test_a_killed_card_raises_its_alert(node: Node, prometheus: Prometheus) -> None:
    node.fault("npu1", "dead")
    alert = 'ALERTS{alertname="NpuCardUnhealthy",alertstate="firing"}'
    (firing,) = prometheus.wait(alert, 1, 120 + SOON)
    assert (firing["device"], firing["hostname"]) == ("npu1", node.name)
    assert firing["severity"] == "critical"
    node.fault("npu1", "ok")
    prometheus.wait(alert, 0, 60 + SOON)


def test_probes_tell_the_agent_from_its_surroundings(node: Node, prometheus: Prometheus) -> None:
    def ready() -> bool:
        (pod,) = node.agent_pods()
        conditions = {c["type"]: c["status"] for c in pod["status"]["conditions"]}
        return bool(conditions["Ready"] == "True")

    def ask(path: str) -> str:
        script = (
            f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100{path}').read())"
        )
        (pod,) = node.agent_pods()
        return node.cluster.exec(
            pod["metadata"]["name"], "/opt/npu-agent/bin/python", "-c", script, namespace=NAMESPACE
        )

    node.cluster.wait_for("the agent to be ready", ready, SOON)
    assert "ok" in ask("/healthz")
    assert '"ready": true' in ask("/readyz")
    assert "npu0" in ask("/status.json")
    # A config that is refused makes it unready; it goes on serving, and nobody kills it.
    before = [pod["metadata"]["uid"] for pod in node.agent_pods()]
    node.configure("defaultPe: Sinlge\n")
    node.cluster.wait_for("the agent to be unready", lambda: not ready(), SOON)
    (config,) = prometheus.wait("npu_agent_config_last_load_successful == 0", 1)
    assert config["hostname"] == node.name
    node.run("served", 1)
    node.configure("metrics: {interval: 1}\n")
    node.cluster.wait_for("the agent to be ready again", ready, SOON)
    assert [pod["metadata"]["uid"] for pod in node.agent_pods()] == before


@pytest.mark.one_kubelet
def test_scrapes_go_on_while_others_hang_or_are_away(node: Node, prometheus: Prometheus) -> None:
    """No time is asserted: every scrape within a second succeeds, and the times are shown."""
    cluster = node.cluster

    def calm(what: str, seconds: int) -> None:
        time.sleep(seconds)  # the length of the trouble
        window = f"[{seconds}s]"
        ((_, ups),) = prometheus.query(f"min_over_time(up{window})")
        ((_, longest),) = prometheus.query(f"max_over_time(scrape_duration_seconds{window})")
        print(f"{what}: the longest scrape of {seconds} s took {longest * 1000:.1f} ms")
        assert ups == 1, what

    calm("all well", 10)
    node.fault("npu1", "hang")
    node.wait_allocatable(1)
    calm("a card hangs", 10)
    node.fault("npu1", "ok")
    node.wait_allocatable(2)
    cluster.signal_kubelet(signal.SIGSTOP)
    try:
        calm("the kubelet is stopped", 15)
    finally:
        cluster.signal_kubelet(signal.SIGCONT)
    node.wait_allocatable(2, 2 * SOON)
    cluster.stop_api_server()
    try:
        node.fault("npu1", "gone")  # so that there are labels and Events to be sent
        calm("the API server is away", 15)
        node.fault("npu1", "back")
    finally:
        cluster.start_api_server()
    node.wait_allocatable(2, 4 * SOON)
    node.wait_edits_arrive()
