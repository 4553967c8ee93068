"""What runs on top: programs that make Pods with claims, with our examples.

Kueue is built from its sources and runs in the cluster's namespaces with its webhooks; its test is
`long`, as it takes minutes to build. Of the others there are the CustomResourceDefinitions, and
what would be their Pods runs as a Pod.
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
    ensure_binaries,
)
from tests.e2e.dra.claims import run, seen
from tests.e2e.dra.claims import running as runs
from tests.e2e.dra.test_partitions import ALL, CUT, configure
from tests.e2e.health.test_consumers import running
from tests.e2e.manifests import WORKLOAD, Thing, container, request, small, template, thing
from tests.e2e.node import PROJECT, SOON, Node

EXAMPLES = PROJECT / "docs" / "examples" / "serving"
PORT = 9443
"""Where it serves its webhooks."""
CERTIFICATES = "/etc/kueue/metrics/certs"
"""Where it wants one, whether it serves metrics or not."""


def example(name: str) -> list[Thing]:
    """A file of docs/examples/serving; its containers sleep, in an image that the node has."""
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
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
def kueue(node: Node, config: Thing) -> Iterator[None]:
    """Kueue with its CustomResourceDefinitions, and its webhooks for these kinds."""
    kinds = {"jobs", "workloads", "clusterqueues", "localqueues", "resourceflavors"}
    files = ensure_binaries(KUEUE)
    crds = [path for name, path in files.items() if name.endswith(".yaml") and "_" in name]
    for path in crds:
        node.kubectl("apply", "--server-side", "--filename", str(path))
    own = node.cluster.workdir / "config"
    copy = f"cp {own}/apiserver.crt tls.crt; cp {own}/apiserver.key tls.key"
    node.cluster.enter("sh", "-ec", f"mkdir -p {CERTIFICATES}; cd {CERTIFICATES}; {copy}")
    file = node.cluster.workdir / "controller.yaml"
    served = {"webhook": {"port": PORT, "certDir": CERTIFICATES}, "metrics": {"bindAddress": "0"}}
    off = {"internalCertManagement": {"enable": False}, "leaderElection": {"leaderElect": False}}
    file.write_text(
        json.dumps({"kind": "Configuration", **served, **off, **config}), encoding="utf-8"
    )
    ca = base64.b64encode((own / "ca.crt").read_bytes()).decode()
    hooks = list(yaml.safe_load_all(files["manifests.yaml"].read_text(encoding="utf-8")))
    for hook in hooks:
        hook["webhooks"] = [
            _here(webhook, ca)
            for webhook in hook["webhooks"]
            if any(kinds & set(rule["resources"]) for rule in webhook["rules"])
        ]
    environment = {"KUBECONFIG": str(node.cluster.kubeconfig)}
    with running(node, files["kueue"], f"--config={file}", **environment):
        tables = ("cat", "/proc/net/tcp", "/proc/net/tcp6")
        listens = f":{PORT:04X} "
        node.wait_for(
            "its webhooks", lambda: listens in node.cluster.enter(*tables).stdout, 2 * SOON
        )
        node.apply(hooks)
        try:
            yield
        finally:
            for path in crds:  # with all that was made of them, while it can let go of that
                node.kubectl("delete", "--filename", str(path), "--timeout=60s", timeout=90)
            for hook in hooks:
                node.kubectl("delete", hook["kind"], hook["metadata"]["name"])


def _here(webhook: Thing, ca: str) -> Thing:
    """A webhook at its address here."""
    path = webhook["clientConfig"]["service"]["path"]
    client = {"url": f"https://127.0.0.1:{PORT}{path}", "caBundle": ca}
    return {**webhook, "clientConfig": client}


def running_pod(node: Node, job: str) -> str:
    """Waits until the one Pod of a Job runs; returns its name."""

    def name() -> str:
        (pod,) = node.objects("pod", "default", labelSelector=f"job-name={job}")
        return str(pod["metadata"]["name"])

    found = node.wait_for(f"the Pod of {job}", name, 2 * SOON)
    runs(node, found, timeout=2 * SOON)
    return found


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
    config = yaml.safe_load((EXAMPLES / "kueue-config.yaml").read_text(encoding="utf-8"))
    config |= {"integrations": {"frameworks": ["batch/job"]}}
    config |= {"featureGates": {"VisibilityOnDemand": False}}
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

    with kueue(node, config):
        node.apply(queue)
        node.apply([job("whole", "whole-rngd"), job("half", "half-rngd")])
        for name in ("whole", "half"):
            assert len(seen(node, running_pod(node, name)).cards) == 1
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
        running_pod(node, "late")
        node.wait_equal("cores in use", used, "12")


@pytest.mark.usefixtures("tidy")
def test_the_serving_examples_are_taken_and_their_pods_get_a_card_each(node: Node) -> None:
    claims, deployment = example("furiosa-llm")
    (service, llm), (ray,) = example("kserve"), example("ray")
    (_, group), (_, jobs) = example("leaderworkerset"), example("jobset")
    (worker,) = jobs["spec"]["replicatedJobs"]
    specs = {
        "llm": deployment["spec"]["template"]["spec"],
        "kserve": service["spec"]["predictor"],
        "ray": ray["spec"]["workerGroupSpecs"][0]["template"]["spec"],
        "group": group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"],
        "jobs": worker["template"]["spec"]["template"]["spec"],
    }
    node.apply([claims])
    builds = (KSERVE, KUBERAY, LEADER_WORKER_SET, JOB_SET)
    crds = [path for build in builds for path in ensure_binaries(build).values()]
    for path in crds:
        node.kubectl("apply", "--server-side", "--filename", str(path))
    try:
        for path in crds:
            node.kubectl("wait", "--for=condition=Established", "--filename", str(path))
        for made in (deployment, service, llm, ray, group, jobs):
            strict = ("--dry-run=server", "--validate=strict", "--filename", "-")
            node.kubectl("create", *strict, input=json.dumps(made))
        never = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
        node.apply([thing("Pod", name, spec={**spec, **never}) for name, spec in specs.items()])
        cards: list[int] = []
        for name, spec in specs.items():
            runs(node, name)
            cards += seen(node, name, spec["containers"][0]["name"]).cards
        assert len(set(cards)) == len(cards) == len(specs)
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
