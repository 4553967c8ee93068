"""What the scenarios do with the node, and how they ask the cluster, never the agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from npu_agent.kubelet.pods import Pods
from tests.cluster import Cluster, ClusterError, settings

RESOURCE = "beta.furiosa.ai/npu"
NAMESPACE = "kube-system"
PROJECT = Path(__file__).parents[2]
WORKLOAD = "localhost/workload:1"
IMAGE = "localhost/npu-agent:test"

CGROUPS = "/sys/fs/cgroup"

SOON = 30.0
"""Seconds that anything may take that takes one or two on an idle machine."""


@contextlib.contextmanager
def simulated(cluster: Cluster, cards: str) -> Iterator[None]:
    """Keeps a simulated driver tree alive as the node's /sys and /dev."""
    command = [sys.executable, "-m", "npu_agent", "simulate", str(cluster.host_root)]
    subprocess.run([*command, "--cards", cards, "--once"], check=True, stdout=subprocess.DEVNULL)
    alive = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        alive.terminate()
        alive.wait(10)


def unified() -> str:
    """Where this machine has its cgroups of version 2; the runtime puts containers there too."""
    beside = Path(CGROUPS, "unified")
    return str(beside) if beside.is_dir() else CGROUPS


class Node:
    """The one node of a cluster, with the agent deployed by the manifests of k8s/."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = cluster.node_name
        cluster.kubectl("label", "node", self.name, "npu-agent/enabled=true", "--overwrite")

    def deploy(self, config: dict[str, Any], kustomization: str = "k8s") -> None:
        """Applies k8s/ with this config, and waits until the rollout is complete.

        Three things differ from what users apply: the image's name; the host's /sys and /dev, which
        are the simulated ones; where a machine with cgroups of version 1 has those of version 2.
        """
        rendered = self.cluster.kubectl("kustomize", str(PROJECT / kustomization))
        objects = list(yaml.safe_load_all(rendered))
        for thing in objects:
            if thing["kind"] == "ConfigMap":
                thing["data"]["config.yaml"] = yaml.safe_dump(config)
            if thing["kind"] == "DaemonSet":
                pod = thing["spec"]["template"]["spec"]
                pod["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never"}
                for volume in pod["volumes"]:
                    host = volume.get("hostPath", {}).get("path", "")
                    if host == CGROUPS:
                        volume["hostPath"]["path"] = unified()
                    elif host.startswith(("/sys/", "/dev")):
                        volume["hostPath"]["path"] = f"{self.cluster.host_root}{host}"
        self.cluster.apply(objects)
        self.restart()

    def restart(self) -> None:
        """Rolls the DaemonSet over, and waits until that is complete."""
        here = ("daemonset/npu-agent", "--namespace", NAMESPACE)
        self.cluster.kubectl("rollout", "restart", *here)
        self.cluster.kubectl("rollout", "status", *here, "--timeout=60s")
        self.cluster.wait_for("the agent before to end", lambda: len(self._all_agents()) == 1, SOON)

    def configure(self, text: str) -> None:
        """Edits the ConfigMap and nothing else: the agent has to follow by itself."""
        patch = json.dumps({"data": {"config.yaml": text}})
        where = ("configmap", "npu-device-plugin", "--namespace", NAMESPACE)
        self.cluster.kubectl("patch", *where, "--patch", patch)

    def wait_edits_arrive(self) -> None:
        """Waits until the kubelet brings edits of the ConfigMap to the agent again.

        After an outage of the API server that takes it up to a minute.
        """
        self.configure("disabledDevices: [{devName: npu1}]\n")
        self.wait_allocatable(1, 4 * SOON)

    def label(self, labels: Mapping[str, str | None]) -> None:
        """Sets labels of the Node by hand; None takes one away."""
        words = [f"{key}-" if value is None else f"{key}={value}" for key, value in labels.items()]
        self.cluster.kubectl("label", "node", self.name, "--overwrite", *words)

    def fault(self, card: str, fault: str) -> None:
        """Does something to a simulated card."""
        simulate = [sys.executable, "-m", "npu_agent", "simulate", str(self.cluster.host_root)]
        command = [*simulate, "fault", card, fault]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def allocatable(self) -> int | None:
        """How many devices the kubelet offers; None if it does not know the resource."""
        return self._count("allocatable")

    def capacity(self) -> int | None:
        """How many devices the kubelet knows, healthy or not."""
        return self._count("capacity")

    def _count(self, what: str) -> int | None:
        count = self.cluster.get("node", self.name)["status"][what].get(RESOURCE)
        return None if count is None else int(count)

    def wait_allocatable(self, count: int, timeout: float = SOON) -> None:
        """Waits until the kubelet offers this many devices."""
        self.cluster.wait_for(
            f"allocatable to be {count}",
            lambda: (seen := self.allocatable()) == count or _not_yet(seen),
            timeout,
        )

    def create(self, name: str, npus: int, **spec: str) -> None:
        """Creates a Pod that asks for NPUs and sleeps; a `nodeName` passes the scheduler by."""
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {
                    **spec,
                    "terminationGracePeriodSeconds": 0,
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "main",
                            "image": WORKLOAD,
                            "imagePullPolicy": "Never",
                            "command": ["sleep", "100000"],
                            "resources": {"limits": {RESOURCE: str(npus)}},
                        }
                    ],
                },
            }
        )

    def pod(self, name: str) -> dict[str, Any]:
        """A Pod as the API server has it."""
        return self.cluster.get("pod", name, "default")

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

        return self.cluster.wait_for(f"Pod {name} to be {phase}", reached, timeout)

    def environment(self, name: str, variable: str) -> str:
        """A variable in the environment of a Pod's container."""
        return self.cluster.exec(name, "sh", "-c", f'echo "${variable}"').strip()

    def nodes_in(self, name: str) -> set[str]:
        """The NPU device nodes in a Pod, each proven to open for reading and writing."""
        opened = ': <>"$n" && echo "$n"'
        script = f'for n in /dev/npu* /dev/rngd/*; do [ ! -e "$n" ] || {{ {opened}; }}; done'
        return set(self.cluster.exec(name, "sh", "-c", script).split())

    def wait_known(self, name: str) -> None:
        """Waits until the agent knows which Pod holds an NPU.

        A grant whose Pod it has never seen counts as held for a minute, and stays on the disk.
        """
        (agent,) = self.agent_pods()
        page = f"http://{agent['status']['podIP']}:9100/metrics"
        known = f'pod="{name}"'
        self.cluster.wait_for(
            f"the agent to know of {name}", lambda: known in self.cluster.inside(page), SOON
        )

    def delete_pods(self, *names: str) -> None:
        """Deletes Pods, all workloads if none is named, and waits until they have ended.

        Those with no time to end in are gone from the API server two seconds before that.
        """
        found = [each["metadata"] for each in self.cluster.objects("pod", "default")]
        uids = [each["uid"] for each in found if not names or each["name"] in names]
        which = names or ("--all",)
        self.cluster.kubectl("delete", "pod", *which, "--namespace", "default", "--timeout=60s")
        here = Pods(Path("/nowhere"), Path("/"))
        self.cluster.wait_for(
            "their containers to end", lambda: not asyncio.run(here.living(uids)), SOON
        )

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
        others = f"sleep {seconds[:-1]}[{seconds[-1]}]"  # not a pattern that matches itself
        return bool(self.cluster.enter("pgrep", "-f", others, check=False).stdout)

    def restarts(self) -> dict[str, int]:
        """How often the container of each workload was restarted."""
        return {
            pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
            for pod in self.cluster.objects("pod", "default")
        }

    def agent_pods(self) -> list[dict[str, Any]]:
        """The agent's own Pods that are not being deleted."""
        return [one for one in self._all_agents() if "deletionTimestamp" not in one["metadata"]]

    def _all_agents(self) -> list[dict[str, Any]]:
        selector = "app.kubernetes.io/name=npu-agent"
        return self.cluster.objects("pod", NAMESPACE, labelSelector=selector)

    def kill_agent(self) -> None:
        """Ends the agent's process as a crash does: SIGKILL."""
        kill = self.cluster.command("pkill", "-KILL", "-f", "npu-agent run --config-file=/etc/")
        subprocess.run(kill, check=True)

    def in_agent(self, *command: str) -> str:
        """Runs a command in the agent's container."""
        name = self.agent_pods()[0]["metadata"]["name"]
        return self.cluster.exec(name, *command, namespace=NAMESPACE)

    def held(self) -> dict[str, str]:
        """The device ID that the kubelet says each running workload holds."""
        rows = json.loads(self.in_agent("npu-agent", "allocations", "--format", "json"))
        return {row["pod"]: row["device"] for row in rows if row["resource"] == RESOURCE}

    def story(self) -> str:
        """What happened, for a failed test."""
        lines = []
        for pod in self.agent_pods():
            with contextlib.suppress(ClusterError):
                name = pod["metadata"]["name"]
                lines += [f"--- {name}", self.cluster.logs(name, NAMESPACE)]
        lines += ["--- pods", self.cluster.kubectl("get", "pods", "-A", "-o", "wide", check=False)]
        events = self.cluster.kubectl("get", "events", "-A", check=False).splitlines()
        return "\n".join([*lines, "--- events", *events[-20:]])


def _not_yet(seen: object) -> bool:
    raise AssertionError(f"it is {seen}")
