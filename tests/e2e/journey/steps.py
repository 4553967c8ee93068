"""The steps of the journey, each a command that docs/install.md tells people to type."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from npu_agent import __version__
from tests.cluster import ClusterError
from tests.cluster.build import HELM, GoBuild, ensure_binaries
from tests.cluster.settings import CONTAINERD_SOCKET
from tests.docs.pages import page
from tests.e2e.journey.registry import PRIVATE
from tests.e2e.manifests import container, thing
from tests.e2e.node import NAMESPACE, PROJECT, Node

K8S = PROJECT / "k8s"
RENDERED = K8S / "npu-agent.yaml"
AGENT = f"{PRIVATE}/npu-agent"
CHART = (str(K8S / "chart"), "--set", f"image.repository={AGENT}")
"""The chart, with the image of the registry."""
BUSYBOX = "docker.io/library/busybox:1.37.0"
"""What the example Pods run; the workload's image stands in for it."""
LEFT_ON_DISK = (
    "/var/lib/kubelet/device-plugins/.npu-agent.ledger.json",
    "/var/run/cdi/furiosa.ai-npu.json",
    "/etc/kubernetes/node-feature-discovery/features.d/npu-agent",
)
"""What docs/install.md says may stay on a node's disk, and how to remove it: the first two if a Pod
holds an NPU when the agent ends."""
KUBELETS_FILES = ("kubelet.sock", "kubelet_internal_checkpoint")
KINDS = (
    *("daemonset", "deployment", "replicaset", "job", "pod", "service", "configmap", "namespace"),
    *("serviceaccount", "clusterrole", "clusterrolebinding", "resourcequota"),
    *("validatingadmissionpolicy", "validatingadmissionpolicybinding"),
    *("mutatingadmissionpolicy", "mutatingadmissionpolicybinding"),
)
"""What the files of k8s/ make, but for the objects of Prometheus Operator."""


