"""`kubectl npu verify` between a person and a stand-in API server that runs its Pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from npu_agent.cli import CommandError
from npu_agent.kube import ApiError, ErrorKind
from npu_agent.people.commands import kubectl, kubectl_verify
from npu_agent.people.commands.kubectl_verify import PRIORITY, VerifyPod, judged
from npu_agent.people.doctor.check import Check
from npu_agent.people.simulator.apiserver import served
from npu_agent.typedjson import convert
from tests.kube.helpers import status
from tests.people.cluster.build import DAEMON_SET, NPU, Json, agent, cut, node, pod, slice_
from tests.people.commands.reached import reach

ROOT = Path(__file__).parents[3]
GOOD = [
    {"name": "npu0", "state": "ok", "detail": "35 device nodes", "section": "npu0"},
    {"name": "io_uring", "state": "ok", "detail": "allowed"},
]
FILTERED = {
    "name": "io_uring",
    "state": "wrong",
    "detail": "filtered by the Pod's seccomp profile",
    "remedy": "who writes the Pod sets Unconfined",
}
_END = {"terminated": {"reason": "Error", "exitCode": 1}}
DONE = {"containerStatuses": [{"name": "verify", "state": _END}]}


@dataclass
class Cluster:
    """n1 has two cards by the device plugin, n2 by DRA; n3 has a card that is in use."""

    ends: dict[str, Json] = field(default_factory=dict)
    """By Node, the status in which its Pod ends, in place of Succeeded."""
    logs: dict[str, Any] = field(default_factory=dict)
    """By Node, the log of its Pod, in place of `GOOD`."""
    unseen: int = 0
    """How many Pods are refused yet, as admission has not seen the class."""
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By verb and resource, an answer."""
    classes: set[str] = field(default_factory=set)
    made: dict[str, Json] = field(default_factory=dict)
    """What is there, by its path."""
    history: list[tuple[str, str]] = field(default_factory=list)

    def lists(self) -> dict[str, list[Json]]:
        (slices,) = cut("n2", "npu0")
        labels = {"furiosa.ai/npu.count": "2", "furiosa.ai/npu.family": "rngd"}
        return {
            "nodes": [node("n1", {NPU: "2"}, labels=labels), node("n2"), node("n3", {NPU: "1"})],
            "pods": [
                *(agent(f"agent-{n}", f"n{n}") for n in (1, 2, 3)),
                pod(requests={NPU: "1"}, on="n3"),
            ],
            "daemonsets": [DAEMON_SET],
            "resourceslices": [slice_("n2", *slices["spec"]["devices"])],
            "resourceclaims": [],
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        *_, resource, name = ("", *request.path.strip("/").split("/"))
        named = resource in ("pods", "priorityclasses", "resourceclaimtemplates")
        kind = resource if named else name
        if request.method == "GET" and name == "log":
            on = _node(self.made[request.path.removesuffix("/log")])
            return web.json_response(self.logs.get(on, GOOD))
        refusal = self.refuses.get(f"{request.method} {kind}")
        if refusal:
            return await status(*refusal)(request)
        if request.method == "POST" and kind == "pods" and self.unseen:
            self.unseen -= 1
            unseen = 'pods "x" is forbidden: no PriorityClass with name npu-verify was found'
            return await status(403, unseen)(request)
        if request.method == "POST":
            body = await request.json()
            path = f"{request.path}/{body['metadata']['name']}"
            self.history.append(("made", path))
            if path in self.made or path in self.classes:
                return await status(409, "already exists")(request)
            self.made[path] = body
            return web.json_response(body)
        if request.method == "DELETE":
            self.history.append(("removed", request.path))
            body = self.made.pop(request.path, None)
            if body is None:
                return await status(404, "not found")(request)
            answered = {"kind": "Status"} if kind == "priorityclasses" else body
            return web.json_response(answered)
        if "labelSelector" in request.query and kind == "pods":
            items = [self._ended(body) for body in self.made.values() if body["kind"] == "Pod"]
            return web.json_response({"kind": "PodList", "items": items})
        items = self.lists()[kind]
        return web.json_response({"kind": f"{_KINDS[kind]}List", "items": items})

    def _ended(self, body: Json) -> Json:
        ended = {"phase": "Succeeded", **DONE}
        return body | {"status": self.ends.get(_node(body), ended)}

    def pods(self) -> dict[str, Json]:
        return {_node(body): body for body in self.made.values() if body["kind"] == "Pod"}


_KINDS = {
    "nodes": "Node",
    "pods": "Pod",
    "daemonsets": "DaemonSet",
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
}


def _node(body: Json) -> str:
    terms = body["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    (term,) = terms["nodeSelectorTerms"]
    (name,) = term["matchFields"][0]["values"]
    return str(name)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    found = Cluster()
    monkeypatch.setattr(kubectl_verify, "_EVERY", 0.0)
    monkeypatch.setattr(kubectl_verify, "run_until_signal", lambda work: asyncio.run(work) or 0)
    async with served(found.answer) as url:
        reach(url, monkeypatch)
        yield found


async def run(*words: str) -> int:
    args = kubectl.parser().parse_args(("verify", *words))
    return await asyncio.to_thread(kubectl.main, args)


async def test_each_node_with_a_free_card_is_verified_and_nothing_stays(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--all") == 0
    printed = capsys.readouterr()
    assert [line.split()[:3] for line in printed.out.splitlines()] == [
        ["NODE", "CARD", "RESULT"],
        ["n1", "npu0", "passed"],
        ["n2", "npu0", "passed"],
        ["n3", "-", "skipped"],
    ]
    assert "no card is free: ml/train" in printed.out
    assert printed.err.splitlines() == [
        "kubectl npu: context here (https://10.96.0.1)",
        "n1: passed",
        "n2: passed",
    ]
    assert cluster.made == {}
    assert len(cluster.history) == 8, "a class, a template and two Pods"
    assert await run("n3") == 1, "it was named"
    assert len(cluster.history) == 8, "nothing was made"


async def test_a_pod_asks_for_a_card_with_the_lowest_priority(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods: dict[str, Json] = {}
    monkeypatch.setattr(kubectl_verify, "_remove", _keep(cluster, pods))
    assert await run("--all", "--timeout=30") == 0
    plugin, dra = pods["n1"], pods["n2"]
    for body in (plugin, dra):
        spec = body["spec"]
        assert body["metadata"]["namespace"] == "kube-system"
        assert (spec["priorityClassName"], spec["activeDeadlineSeconds"]) == ("npu-verify", 30)
        assert spec["serviceAccountName"] == "npu-agent"
        assert spec["automountServiceAccountToken"] is False
        assert spec["tolerations"] == [{"operator": "Exists"}]
        (container,) = spec["containers"]
        assert container["image"] == "reg:5000/npu-agent:1.0"
        assert container["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    (container,) = plugin["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "128Mi", NPU: "1"}
    assert plugin["spec"]["resourceClaims"] == []
    (claim,) = dra["spec"]["resourceClaims"]
    assert claim["name"] == dra["spec"]["containers"][0]["resources"]["claims"][0]["name"]
    (template,) = (body for body in cluster.made.values() if "Template" in body["kind"])
    assert template["metadata"]["name"] == claim["resourceClaimTemplateName"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "npu.furiosa.ai"}


def _keep(cluster: Cluster, pods: dict[str, Json]) -> Any:
    async def keep(*_: object) -> None:
        pods.update(cluster.pods())

    return keep


async def test_a_profile_and_a_namespace_of_ones_own(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods: dict[str, Json] = {}
    monkeypatch.setattr(kubectl_verify, "_remove", _keep(cluster, pods))
    assert await run("n1", "--seccomp=RuntimeDefault") == 0
    assert await run("n2", "--seccomp=operator/npu.json", "-n", "team") == 0
    profiles = [
        body["spec"]["containers"][0]["securityContext"]["seccompProfile"]
        for _, body in sorted(pods.items())
    ]
    localhost = {"type": "Localhost", "localhostProfile": "operator/npu.json"}
    assert profiles == [{"type": "RuntimeDefault"}, localhost]
    assert pods["n2"]["metadata"]["namespace"] == "team"
    assert "serviceAccountName" not in pods["n2"]["spec"], "the agent's is in another namespace"


async def test_a_node_that_fails_says_what_and_who_can_change_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.ends = {"n1": {"phase": "Failed", **DONE}}
    cluster.logs = {"n1": [*GOOD[:1], FILTERED]}
    assert await run("--all") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=3) == [
        *("n1", "npu0", "failed"),
        "io_uring: filtered by the Pod's seccomp profile",
    ]
    assert lines[-1] == "n1: who writes the Pod sets Unconfined"
    cluster.logs = {"n1": "npu-agent: error: "}
    assert await run("n1", "-o", "json") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["node"], row["finding"]) == ("n1", "Error"), "its log is no verdict"


async def test_a_pod_that_waits_is_given_up(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "0/3 nodes are available: 1 Insufficient memory."
    scheduled = {"type": "PodScheduled", "status": "False", "message": message}
    cluster.ends = {"n1": {"phase": "Pending", "conditions": [scheduled]}}
    assert await run("n1", "--timeout=0.05") == 1
    assert f"skipped   it found no place: {message}" in capsys.readouterr().out
    assert cluster.made == {}


async def test_only_the_class_that_it_made_is_removed(cluster: Cluster) -> None:
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    cluster.classes = {f"{path}/npu-verify"}
    assert await run("n1") == 0
    assert ("removed", f"{path}/npu-verify") not in cluster.history


async def test_a_class_that_admission_has_not_seen_yet_is_waited_for(cluster: Cluster) -> None:
    cluster.unseen = 2
    assert await run("n1") == 0
    assert cluster.unseen == 0


async def test_objects_made_so_far_are_removed_when_the_next_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cannot = 'pods is forbidden: User "eve" cannot create resource "pods"'
    cluster.refuses = {"POST pods": (403, cannot)}
    with pytest.raises(CommandError, match=r"cannot create .*k8s/examples/npu-verify\.yaml"):
        await run("--all")
    assert cluster.made == {}
    monkeypatch.setattr(kubectl_verify, "_SEEN", 0.0)  # a class that is not seen yet, else
    violates = 'pods "x" is forbidden: violates PodSecurity "baseline:latest": seccompProfile'
    cluster.refuses = {"POST pods": (403, violates)}
    with pytest.raises(CommandError, match="violates PodSecurity") as caught:
        await run("--all")
    assert "npu-verify.yaml" not in str(caught.value), "no right is missing"
    # A right to the cluster's own objects is not needed where the class is there.
    cluster.refuses = {"POST priorityclasses": (403, "cannot create")}
    assert await run("n1") == 0


async def test_ctrl_c_that_ended_kubectl_first_removes_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost, and the signal comes while another one is made."""
    cluster.ends = {"n1": {"phase": "Running"}}
    lost = asyncio.Event()
    delete = vars(kubectl_verify)["_delete"]

    async def fails_once(api: Any, made: Any) -> None:
        if not lost.is_set():
            lost.set()
            raise ApiError("kubectl has ended", kind=ErrorKind.UNREACHABLE)
        await asyncio.sleep(0.01)
        await delete(api, made)

    monkeypatch.setattr(kubectl_verify, "_delete", fails_once)
    args = kubectl.parser().parse_args(("verify", "n1"))
    command = asyncio.create_task(kubectl_verify._verify(args, []))
    while not cluster.pods():
        await asyncio.sleep(0)
    cluster.refuses = {"GET pods": (503, "kubectl has ended")}
    await lost.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    assert cluster.made == {}


@pytest.mark.parametrize("words", [(), ("n1", "--all")])
async def test_nodes_are_named_or_all_of_them(cluster: Cluster, words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="--all") as caught:
        await run(*words)
    assert caught.value.code == 2
    assert cluster.history == []


@pytest.mark.usefixtures("cluster")
async def test_a_node_that_is_not_there() -> None:
    with pytest.raises(CommandError, match="there is no Node n9"):
        await run("n9")


@pytest.mark.parametrize(
    ("status_", "lines", "result", "finding"),
    [
        (None, [], "skipped", "a Pod with a higher priority got the card"),
        (
            {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}]},
            *([], "skipped", "a Pod with a higher priority got the card"),
        ),
        (
            {"phase": "Failed", "message": "Allocate failed due to no healthy devices"},
            *([], "failed", "Allocate failed due to no healthy devices"),
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {
                        "name": "verify",
                        "state": {
                            "waiting": {"reason": "ErrImagePull", "message": "no such image"}
                        },
                    }
                ],
            },
            *([], "failed", "no such image"),
        ),
        ({"phase": "Running"}, [], "failed", "its Pod did not end in time"),
        (
            {"phase": "Failed", **DONE},
            [FILTERED],
            "failed",
            "io_uring: filtered by the Pod's seccomp profile",
        ),
    ],
)
def test_the_ends_of_a_pod(
    status_: Json | None, lines: list[Json], result: str, finding: str
) -> None:
    ended = status_ and convert({"metadata": {"name": "p"}, "status": status_}, VerifyPod)
    (row,) = judged("n1", ended or None, [convert(line, Check) for line in lines])
    assert (row.result, row.finding) == (result, finding)


def test_the_example_has_the_class_that_the_command_makes() -> None:
    objects = yaml.safe_load_all(
        (ROOT / "k8s/examples/npu-verify.yaml").read_text(encoding="utf-8")
    )
    (example,) = (one for one in objects if one["kind"] == "PriorityClass")
    assert {key: example[key] for key in PRIORITY} == PRIORITY
