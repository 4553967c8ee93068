"""Who reads the Node condition: what they do at a fault, and that they stop when it is over.

Each is what its users install, with its example of k8s/examples/health. Not every Go proxy serves
the two controllers: their tests are `long`, no part of CI, and fail where they cannot be built.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.build import (
    KUBERNETES,
    NODE_HEALTHCHECK_OPERATOR,
    NODE_READINESS_CONTROLLER,
    ensure_binaries,
    ensure_own,
)
from tests.e2e.dra.claims import running as runs
from tests.e2e.manifests import WORKLOAD, Thing, custom_resource, npu_pod, thing
from tests.e2e.node import AGENT, NAMESPACE, PROJECT, SOON, Node

pytestmark = [pytest.mark.one_kubelet, pytest.mark.usefixtures("repaired")]
EXAMPLES = PROJECT / "k8s" / "examples" / "health"
TYPE = "furiosa.ai/NPUReady"
OVERLAY = "tests/e2e/health"
CONFIG = {"health": {"condition": {"type": TYPE}}}
CONTROLLER = "node-readiness-controller"
RECOVERED = 60.0
"""Seconds from a recovery to the condition that says so, at most."""
GROUP = "remediation.test"
REMEDIATIONS = f"npuremediations.{GROUP}"


def example(name: str) -> Any:
    """A file of k8s/examples/health."""
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))


RULE = example("node-readiness-rule")
TAINT = RULE["spec"]["taint"]


@contextlib.contextmanager
def running(node: Node, program: Path, *arguments: str, **environment: str) -> Iterator[Path]:
    """Runs a program in the cluster's namespaces meanwhile; yields the file with its log."""
    log = node.cluster.workdir / "logs" / f"{program.name}.log"
    number = log.with_suffix(".pid")
    script = 'echo $$ >"$0"; exec "$@"'
    variables = (f"{name}={value}" for name, value in environment.items())
    command = ("sh", "-c", script, str(number), "env", *variables, str(program), *arguments)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            node.cluster.command(*command), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield log
        assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
    finally:
        node.cluster.enter("kill", number.read_text(encoding="utf-8").strip(), check=False)
        process.wait(20)


