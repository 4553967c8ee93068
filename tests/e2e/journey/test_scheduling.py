"""Which Pods come to which Nodes: bin packing, who has to use it, and Nodes kept for NPU Pods.

One Node is real. The others exist for schedulers only: no kubelet runs what is placed there.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.build import OPA, OPA_OLDEST, ensure_binaries
from tests.e2e.fakes import FAKES, beat, fakes, placed
from tests.e2e.journey.steps import K8S, Journey, pod_spec
from tests.e2e.manifests import RESOURCE, container, thing
from tests.e2e.node import NAMESPACE
from tests.k8s.test_opa import MAIN, VALUES

BINPACK = "npu-binpack-scheduler"
DEFAULT = "default-scheduler"


# --- bin packing -------------------------------------------------------------------------------


def test_the_binpack_scheduler_takes_the_fewest_nodes(installed: Journey) -> None:
    """Of the real Node and three like it, with two NPUs each."""
    node = installed
    small, large = [f"small-{number}" for number in range(4)], ["large-1", "large-2"]
    with node.components("binpack-scheduler"), fakes(node):
        node.rolled_out(f"deployment/{BINPACK}")
        for name in small:
            node.create(name, 1, schedulerName=BINPACK)
        used = placed(node, small)
        assert sorted(used.count(name) for name in set(used)) == [2, 2]
        # So there is room for Pods that ask for a whole Node.
        for name in large:
            node.create(name, 2, schedulerName=BINPACK)
        assert len({*used, *placed(node, large)}) == 4


def test_equal_npus_go_to_the_node_with_more_cpu_requested(installed: Journey) -> None:
    """NPUs weigh 100, CPU and memory 1 each.

    Points are whole numbers of 100. So a difference in CPU decides where it is about half a Node,
    and always from 95 % on. What a Node has in use to 0 % does not count: each has something here,
    as each has in a cluster with DaemonSets.
    """
    node = installed
    idle, busy, full = FAKES
    with node.components("binpack-scheduler"), fakes(node):
        node.rolled_out(f"deployment/{BINPACK}")
        room = {"cpu": "10", "memory": "10Gi"}
        beat(node, capacity=room, allocatable=room)
        node.kubectl("cordon", node.name, full)
        try:
            for name, cpus in ((idle, "200m"), (busy, "9700m")):
                limits = {"cpu": cpus, "memory": "200Mi"}
                spec = {"containers": [container(limits=limits)], "nodeName": name}
                node.apply(thing("Pod", f"on-{name}", spec=spec))
            for number in range(6):
                name = f"npu-{number}"
                node.create(name, 1, schedulerName=BINPACK)
                assert placed(node, [name]) == [busy]
                node.kubectl("delete", "pod", name, "--force", "--grace-period=0")
        finally:
            node.kubectl("uncordon", node.name)


def test_the_scheduler_itself_prefers_the_control_plane(node: Journey) -> None:
    file = K8S / "components/binpack-scheduler/deployment.yaml"
    deployment = yaml.safe_load(file.read_text(encoding="utf-8"))
    template = deployment["spec"]["template"]["spec"]
    with fakes(node):
        role = "node-role.kubernetes.io/control-plane"
        node.kubectl("label", "node", "fake-2", f"{role}=")
        node.kubectl("taint", "node", "fake-2", f"{role}:NoSchedule")
        where = {key: template[key] for key in ("nodeSelector", "affinity", "tolerations")}
        node.kubectl("label", "node", "fake-2", "kubernetes.io/os=linux")
        node.apply(thing("Pod", "scheduler", spec=pod_spec(**where)))
        assert placed(node, ["scheduler"]) == ["fake-2"]


# --- the name of the scheduler -----------------------------------------------------------------


@pytest.fixture
def refuse(node: Journey) -> Iterator[Journey]:
    """scheduler-name-refuse is in force."""
    with node.components("scheduler-name-refuse"):
        trial = pod_spec(RESOURCE)
        node.wait_for("the refusal", lambda: node.refused("trial", trial))
        yield node
    node.wait_for("the end of the refusal", lambda: node.admitted("trial", trial))


INIT = pod_spec(initContainers=[container("first", {RESOURCE: 1})])
"""A Pod whose init container alone asks for an NPU."""


def test_a_wrong_scheduler_is_refused_and_the_right_one_named(refuse: Journey) -> None:
    for spec, resource, scheduler in (
        (pod_spec(RESOURCE), RESOURCE, DEFAULT),
        (pod_spec(RESOURCE, schedulerName="third"), RESOURCE, "third"),
        (pod_spec("furiosa.ai/rngd"), "furiosa.ai/rngd", DEFAULT),
        (INIT, RESOURCE, DEFAULT),
    ):
        assert (
            f"Pod train asks for {resource} and has spec.schedulerName {scheduler}: "
            f"write schedulerName: {BINPACK} into the spec of the Pod"
        ) in refuse.refused("train", spec)
    cases = {
        "no NPU": pod_spec(),
        "not ours": pod_spec("example.com/npu"),
        "the right name": pod_spec(RESOURCE, schedulerName=BINPACK),
        "init container": INIT | {"schedulerName": BINPACK},
        "born with a Node": pod_spec(RESOURCE, nodeName="fake-1"),
    }
    got = {case: refuse.admitted("train", spec)["schedulerName"] for case, spec in cases.items()}
    assert got == {case: spec.get("schedulerName", DEFAULT) for case, spec in cases.items()}


@pytest.fixture(params=[(OPA, 8443), (OPA_OLDEST, 8444)], ids=lambda param: param[0].name)
def opa(node: Journey, request: pytest.FixtureRequest) -> Iterator[Journey]:
    """An Open Policy Agent is the API server's webhook, with the values of the example.

    It reads the policy from the component's ConfigMap at its start, in kube-mgmt's place.
    """
    build, port = request.param
    directory = node.cluster.workdir / build.name
    directory.mkdir()
    certificate = self_signed(directory)
    node.apply(thing("Namespace", "opa", namespace=""))
    with node.components("scheduler-name-opa"):
        get = ("get", "configmap", "npu-scheduler-name", "--namespace=opa", "--output=json")
        policies = json.loads(node.kubectl(*get))["data"] | {"main.rego": MAIN}
    for name, text in policies.items():
        (directory / name).write_text(text, encoding="utf-8")
    serve = ("run", "--server", f"--addr=127.0.0.1:{port}")
    tls = (f"--tls-cert-file={certificate}", f"--tls-private-key-file={directory}/tls.key")
    files = [str(directory / name) for name in policies]
    program = str(ensure_binaries(build)["opa"])
    node.cluster.start_program(build.name, [program, *serve, *tls, *files], port)

    values = VALUES["admissionController"]
    webhook = {
        "name": "webhook.openpolicyagent.org",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/",
            "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
        },
        **{key: values[key] for key in ("rules", "failurePolicy", "namespaceSelector")},
    }
    kind = "ValidatingWebhookConfiguration"
    api = "admissionregistration.k8s.io/v1"
    node.apply(thing(kind, "opa", api, namespace="", webhooks=[webhook]))
    trial = pod_spec(RESOURCE)
    node.wait_for("the refusal", lambda: node.refused("trial", trial))
    yield node
    node.kubectl("delete", kind, "opa")
    node.kubectl("delete", "namespace", "opa")
    node.wait_for("the end of the refusal", lambda: node.admitted("trial", trial))


def self_signed(directory: Path) -> Path:
    """Makes tls.crt, for 127.0.0.1, and tls.key in this directory; returns the first."""
    certificate = directory / "tls.crt"
    make = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=opa")
    where = ("-keyout", str(directory / "tls.key"), "-out", str(certificate))
    subprocess.run(
        [*make, "-addext", "subjectAltName=IP:127.0.0.1", *where], check=True, capture_output=True
    )
    return certificate


def test_open_policy_agent_refuses_what_names_another_scheduler(opa: Journey) -> None:
    message = opa.refused("train", pod_spec(RESOURCE))
    assert 'admission webhook "webhook.openpolicyagent.org" denied the request' in message
    assert f"Pod train asks for {RESOURCE} and has spec.schedulerName {DEFAULT}" in message
    assert opa.admitted("train", pod_spec(RESOURCE, schedulerName=BINPACK))
    assert opa.admitted("train", pod_spec())
    # A namespace with the label is not asked about.
    opa.kubectl("label", "namespace", "default", "openpolicyagent.org/webhook=ignore")
    try:
        opa.wait_for("the label to count", lambda: opa.admitted("train", pod_spec(RESOURCE)))
    finally:
        opa.kubectl("label", "namespace", "default", "openpolicyagent.org/webhook-")


@pytest.fixture
def fill(node: Journey) -> Iterator[Journey]:
    """scheduler-name-fill is in force."""
    with node.components("scheduler-name-fill"):

        def filled() -> bool:
            return bool(node.admitted("trial", pod_spec(RESOURCE))["schedulerName"] == BINPACK)

        node.wait_for("the name to be filled in", filled)
        yield node
    node.wait_for("the name to be left as it is", lambda: not filled())


def test_the_name_is_filled_in_for_pods_with_npus_alone(fill: Journey) -> None:
    cases = {
        "none named": (pod_spec(RESOURCE), BINPACK),
        "the default named": (pod_spec(RESOURCE, schedulerName=DEFAULT), BINPACK),
        "init container": (INIT, BINPACK),
        "another resource": (pod_spec("furiosa.ai/rngd"), BINPACK),
        "another named": (pod_spec(RESOURCE, schedulerName="third"), "third"),
        "no NPU": (pod_spec(), DEFAULT),
        "not ours": (pod_spec("example.com/npu"), DEFAULT),
        "born with a Node": (pod_spec(RESOURCE, nodeName="fake-1"), DEFAULT),
    }
    got = {case: fill.admitted("train", spec)["schedulerName"] for case, (spec, _) in cases.items()}
    assert got == {case: wanted for case, (_, wanted) in cases.items()}


# --- the taint ---------------------------------------------------------------------------------


@pytest.fixture
def tainted(installed: Journey) -> Iterator[Journey]:
    """Nodes with NPUs are kept for those who tolerate it."""
    node = installed

    def taint() -> bool:
        # By the agent's label, which comes a moment after its Pod.
        which = ("-l", "beta.furiosa.ai/npu.count")
        said = node.kubectl("taint", "nodes", *which, f"{RESOURCE}=present:NoSchedule")
        return "tainted" in said

    node.wait_for("the Node to be tainted", taint)
    yield node
    node.kubectl("taint", "nodes", "--all", f"{RESOURCE}:NoSchedule-")


def test_the_taint_keeps_strangers_away_and_neither_npu_pods_nor_the_agent(
    tainted: Journey,
) -> None:
    tainted.create("stranger", 1)
    tainted.wait_unschedulable("stranger", "1 node(s) had untolerated taint(s)")
    with tainted.components("taint-example"):
        assert "NPU_DEVNAME=npu" in tainted.finished("npu-tainted-example")

    before, _ = tainted.agent_run()
    name = tainted.agent()["metadata"]["name"]
    tainted.kubectl("delete", "pod", name, "--namespace", NAMESPACE)
    tainted.wait_for(
        "a new agent", lambda: tainted.agent_run()[0] != before and tainted.agent_ready()
    )
    tainted.wait_allocatable(2)
