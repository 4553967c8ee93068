"""What the scenarios do with the node, and how they ask the cluster, never the agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from npu_agent.kubelet.pods import Pods
from npu_agent.people.simulator import apply_fault
from tests.cluster import Cluster, ClusterError, Image, settings
from tests.e2e.manifests import IMAGE, RESOURCE, npu_pod

NAMESPACE = "kube-system"
PROJECT = Path(__file__).parents[2]
AGENT = ("daemonset/npu-agent", "--namespace", NAMESPACE)
OURS = "app.kubernetes.io/name=npu-agent"
"""The selector of the agent's Pods."""
SIMULATE = (sys.executable, "-m", "npu_agent", "simulate")

CONFIG_FILE = "/etc/npu-agent/config.yaml"
CGROUPS = "/sys/fs/cgroup"

QUICK = {"syncFrequency": "1s"}
"""For a kubelet: it brings an edited ConfigMap into a Pod at its next sync, by default within a
minute."""
SOON = 30.0
"""Seconds that anything may take that takes one or two on an idle machine."""


@contextlib.contextmanager
def started(
    cards: str, *images: Image, name: str = "npu-node-1", **options: Any
) -> Iterator[Cluster]:
    """A cluster of one node with simulated cards, and images for its Pods.

    Args:
        cards: those of the node, as `npu-agent simulate` takes them.
        images: what Pods run.
        name: the Node's; clusters that run at the same time have different ones.
        options: more for `Cluster.start`.
    """
    options = {"kubelet_config": QUICK} | options
    with (
        Cluster.start(_workdir(), node_name=name, **options) as cluster,
        simulated(cluster, cards),
    ):
        _import(cluster, images)
        yield cluster


@contextlib.contextmanager
def joined(first: Cluster, cards: str, *images: Image, name: str) -> Iterator[Cluster]:
    """A second node of a cluster, with cards and images of its own; see `started`."""
    with (
        first.join(_workdir(), name, kubelet_config=QUICK) as cluster,
        simulated(cluster, cards),
    ):
        _import(cluster, images)
        yield cluster


def _workdir() -> Path:
    # Short, because the plugin's socket is below it: a unix socket's path has 107 bytes at most.
    return Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))


def _import(cluster: Cluster, images: Iterable[Image]) -> None:
    for image in images:
        cluster.import_image(image.archive)


@contextlib.contextmanager
def simulated(cluster: Cluster, cards: str) -> Iterator[None]:
    """Keeps a simulated driver tree alive as the node's /sys and /dev."""
    command = [*SIMULATE, str(cluster.host_root)]
    subprocess.run([*command, "--cards", cards, "--once"], check=True, stdout=subprocess.DEVNULL)
    alive = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        alive.terminate()
        alive.wait(10)


def unified() -> str:
    """Where this machine has its cgroups of version 2; the runtime puts containers there too."""
    hybrid = Path(CGROUPS, "unified")
    return str(hybrid) if hybrid.is_dir() else CGROUPS


