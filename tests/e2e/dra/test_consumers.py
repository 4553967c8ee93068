"""What runs on top: programs that make Pods with claims, with our examples.

Controllers are built from their sources and run in the cluster's namespaces with their webhooks;
they are `long`, as they take minutes to build. Of KServe and KubeRay there are the
CustomResourceDefinitions, and what would be their Pods runs as a Pod.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from tests.cluster.build import (
    JOB_SET,
    KSERVE,
    KUBERAY,
    KUEUE,
    LEADER_WORKER_SET,
    GoBuild,
    ensure_binaries,
)
from tests.e2e.dra.claims import run, seen
from tests.e2e.dra.claims import running as runs
from tests.e2e.dra.test_partitions import ALL, CUT, configure
from tests.e2e.health.consumers import running
from tests.e2e.manifests import WORKLOAD, Thing, container, request, small, template, thing
from tests.e2e.node import PROJECT, SOON, Node

EXAMPLES = PROJECT / "docs" / "examples" / "serving"
PORT = 9443
"""Where each of them serves its webhooks."""
CERTIFICATES = "/etc/kueue/metrics/certs"
"""Where Kueue wants one, whether it serves metrics or not."""


def example(name: str) -> list[Thing]:
    """A file of docs/examples/serving; its containers sleep, in an image that the node has."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    found = list(yaml.safe_load_all(text))
    for one in found:
        for spec in _containers(one):
            spec.update(image=WORKLOAD, imagePullPolicy="Never")
            spec.update(command=["sh", "-c", "exec sleep 100000"])
            spec.pop("args", None)
    return found