class Journey(Node):
    """The one node of a cluster that starts with nothing, and the people who work with it."""

    # --- so that the files of k8s/ work as they are -------------------------------------------

    def tag(self, image: str, name: str) -> None:
        """Gives an image that containerd has one more name."""
        ctr = ("ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "tag")
        self.cluster.enter(*ctr, "--force", image, name)

    def lead_to_simulated_sys(self) -> None:
        """Whoever mounts the host's /sys gets the simulated one."""
        name = "simulated-sys"
        volumes = "object.spec.?volumes.orValue([])"
        folders = [f"sys-{folder}" for folder in ("bus", "class", "devices")]
        path = f"{self.cluster.host_root}/sys/"
        led = ", ".join(
            f"Object.spec.volumes{{name: '{name}', hostPath: "
            f"Object.spec.volumes.hostPath{{path: '{path}{name[4:]}'}}}}"
            for name in folders
        )
        mounts = (
            f"{volumes}.exists(v, v.name == 'sys-class' "
            "&& v.?hostPath.path.orValue('') == '/sys/class')"
        )
        creation = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        change = {"expression": f"Object{{spec: Object.spec{{volumes: [{led}]}}}}"}
        spec = {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {"resourceRules": [creation | {"operations": ["CREATE"]}]},
            "matchConditions": [{"name": "mounts-sys", "expression": mounts}],
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": change}],
        }
        for kind, what in (("", spec), ("Binding", {"policyName": name})):
            api = "admissionregistration.k8s.io/v1"
            self.apply(thing(f"MutatingAdmissionPolicy{kind}", name, api, namespace="", spec=what))
        trial = pod_spec(
            volumes=[{"name": n, "hostPath": {"path": f"/sys/{n[4:]}"}} for n in folders]
        )

        def in_force() -> bool:
            found = self.admitted("trial", trial)["volumes"]
            wanted = [f"{path}{name[4:]}" for name in folders]
            return [v["hostPath"]["path"] for v in found if v["name"] in folders] == wanted

        self.wait_for("the policy to be in force", in_force)

    # --- installing and removing --------------------------------------------------------------

    def install(self) -> None:
        """Installs the rendered file, and waits until the agent serves both cards."""
        # With the image of the registry.
        text = RENDERED.read_text(encoding="utf-8")
        self.apply(text.replace(f"npu-agent:{__version__}", f"{AGENT}:{__version__}"))
        self.rolled_out()
        self.wait_allocatable(2)

    def uninstall(self) -> None:
        """Takes away what the rendered file made, if it is there."""
        self.kubectl("delete", "--ignore-not-found", "--filename", str(RENDERED))

    def component(self, name: str, verb: str = "apply") -> None:
        """Applies, or deletes, a component that stands alone."""
        self.kubectl(verb, "--kustomize", str(K8S / "components" / name))

    @contextlib.contextmanager
    def components(self, *names: str) -> Iterator[None]:
        """Components that stand alone, and that are deleted at the end."""
        try:
            for name in names:
                self.component(name)
            yield
        finally:
            for name in names:
                self.component(name, "delete")

    def rolled_out(self, what: str = "daemonset/npu-agent", namespace: str = NAMESPACE) -> None:
        """Waits until all Pods of a DaemonSet or Deployment are new and ready."""
        where = ("--namespace", namespace, "--timeout=60s")
        self.kubectl("rollout", "status", what, *where, timeout=90)

    def helm(self, *arguments: str, build: GoBuild = HELM) -> str:
        """Runs Helm, 4 unless `build` is another; returns what it prints."""
        home = self.cluster.workdir / "run" / "helm"
        homes = [f"HELM_{what}_HOME={home}" for what in ("CACHE", "CONFIG", "DATA")]
        program = str(ensure_binaries(build)["helm"])
        return self.cluster.enter("env", *homes, program, *arguments, timeout=120).stdout

    def clear_labels(self) -> None:
        """Takes our labels from all Nodes, as docs/install.md says."""
        blocks = page("docs/install.md").below("Uninstall")
        (command,) = (code for _, code in blocks if "label nodes --all" in code)
        self.cluster.enter("sh", "-euc", command)

    def clear_disk(self) -> None:
        """Removes what is left on the node's disk, as docs/install.md says."""
        self.cluster.enter("rm", "-f", *LEFT_ON_DISK)

    def wait_clean(self) -> None:
        """Waits until nothing of us is left in the cluster and on the node's disk."""
        self.wait_equal("what is left", self._left_behind, {})

    def _left_behind(self) -> dict[str, list[str]]:
        get = ("get", "node", self.name, "--show-managed-fields", "--output=json")
        meta = json.loads(self.kubectl(*get))["metadata"]
        ours = ("--all-namespaces", "--selector=app.kubernetes.io/part-of=npu-agent")
        objects = self.kubectl("get", ",".join(KINDS), *ours, "--output=name")
        found = {
            "objects": objects.split(),
            "labels": [
                key for key in meta["labels"] if _is_ours(key) and key != "npu-agent/enabled"
            ],
            "annotations": [key for key in meta["annotations"] if _is_ours(key)],
            "managers": [
                entry["manager"] for entry in meta["managedFields"] if _is_ours(entry["manager"])
            ],
            "files": sorted(self.files()),
        }
        return {what: things for what, things in found.items() if things}

    def files(self) -> set[str]:
        """The files where the agent may write, but for the kubelet's own."""
        places = {
            "/var/lib/kubelet/device-plugins": self.cluster.kubelet_dir / "device-plugins",
            "/var/run/cdi": self.cluster.run_dir / "cdi",
            "/etc/kubernetes": self.cluster.etc_dir / "kubernetes",
        }
        found = {
            f"{place}/{path.relative_to(directory)}"
            for place, directory in places.items()
            for path in directory.rglob("*")
            if not path.is_dir()
        }
        return {path for path in found if path.rpartition("/")[2] not in KUBELETS_FILES}

    # --- Pods -----------------------------------------------------------------------------------

    def admitted(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """The spec of a Pod as the API server would take it; nothing is made."""
        create = ("create", "--dry-run=server", "--output=json", "--filename=-")
        made = json.dumps(thing("Pod", name, spec=spec))
        found: dict[str, Any] = json.loads(self.kubectl(*create, input=made))["spec"]
        return found

    def refused(self, name: str, spec: dict[str, Any]) -> str:
        """Why the API server would not take a Pod."""
        try:
            taken = self.admitted(name, spec)
        except ClusterError as error:
            return str(error)
        raise AssertionError(f"{name} was taken, for {taken['schedulerName']}")

    def finished(self, name: str) -> str:
        """Waits until a Pod has done its work; returns what it printed."""
        self.wait_phase(name, "Succeeded")
        return self.cluster.logs(name)


def pod_spec(resource: str = "", **spec: Any) -> dict[str, Any]:
    """The spec of a Pod that asks for one of a resource, or for nothing."""
    return {"containers": [container(limits={resource: 1} if resource else None)], **spec}


def _is_ours(name: str) -> bool:
    """Whether it is the agent that leaves such a key, or such a manager, on a Node."""
    return "furiosa.ai/" in name or "npu-agent" in name