class Node:
    """A node of a cluster, with the agent deployed by the manifests of k8s/.

    `kubectl`, `get`, `objects`, `apply` and `wait_for` are those of the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = cluster.node_name
        self.kubectl = cluster.kubectl
        self.get = cluster.get
        self.objects = cluster.objects
        self.apply = cluster.apply
        self.wait_for = cluster.wait_for
        self.wait_equal = cluster.wait_equal
        self.label({"npu-agent/enabled": "true"})

    # --- the agent ------------------------------------------------------------------------------

    def deploy(self, config: dict[str, Any] | None = None, kustomization: str = "k8s") -> None:
        """Applies k8s/ with this config, and waits until the rollout is complete.

        Three things differ from what users apply: the image's name; the host's /sys and /dev, which
        are the simulated ones; where a machine with cgroups of version 1 has those of version 2.
        """
        rendered = self.kubectl("kustomize", str(PROJECT / kustomization))
        objects = list(yaml.safe_load_all(rendered))
        for thing in objects:
            if thing["kind"] == "ConfigMap":
                thing["data"]["config.yaml"] = yaml.safe_dump(config or {})
            if thing["kind"] == "DaemonSet":
                pod = thing["spec"]["template"]["spec"]
                pod["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never"}
                for volume in pod["volumes"]:
                    host = volume.get("hostPath", {}).get("path", "")
                    if host == CGROUPS:
                        volume["hostPath"]["path"] = unified()
                    elif host.startswith(("/sys/", "/dev")):
                        volume["hostPath"]["path"] = f"{self.cluster.host_root}{host}"
        self.apply(objects)
        self.restart()
        wanted = yaml.safe_dump(config or {})
        if self.config_in_pod() != wanted:
            self._restart_with(wanted)

    def config_in_pod(self) -> str:
        """The config file as the kubelet has brought it into the agent's Pod."""
        return self.in_agent("cat", CONFIG_FILE)

    def _restart_with(self, config: str) -> None:
        """Restarts the agent once its Pod has this file: a minute after the API server's outage."""
        self.wait_equal("the config in the Pod", self.config_in_pod, config, 4 * SOON)
        self.restart()

    def restart(self) -> None:
        """Rolls the DaemonSet over, and waits until that is complete."""
        self.kubectl("rollout", "restart", *AGENT)
        self.kubectl("rollout", "status", *AGENT, "--timeout=60s")
        self.wait_equal("one agent", lambda: len(self.all_agents()), 1)

    def configure(self, config: str | dict[str, Any]) -> None:
        """Edits the ConfigMap and nothing else: the agent has to follow by itself."""
        text = config if isinstance(config, str) else yaml.safe_dump(config)
        patch = json.dumps({"data": {"config.yaml": text}})
        where = ("configmap", "npu-device-plugin", "--namespace", NAMESPACE)
        self.kubectl("patch", *where, "--patch", patch)

    def configure_and_restart(self, config: dict[str, Any]) -> None:
        """Edits the ConfigMap, and restarts the agent with the edit."""
        self.configure(config)
        self._restart_with(yaml.safe_dump(config))

    def all_agents(self) -> list[dict[str, Any]]:
        """The agent's Pods on this node, with those that are being deleted."""
        here = f"spec.nodeName={self.name}"
        return self.objects("pod", NAMESPACE, labelSelector=OURS, fieldSelector=here)

    def agent_pods(self) -> list[dict[str, Any]]:
        """The agent's Pods that are not being deleted."""
        return [one for one in self.all_agents() if "deletionTimestamp" not in one["metadata"]]

    def agent(self) -> dict[str, Any]:
        """The agent's one Pod."""
        (found,) = self.agent_pods()
        return found

    def agent_run(self) -> tuple[str, int]:
        """The UID of the agent's one Pod, and how often its container was restarted."""
        pod = self.agent()
        return pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]

    def agent_ready(self) -> bool:
        """Whether the agent's one Pod is ready."""
        return bool(self.agent()["status"]["containerStatuses"][0]["ready"])

    def log(self) -> str:
        """What the agent has logged."""
        return self.cluster.logs(self.agent()["metadata"]["name"], NAMESPACE)

    def serves(self) -> bool:
        """Whether the one agent has registered, by its own log."""
        return "registered resource" in self.log()

    def kill_agent(self) -> None:
        """Ends the agent's process as a crash does: SIGKILL."""
        self.signal_agent("KILL")

    def signal_agent(self, signal: str) -> None:
        """Sends a signal to the agent's process."""
        pattern = "npu-agent run"
        subprocess.run(self.cluster.command("pkill", f"-{signal}", "-f", pattern), check=True)

    def wait_restarted(self, before: tuple[str, int], timeout: float = 2 * SOON) -> None:
        """Waits until the agent's container was restarted once since `agent_run`, and is ready."""
        uid, count = before
        self.wait_equal("the agent to be restarted", self.agent_run, (uid, count + 1), timeout)
        self.wait_for("the agent to be ready", self.agent_ready)

    @contextlib.contextmanager
    def without_agent(self) -> Iterator[None]:
        """No agent runs on the node meanwhile."""
        self.label({"npu-agent/enabled": "false"})
        try:
            self.wait_for("the agent to be gone", lambda: not self.all_agents())
            yield
        finally:
            self.label({"npu-agent/enabled": "true"})

    def in_agent(self, *command: str) -> str:
        """Runs a command in the agent's container."""
        name = self.agent_pods()[0]["metadata"]["name"]
        return self.cluster.exec(name, *command, namespace=NAMESPACE)

    def page(self, path: str) -> str:
        """A page of the agent."""
        return self.cluster.inside(f"http://{self.agent()['status']['podIP']}:9100{path}")

    def cards(self) -> list[dict[str, Any]]:
        """The cards as the agent's status page has them."""
        found: list[dict[str, Any]] = json.loads(self.page("/status.json"))["cards"]
        return found

    def wait_known(self, name: str) -> None:
        """Waits until the agent knows which card a Pod holds.

        A grant whose Pod it has never seen counts as held for a minute, and stays on the disk.
        """

        def known() -> bool:
            return any(one["pod"] == name for card in self.cards() for one in card["holders"])

        self.wait_for(f"the agent to know of {name}", known)

    def held(self) -> dict[str, str]:
        """The device ID that the kubelet says each running workload holds."""
        rows = json.loads(self.in_agent("npu-agent", "allocations", "--format", "json"))
        return {row["pod"]: row["device"] for row in rows if row["resource"] == RESOURCE}

    # --- the Node and its cards -----------------------------------------------------------------

    def label(self, labels: Mapping[str, str | None]) -> None:
        """Sets labels of the Node by hand; None takes one away."""
        words = [f"{key}-" if value is None else f"{key}={value}" for key, value in labels.items()]
        self.kubectl("label", "node", self.name, "--overwrite", *words)

    def labels(self) -> dict[str, str]:
        """The Node's labels."""
        found: dict[str, str] = self.get("node", self.name)["metadata"]["labels"]
        return found

    def conditions(self) -> dict[str, dict[str, Any]]:
        """The Node's conditions, by type."""
        return {one["type"]: one for one in self.get("node", self.name)["status"]["conditions"]}

    def fault(self, fault: str, *cards: str) -> None:
        """Does something to simulated cards."""
        for card in cards:
            apply_fault(self.cluster.host_root, card, fault)

    def allocatable(self, resource: str = RESOURCE) -> int | None:
        """How many devices the kubelet offers; None if it does not know the resource."""
        count = self.get("node", self.name)["status"]["allocatable"].get(resource)
        return None if count is None else int(count)

    def capacity(self) -> int | None:
        """How many devices the kubelet knows, healthy or not."""
        count = self.get("node", self.name)["status"]["capacity"].get(RESOURCE)
        return None if count is None else int(count)

    def wait_allocatable(
        self, count: int, timeout: float = SOON, *, resource: str = RESOURCE
    ) -> None:
        """Waits until the kubelet offers this many devices."""
        self.wait_equal("allocatable", lambda: self.allocatable(resource), count, timeout)

    # --- Pods -----------------------------------------------------------------------------------

    def pod(self, name: str) -> dict[str, Any]:
        """A Pod as the API server has it."""
        return self.get("pod", name, "default")

    def create(self, name: str, npus: int, **spec: str) -> None:
        """Creates a Pod that asks for NPUs and sleeps; a `nodeName` passes the scheduler by."""
        self.apply(npu_pod(name, npus, **spec))

    def run(self, name: str, npus: int) -> None:
        """Creates a Pod and waits until it runs."""
        self.create(name, npus)
        self.wait_phase(name, "Running")

    def wait_phase(self, name: str, phase: str, timeout: float = SOON) -> dict[str, Any]:
        """Waits until a Pod is in this phase; returns it."""

        def reached() -> dict[str, Any]:
            pod = self.pod(name)
            status = pod["status"]
            assert status["phase"] == phase, {k: status.get(k) for k in ("phase", "message")}
            return pod

        return self.wait_for(f"Pod {name} to be {phase}", reached, timeout)

    def wait_unschedulable(self, name: str, why: str = f"Insufficient {RESOURCE}") -> None:
        """Waits until the scheduler has refused a Pod, and says why."""

        def refused() -> bool:
            status = self.pod(name)["status"]
            conditions = {one["type"]: one for one in status.get("conditions", ())}
            assert status["phase"] == "Pending"
            assert conditions["PodScheduled"]["status"] == "False"
            assert why in conditions["PodScheduled"]["message"], conditions
            return True

        self.wait_for(f"Pod {name} to be refused by the scheduler", refused)

    def environment(self, name: str, variable: str) -> str:
        """A variable in the environment of a Pod's container."""
        return self.cluster.exec(name, "sh", "-c", f'echo "${variable}"').strip()

    def nodes_in(self, name: str) -> set[str]:
        """The NPU device nodes in a Pod, each proven to open for reading and writing."""
        opened = ': <>"$n" && echo "$n"'
        script = f'for n in /dev/npu* /dev/rngd/*; do [ ! -e "$n" ] || {{ {opened}; }}; done'
        return set(self.cluster.exec(name, "sh", "-c", script).split())

    def delete_pods(self, *names: str) -> None:
        """Deletes Pods, all workloads if none is named, and waits until they have ended.

        Those with no time to end in are gone from the API server two seconds before that.
        """
        found = [each["metadata"] for each in self.objects("pod", "default")]
        uids = [each["uid"] for each in found if not names or each["name"] in names]
        which = names or ("--all",)
        self.kubectl("delete", "pod", *which, "--namespace", "default", "--timeout=60s")
        here = Pods(Path("/nowhere"), Path("/"))
        self.wait_for("their containers to end", lambda: not asyncio.run(here.running(uids)))

    def delete_by_force(self, *names: str) -> None:
        """Deletes Pods from the API server, and does not wait for their containers."""
        which = names or ("--all",)
        self.kubectl("delete", "pod", *which, "-n=default", "--force", "--grace-period=0")

    def forget_pod(self, name: str) -> None:
        """Takes a Pod away from the API server behind its back.

        As it is after a kubelet was cut off while the Pod was deleted by force: it gives the
        containers their whole terminationGracePeriodSeconds, and no list has the Pod any more.
        """
        request = {"key": base64.b64encode(f"/registry/pods/default/{name}".encode()).decode()}
        url = f"http://127.0.0.1:{settings.ETCD_PORT}/v3/kv/deleterange"
        script = "import sys, urllib.request as u; u.urlopen(sys.argv[1], sys.argv[2].encode())"
        self.cluster.enter(sys.executable, "-c", script, url, json.dumps(request))

    def sleeps(self, seconds: str) -> bool:
        """Whether there is a process ``sleep <seconds>``, in whatever container."""
        return bool(self.cluster.enter("pgrep", "-f", _pattern(seconds), check=False).stdout)

    def end_sleep(self, seconds: str) -> None:
        """Kills the process ``sleep <seconds>``, in whatever container."""
        self.cluster.enter("pkill", "-KILL", "-f", _pattern(seconds), check=False)

    def restarts(self) -> dict[str, int]:
        """How often the container of each workload was restarted."""
        return {
            pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
            for pod in self.objects("pod", "default")
        }

    def story(self) -> str:
        """What happened, for a failed test."""
        lines = []
        for pod in self.objects("pod", NAMESPACE, labelSelector=OURS):
            with contextlib.suppress(ClusterError):
                name = pod["metadata"]["name"]
                lines += [f"--- {name}", self.cluster.logs(name, NAMESPACE)]
        lines += ["--- pods", self.kubectl("get", "pods", "-A", "-o", "wide", check=False)]
        events = self.kubectl("get", "events", "-A", check=False).splitlines()
        return "\n".join([*lines, "--- events", *events[-20:]])


def _pattern(seconds: str) -> str:
    """A pattern for such a process that does not match the one that looks for it."""
    return f"sleep {seconds[:-1]}[{seconds[-1]}]"