def _containers(value: Any) -> Iterator[Thing]:
    if isinstance(value, list):
        for one in value:
            yield from _containers(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == "containers":
                yield from one
            else:
                yield from _containers(one)


@contextmanager
def controller(
    node: Node, build: GoBuild, kinds: set[str], config: Thing, *, label: str = ""
) -> Iterator[None]:
    """A controller with its CustomResourceDefinitions, and its webhooks for these kinds.

    Those for Pods are for Pods with this label.
    """
    files = ensure_binaries(build)
    crds = [path for name, path in files.items() if name.endswith(".yaml") and "_" in name]
    for path in crds:
        node.kubectl("apply", "--server-side", "--filename", str(path))
    own = node.cluster.workdir / "config"
    copy = f"cp {own}/apiserver.crt tls.crt; cp {own}/apiserver.key tls.key"
    node.cluster.enter("sh", "-ec", f"mkdir -p {CERTIFICATES}; cd {CERTIFICATES}; {copy}")
    file = node.cluster.workdir / "controller.yaml"
    served = {"webhook": {"port": PORT, "certDir": CERTIFICATES}, "metrics": {"bindAddress": "0"}}
    off = {"internalCertManagement": {"enable": False}, "leaderElection": {"leaderElect": False}}
    file.write_text(json.dumps({"kind": "Configuration", **served, **off, **config}))
    (program,) = (path for name, path in files.items() if not name.endswith(".yaml"))
    ca = base64.b64encode((own / "ca.crt").read_bytes()).decode()
    hooks = [
        {
            **one,
            "webhooks": [_here(hook, ca, label) for hook in one["webhooks"] if _for(hook) & kinds],
        }
        for one in yaml.safe_load_all(files["manifests.yaml"].read_text())
    ]
    environment = {"KUBECONFIG": str(node.cluster.kubeconfig)}
    with running(node, program, f"--config={file}", **environment):
        node.wait_for("its webhooks", lambda: _listens(node), 2 * SOON)
        node.apply(hooks)
        try:
            yield
        finally:
            for path in crds:  # with all that was made of them, while it can let go of that
                node.kubectl("delete", "--filename", str(path), "--timeout=60s", timeout=90)
            for one in hooks:
                node.kubectl("delete", one["kind"], one["metadata"]["name"])


def _listens(node: Node) -> bool:
    return f":{PORT:04X} " in node.cluster.enter("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout


def _for(hook: Thing) -> set[str]:
    return {kind for rule in hook["rules"] for kind in rule["resources"]}


def _here(hook: Thing, ca: str, label: str) -> Thing:
    """A webhook at its address here."""
    path = hook["clientConfig"]["service"]["path"]
    client = {"url": f"https://127.0.0.1:{PORT}{path}", "caBundle": ca}
    mine = {"matchExpressions": [{"key": label, "operator": "Exists"}]}
    return {**hook, "clientConfig": client} | (
        {"objectSelector": mine} if _for(hook) == {"pods"} else {}
    )


def pods(node: Node, selector: str) -> list[str]:
    """The names of the Pods with these labels."""
    found = node.objects("pod", "default", labelSelector=selector)
    return sorted(one["metadata"]["name"] for one in found)


def wait_pods(node: Node, selector: str, number: int) -> list[str]:
    """Waits until so many Pods with these labels run."""
    node.wait_for(f"{number} Pods", lambda: len(pods(node, selector)) == number, 2 * SOON)
    found = pods(node, selector)
    for name in found:
        runs(node, name, timeout=2 * SOON)
    return found


def cards(node: Node, names: list[str], container: str = "main") -> list[int]:
    """The card of each Pod; each has one, which opens."""
    return [card for name in names for card in seen(node, name, container).cards]


@pytest.fixture
def cut(node: Node, classes: None) -> Iterator[None]:  # noqa: ARG001
    """Cards are offered in all widths, with counters."""
    configure(node, CUT, ALL)
    yield
    node.delete_pods()
    configure(node, {"allocation": {"api": "auto"}}, 8)


@pytest.mark.long
@pytest.mark.since("1.36")
@pytest.mark.usefixtures("cut")
def test_kueue_admits_and_refuses_by_our_counter_of_cores(node: Node) -> None:
    config = yaml.safe_load((EXAMPLES / "kueue-config.yaml").read_text())
    config |= {"integrations": {"frameworks": ["batch/job"]}}
    config |= {"featureGates": {"VisibilityOnDemand": False}}
    kinds = {"jobs", "workloads", "clusterqueues", "localqueues", "resourceflavors"}
    *queue, whole = example("kueue")

    def job(name: str, template: str) -> Thing:
        made = json.loads(json.dumps(whole))
        made["metadata"]["name"] = name
        (claim,) = made["spec"]["template"]["spec"]["resourceClaims"]
        claim["resourceClaimTemplateName"] = template
        return dict(made)

    def used() -> str:
        text = node.kubectl("get", "clusterqueue", "npu", "--output=json")
        (flavor,) = json.loads(text)["status"].get("flavorsUsage", [{"resources": []}])
        return ",".join(one["total"] for one in flavor["resources"])

    def suspended(name: str) -> bool:
        return bool(node.get("job", name, "default")["spec"]["suspend"])

    with controller(node, KUEUE, kinds, config):
        node.apply(queue)
        node.apply([job("whole", "whole-rngd"), job("half", "half-rngd")])
        for name, number in (("whole", 8), ("half", 4)):
            (pod,) = wait_pods(node, f"job-name={name}", 1)
            assert len(seen(node, pod).cards) == 1, number
        node.wait_equal("cores in use", used, "12")
        node.apply([job("late", "half-rngd")])
        workloads = ("get", "workloads", "--namespace=default", "--output=json")

        def refused() -> bool:
            found = json.loads(node.kubectl(*workloads))["items"]
            messages = [
                condition["message"]
                for one in found
                if one["metadata"]["ownerReferences"][0]["name"] == "late"
                for condition in one.get("status", {}).get("conditions", ())
            ]
            assert any("insufficient unused quota" in each for each in messages), messages
            return True

        node.wait_for("the third to be refused for now", refused)
        assert suspended("late")
        node.kubectl("delete", "job", "half", "--namespace=default")
        wait_pods(node, "job-name=late", 1)
        node.wait_equal("cores in use", used, "12")


@pytest.mark.long
def test_leader_worker_set_gives_each_pod_a_card_of_its_own(node: Node) -> None:
    kinds, label = {"leaderworkersets", "pods"}, "leaderworkerset.sigs.k8s.io/name"
    config = {"apiVersion": "config.lws.x-k8s.io/v1alpha1"}
    with controller(node, LEADER_WORKER_SET, kinds, config, label=label):
        node.apply(example("leaderworkerset"))
        found = wait_pods(node, f"{label}=model", 4)
        assert len(set(cards(node, found))) == 4


@pytest.mark.long
def test_job_set_gives_each_pod_a_card_of_its_own_and_gets_them_again(node: Node) -> None:
    kinds, label = {"jobsets", "pods"}, "jobset.sigs.k8s.io/jobset-name"
    config = {"apiVersion": "config.jobset.x-k8s.io/v1alpha1"}
    with controller(node, JOB_SET, kinds, config, label=label):
        node.apply(example("jobset"))
        selector = f"{label}=training"
        found = wait_pods(node, selector, 2)
        assert len(set(cards(node, found))) == 2
        node.kubectl("delete", "pod", found[0], "--namespace=default", "--now")
        node.wait_for("other Pods", lambda: not {*found} <= {*pods(node, selector)}, 2 * SOON)
        assert len(set(cards(node, wait_pods(node, selector, 2)))) == 2


@pytest.mark.usefixtures("tidy")
def test_pods_of_furiosa_llm_kserve_and_ray_get_their_cards(node: Node) -> None:
    claims, deployment = example("furiosa-llm")
    (service, llm), (ray,) = example("kserve"), example("ray")
    worker = ray["spec"]["workerGroupSpecs"][0]["template"]
    specs = {
        "llm": deployment["spec"]["template"]["spec"],
        "kserve": service["spec"]["predictor"],
        "ray": worker["spec"],
    }
    node.apply([claims])
    crds = [path for wanted in (KSERVE, KUBERAY) for path in ensure_binaries(wanted).values()]
    for path in crds:
        node.kubectl("apply", "--server-side", "--filename", str(path))
    try:
        for path in crds:
            node.kubectl("wait", "--for=condition=Established", "--filename", str(path))
        for one in (deployment, service, llm, ray):
            strict = ("--dry-run=server", "--validate=strict", "--filename", "-")
            node.kubectl("create", *strict, input=json.dumps(one))
        never = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
        node.apply([thing("Pod", name, spec={**spec, **never}) for name, spec in specs.items()])
        found = []
        for name, spec in specs.items():
            runs(node, name)
            found += cards(node, [name], spec["containers"][0]["name"])
        assert len(set(found)) == len(found) == 3
    finally:
        for path in crds:
            node.kubectl("delete", "--filename", str(path))


@pytest.mark.usefixtures("tidy")
def test_a_pod_as_the_vendors_chart_for_llm_d_makes_it_gets_its_cards(node: Node) -> None:
    """The chart, and KServe for an LLMInferenceService, make a template with no more than this."""
    proxy = container("routing-proxy", restartPolicy="Always")
    pod = small("decode", of_template="decode", initContainers=[proxy])
    run(node, template("decode", request("furiosa", count=2)), pod)
    assert len(seen(node, "decode").cards) == 2
    assert not seen(node, "decode", "routing-proxy").nodes