def kubeconfig(node: Node) -> Path:
    """A kubeconfig with the controller's own token."""
    config = json.loads(node.cluster.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": node.cluster.token_for(CONTROLLER, NAMESPACE)}
    path = node.cluster.workdir / f"{CONTROLLER}.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def wait_condition(node: Node, status: str, timeout: float = 90) -> dict[str, Any]:
    """Waits until the condition has this status; returns it."""

    def reached() -> dict[str, Any]:
        condition = node.conditions()[TYPE]
        assert condition["status"] == status, condition
        return condition

    return node.wait_for(f"the condition to be {status}", reached, timeout)


def forget(node: Node) -> None:
    """Takes the condition away, as of a Node that is new."""
    gone = {"status": {"conditions": [{"type": TYPE, "$patch": "delete"}]}}
    patch = ("--type=strategic", "--patch", json.dumps(gone))
    node.kubectl("patch", "node", node.name, "--subresource=status", *patch)


@pytest.fixture(scope="module", autouse=True)
def component(node: Node) -> Iterator[None]:
    """The agent is deployed with the component, and writes the condition."""
    node.deploy(CONFIG, OVERLAY)
    wait_condition(node, "True")
    yield
    node.deploy()
    forget(node)


@pytest.fixture
def repaired(node: Node) -> Iterator[None]:
    """Both cards are well, and the condition is True, before and after."""
    yield
    node.fault("ok", "npu0", "npu1")
    node.delete_pods()
    node.wait_allocatable(2)
    wait_condition(node, "True")


@pytest.fixture
def readiness(node: Node) -> Iterator[Path]:
    """The controller runs with the rule and with no rights but its own; its log."""
    files = ensure_binaries(NODE_READINESS_CONTROLLER)
    role = files["role.yaml"].read_text(encoding="utf-8").replace("manager-role", CONTROLLER)
    crd = files["readiness.node.x-k8s.io_nodereadinessrules.yaml"].read_text(encoding="utf-8")
    node.apply(crd)
    node.apply(role)
    subjects = [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": NAMESPACE}]
    group = "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": CONTROLLER}
    binding = thing("ClusterRoleBinding", CONTROLLER, f"{group}/v1", namespace="")
    node.apply(
        [
            thing("ServiceAccount", CONTROLLER, namespace=NAMESPACE),
            {**binding, "roleRef": reference, "subjects": subjects},
        ]
    )
    node.kubectl("wait", "crd", "--all", "--for=condition=Established")
    own = kubeconfig(node)
    node.apply(RULE)
    program = files[CONTROLLER]
    try:
        arguments = (f"--kubeconfig={own}", "--health-probe-bind-address=0")
        with running(node, program, *arguments) as log:
            yield log
            node.kubectl("delete", "nodereadinessrules", "--all", "--timeout=30s")
            node.wait_for("no taint of the rule", lambda: not tainted(node))
    finally:
        node.kubectl("delete", "crd", "nodereadinessrules.readiness.node.x-k8s.io", check=False)


def tainted(node: Node) -> bool:
    """Whether the Node has the rule's taint."""
    found = node.get("node", node.name)["spec"].get("taints", ())
    return any(one["key"] == TAINT["key"] and one["effect"] == TAINT["effect"] for one in found)


def seconds(node: Node, what: str, reached: Callable[[], Any], timeout: float = SOON) -> float:
    """How long it takes until something is reached."""
    began = time.monotonic()
    node.wait_for(what, reached, timeout)
    return time.monotonic() - began


def shown(log: Path, *words: str) -> None:
    """Prints what a program has logged with any of these words."""
    lines = [
        line
        for line in log.read_text(encoding="utf-8").splitlines()
        if any(word in line for word in words)
    ]
    print(*lines[-12:], sep="\n")


STARTING = "npu-agent/starting"


@pytest.fixture
def kubectl_job(node: Node) -> Iterator[list[Thing]]:
    """The objects of the example, for this Node, with the cluster's own kubectl."""
    text = (
        (EXAMPLES / "startup-taint.yaml").read_text(encoding="utf-8").replace("node-1", node.name)
    )
    things = list(yaml.safe_load_all(text))
    spec = things[-1]["spec"]["template"]["spec"]
    program = str(ensure_binaries(KUBERNETES)["kubectl"])
    spec["volumes"] = [{"name": "kubectl", "hostPath": {"path": program, "type": "File"}}]
    for one in (*spec["initContainers"], *spec["containers"]):
        mounts = [{"name": "kubectl", "mountPath": "/kubectl", "readOnly": True}]
        one |= {"image": WORKLOAD, "command": ["/kubectl"], "volumeMounts": mounts}
    yield things
    node.kubectl("taint", "node", node.name, f"{STARTING}-", check=False)
    for one in things:
        name = f"{one['kind'].lower()}/{one['metadata']['name']}"
        node.kubectl("delete", name, "-n", NAMESPACE, "--ignore-not-found")


def test_a_job_lifts_the_startup_taint_when_the_cards_are_served(
    node: Node, kubectl_job: list[Thing]
) -> None:
    """A Pod that was created before the agent is Pending and then runs."""
    node.kubectl("delete", *AGENT, "--cascade=foreground", "--timeout=60s")
    forget(node)
    node.kubectl("taint", "node", node.name, f"{STARTING}:NoSchedule")
    node.apply(npu_pod("early"))
    node.apply(kubectl_job)
    node.wait_unschedulable("early", "untolerated taint")
    began = time.monotonic()
    node.deploy(CONFIG, OVERLAY)
    runs(node, "early")
    print(f"agent deployed: the Pod runs after {time.monotonic() - began:.1f} s")
    job = (f"job/{kubectl_job[-1]['metadata']['name']}", "-n", NAMESPACE)
    node.kubectl("wait", *job, "--for=condition=complete", "--timeout=30s")
    print(node.kubectl("logs", *job, "--all-containers"))


@pytest.mark.long
def test_a_pod_that_was_there_before_the_agent_waits_and_then_runs(
    node: Node, readiness: Path
) -> None:
    """Never UnexpectedAdmissionError: a Pod of this kind that fails is not tried again."""
    node.kubectl("delete", *AGENT, "--cascade=foreground", "--timeout=60s")
    forget(node)
    set_ = seconds(node, "the taint of a Node that is not ready", lambda: tainted(node))
    node.apply(npu_pod("early"))
    node.wait_unschedulable("early", "untolerated taint")
    began = time.monotonic()
    node.deploy(CONFIG, OVERLAY)
    node.wait_for("the taint to be lifted", lambda: not tainted(node), RECOVERED)
    lifted = time.monotonic() - began
    runs(node, "early")
    print(f"no condition: taint after {set_:.1f} s; agent deployed: lifted after {lifted:.1f} s")
    shown(readiness, "Adding taint", "Removing taint")


@pytest.mark.long
def test_no_new_pods_while_a_card_is_dead(node: Node, readiness: Path) -> None:
    node.run("stays", 1)
    before = node.pod("stays")["metadata"]["uid"]
    node.fault("dead", "npu0")
    dead = seconds(node, "a taint", lambda: tainted(node))
    node.create("late", 1)
    node.wait_unschedulable("late", "untolerated taint")
    assert node.pod("stays")["metadata"]["uid"] == before  # it evicts nothing
    node.fault("ok", "npu0")
    well = seconds(node, "no taint", lambda: not tainted(node), RECOVERED)
    runs(node, "late")
    assert node.restarts()["stays"] == 0
    print(f"fault to taint {dead:.1f} s; recovery to no taint {well:.1f} s")
    shown(readiness, "Adding taint", "Removing taint")


@pytest.fixture
def template(node: Node) -> Iterator[Thing]:
    """A remediator that does nothing: the kinds that health checks take and make."""
    made = {"apiVersion": f"{GROUP}/v1", "kind": "NpuRemediationTemplate"}
    meta = {"name": "nothing", "namespace": NAMESPACE}
    crds = [custom_resource(kind, GROUP) for kind in ("NpuRemediation", made["kind"])]
    node.apply(crds)
    node.kubectl("wait", "crd", "--all", "--for=condition=Established")
    node.apply({**made, "metadata": meta, "spec": {"template": {"spec": {}}}})
    yield {**made, **meta}
    node.kubectl("delete", "crd", *(crd["metadata"]["name"] for crd in crds), "--timeout=30s")


@pytest.mark.long
def test_a_node_is_remediated_until_its_cards_are_well(
    node: Node, template: Thing, tmp_path: Path
) -> None:
    files = ensure_binaries(NODE_HEALTHCHECK_OPERATOR)
    node.apply(files["remediation.medik8s.io_nodehealthchecks.yaml"].read_text(encoding="utf-8"))
    node.kubectl("wait", "crd", "--all", "--for=condition=Established")
    certificates = tmp_path / "k8s-webhook-server" / "serving-certs"
    certificates.mkdir(parents=True)
    for kind in ("crt", "key"):
        own = node.cluster.kubeconfig.with_name(f"apiserver.{kind}")
        shutil.copy(own, certificates / f"tls.{kind}")
    check = example("node-health-check")
    (asked,) = check["spec"]["unhealthyConditions"]
    assert asked["type"] == TYPE
    asked["duration"] = "3s"
    check["spec"]["remediationTemplate"] = template

    def remediations() -> list[str]:
        made = json.loads(node.kubectl("get", REMEDIATIONS, "-A", "-o", "json"))["items"]
        return [remediation["metadata"]["name"] for remediation in made]

    arguments = ("--leader-elect=false", "--health-probe-bind-address=0")
    environment = {"DEPLOYMENT_NAMESPACE": NAMESPACE, "TMPDIR": str(tmp_path)}
    program = files["node-healthcheck-operator"]
    with running(node, program, *arguments, **environment) as log:
        node.apply(check)
        node.fault("dead", "npu0")
        acts = seconds(node, "a remediation", remediations, 2 * SOON)
        assert remediations() == [node.name]
        node.fault("ok", "npu0")
        ends = seconds(node, "its end", lambda: not remediations(), 2 * RECOVERED)
        print(f"fault to remediation {acts:.1f} s, 3 s of them asked for; from recovery {ends:.1f}")
        shown(log, "matches unhealthy", "Creating a remediation", "deleted remediation")
        node.kubectl("delete", "nodehealthchecks", "--all", "--timeout=30s")
    node.kubectl("delete", "crd", "nodehealthchecks.remediation.medik8s.io", "--timeout=30s")


def test_nvsentinels_policy_says_unhealthy_while_a_card_is_dead(node: Node) -> None:
    """Its expression, evaluated as its monitor does, with cel-go."""
    (policy,) = example("nvsentinel-values")["kubernetes-object-monitor"]["policies"]
    assert policy["resource"] == {"group": "", "version": "v1", "kind": "Node"}
    program = ensure_own(Path(__file__).parent / "cel")

    def unhealthy(of: Thing) -> bool:
        command = [str(program), policy["predicate"]["expression"]]
        done = subprocess.run(command, input=json.dumps(of), capture_output=True, text=True)
        assert done.stdout.strip() in ("true", "false"), done
        return done.stdout.strip() == "true"

    well = node.get("node", node.name)
    assert not unhealthy(well)
    node.fault("dead", "npu0")
    wait_condition(node, "False")
    assert unhealthy(node.get("node", node.name))
    node.fault("ok", "npu0")
    wait_condition(node, "True")
    assert not unhealthy(node.get("node", node.name))
    others = [one for one in well["status"]["conditions"] if one["type"] != TYPE]
    assert not unhealthy({**well, "status": {"conditions": others}})
    assert not unhealthy(thing("Node", "new", namespace="", status={}))
