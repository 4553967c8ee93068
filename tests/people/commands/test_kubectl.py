"""`kubectl npu` between a person's kubeconfig and a stand-in API server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web

from npu_agent.cli import CommandError
from npu_agent.cli import main as cli
from npu_agent.kube import ApiError
from npu_agent.people.cluster import fetch
from npu_agent.people.commands import kubectl, screen
from npu_agent.people.simulator.apiserver import served
from tests.kube.helpers import Reply, says, status
from tests.people.cluster.build import (
    DAEMON_SET,
    DRIVER,
    NPU,
    SPACE,
    Json,
    agent,
    claims,
    cut,
    held,
    node,
    pod,
)
from tests.people.commands.reached import reach

_DRA = "/apis/resource.k8s.io/v1"
_KINDS = {
    "/api/v1/nodes": "Node",
    "/api/v1/pods": "Pod",
    "/apis/apps/v1/daemonsets": "DaemonSet",
    f"{_DRA}/resourceclaims": "ResourceClaim",
    f"{_DRA}/resourceslices": "ResourceSlice",
    f"{_DRA}/resourceclaimtemplates": "ResourceClaimTemplate",
    f"{_DRA}/deviceclasses": "DeviceClass",
    f"{_DRA}/devicetaintrules": "DeviceTaintRule",
}
PROXY = "proxy/status.json"
FORBIDDEN = status(403, "pods is forbidden: User cannot list")
MISSING = status(404, "404 page not found")


@dataclass
class Cluster:
    """Node n1 has two cards by DRA, in parts, and n2 two by the device plugin."""

    objects: dict[str, list[Json]] = field(default_factory=dict)
    instead: dict[str, Reply] = field(default_factory=dict)
    """What answers paths with these ends."""
    busy: int = 0
    """How often it has too much to do."""
    page: Any = None
    """In place of `PAGE`."""
    asked: list[web.Request] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        path = request.path
        for end, reply in self.instead.items():
            if path.endswith(end):
                return await reply(request)
        if self.busy:
            self.busy -= 1
            return await status(429, "too many requests", Retry_After="0")(request)
        if path.endswith(PROXY):
            return web.json_response(self.page or PAGE)
        front, _, rest = path.partition("/namespaces/")
        namespace, _, resource = rest.partition("/")
        path = f"{front}/{resource}" if resource else front
        fields = request.query.get("fieldSelector", "")
        items = [one for one in self.objects.get(path, []) if meets(one, fields)]
        if namespace:
            items = [one for one in items if one["metadata"]["namespace"] == namespace]
        if selector := request.query.get("labelSelector"):
            wanted = dict(term.split("=") for term in selector.split(","))
            items = [
                one for one in items if wanted.items() <= one["metadata"].get("labels", {}).items()
            ]
        # Two objects a page, so that all lists are read to their ends.
        at = int(request.query.get("continue", "0"))
        meta = {"continue": str(at + 2)} if at + 2 < len(items) else {}
        body = {"kind": f"{_KINDS[path]}List", "metadata": meta, "items": items[at : at + 2]}
        return web.json_response(body)


def meets(one: Json, fields: str) -> bool:
    """Whether an object meets a field selector."""
    for wanted in filter(None, fields.split(",")):
        path, differs, value = re.fullmatch(r"(?s)([\w.]+)(!?)=(.*)", wanted).groups()  # type: ignore[union-attr]
        found: Any = one
        for key in path.split("."):
            found = found.get(key, {})
        if (found == value) is bool(differs):
            return False
    return True


PAGE = {
    "version": "1.0",
    "node": "n2",
    "ready": True,
    "problems": [
        {
            "severity": "warning",
            "text": "npu1 is hot",
            "remedy": "cool it",
            "command": "cordon it",
            "last_command": "at last",
        }
    ],
    "cards": [
        {
            "id": f"UUID-{at}",
            "name": f"npu{at}",
            "family": "rngd",
            "core_count": 8,
            "health": {"state": "healthy"},
            "holders": [{"namespace": SPACE, "pod": f"p{at}", "resource": NPU}],
            "reading": {"cores": [{"core": n, "utilization": 90.0 * at} for n in range(8)]},
        }
        for at in range(2)
    ],
}


def example() -> dict[str, list[Json]]:
    (slices,) = cut("n1", "npu0", "npu1")
    for part in slices["spec"]["devices"]:
        if part["name"].startswith("npu1"):
            part["taints"] = [{"key": f"{DRIVER}/unhealthy", "effect": "NoSchedule"}]
    stale = {**slices["spec"], "pool": {**slices["spec"]["pool"], "generation": 0}}
    labels = {"beta.furiosa.ai/npu.count": "2", "beta.furiosa.ai/npu.family": "renegade"}
    message = "0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu."
    unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
    return {
        "/api/v1/nodes": [
            node("n1", labels=labels),
            node("n2", {NPU: "3"}, labels=labels, status={"capacity": {NPU: "4"}}),
            node("plain"),
        ],
        f"{_DRA}/resourceslices": [{**slices, "spec": stale}, slices],
        f"{_DRA}/resourceclaims": [held("mine", "n1", "npu0-cores-4-7", by="dra")],
        "/apis/apps/v1/daemonsets": [DAEMON_SET],
        "/api/v1/pods": [
            agent("agent-2", "n2"),
            agent("agent-1", "n1"),
            pod("dra", on="n1", resourceClaims=claims(c="mine")),
            pod("p1", {NPU: "1"}, on="n2"),
            pod("p0", {NPU: "1"}, on="n2"),
            pod("waits", {NPU: "9"}, status={"conditions": [unscheduled]}),
            pod("other", on="n2"),
        ],
    }


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    found = Cluster(example())
    async with served(found.answer) as found.url:
        reach(found.url, monkeypatch)
        yield found


async def shown(*words: str) -> str:
    """What the command prints."""
    args = kubectl.parser().parse_args(words)
    async with vars(kubectl)["through_kubectl"](()) as (api, place):
        args.namespace = args.namespace or place.namespace
        found, notes = await kubectl._text(api, args)
    return "\n".join([found, *(f"! {note}" for note in notes)])


@pytest.mark.parametrize("words", ["-A --as=eve pods -o wide", "-o wide pods --as=eve -A"])
def test_options_may_stand_before_the_command_and_after_it(words: str) -> None:
    args = kubectl.parser().parse_args(words.split())
    assert (args.command, args.all_namespaces, args.output) == ("pods", True, "wide")
    assert kubectl.flags(args) == ("--as=eve",)


async def test_nodes_by_both_apis(cluster: Cluster) -> None:
    cluster.busy = 2
    lines = (await shown("nodes")).splitlines()
    # On n1 cores 4-7 are held, and npu1 is out of service; n2 has three devices of four cores, and
    # two of them are held.
    assert [" ".join(line.split()) for line in lines] == [
        "NODE CARDS HEALTHY CORES ALLOCATED FREE WIDEST DRIVER AGENT",
        "n1 2 1 16 4 4 4 - 1.0",
        "n2 2 1 16 8 4 4 - 1.0",
    ]


@pytest.mark.usefixtures("cluster")
async def test_pods_have_cards_cores_and_load() -> None:
    lines = (await shown("pods", "-n", SPACE)).splitlines()
    cells = [line.split() for line in lines]
    assert [row[:6] for row in cells[1:]] == [
        [SPACE, "dra", "n1", "npu0", "4-7", "0%"],
        [SPACE, "p1", "n2", "npu1", "0-7", "90%"],
        [SPACE, "p0", "n2", "npu0", "0-7", "0%"],
        [SPACE, "waits", "-", "-", "-", "-"],
    ]
    assert (await shown("pods")).startswith("no Pod holds an NPU")  # of the context's namespace


@pytest.mark.usefixtures("cluster")
async def test_idle_holders_come_first() -> None:
    found = json.loads(await shown("top", "-A", "-o", "json"))
    assert [(row["pod"], row["load"]) for row in found][-1] == ("p1", 90.0)
    assert "waits" not in {row["pod"] for row in found}


@pytest.mark.parametrize(
    "start", ["2026-11-28T12:00:00", "9999-99-99T00:00:00Z", "soon", "-1-01-01T00:00:00Z"]
)
async def test_an_odd_start_time_costs_its_own_cell(cluster: Cluster, start: str) -> None:
    for one in cluster.objects["/api/v1/pods"]:
        if one["metadata"]["name"] == "p1":
            one["status"]["startTime"] = start
    by_pod = {line.split()[1]: line.split() for line in (await shown("pods", "-A")).splitlines()}
    assert by_pod["p1"][6] == "?"
    assert by_pod["p0"][6] != "?"


async def test_an_odd_object_is_left_out_and_named(cluster: Cluster) -> None:
    path = f"{_DRA}/resourceclaims"
    odd = held("odd", "n1", "npu0", by="dra")
    odd["status"]["allocation"]["devices"]["results"][0]["request"] = "\x1b[2J"
    cluster.objects[path].append(odd)
    for words in (("pods", "-A"), ("nodes",), ("why", "waits", "-n", SPACE)):
        text = await shown(*words)
        assert f"! ResourceClaims left out: {SPACE}/odd: status.allocation.devices" in text
        assert "n1" in text
    cluster.objects[path].append({"metadata": {}})
    with pytest.raises(ApiError, match=r"cannot list ResourceClaims: .*metadata\.name is missing"):
        await shown("nodes")


async def test_objects_that_may_not_be_read_are_named_once_and_the_rest_is_shown(
    cluster: Cluster,
) -> None:
    cluster.instead = dict.fromkeys((PROXY, f"{_DRA}/resourceclaims"), FORBIDDEN)
    lines = (await shown("pods", "-A", "--no-headers")).splitlines()
    assert [line.split()[1] for line in lines if not line.startswith("!")] == ["p1", "p0", "waits"]
    notes = [line for line in lines if line.startswith("!")]
    assert len(notes) == 2
    assert notes[0].startswith("! you may not list ResourceClaims: ")
    assert all("npu-viewer.yaml" in line for line in notes)
    cluster.instead["/api/v1/pods"] = FORBIDDEN
    assert (await shown("top", "-A")).startswith("no Pod holds an NPU, or waits for one in what")
    del cluster.instead["/api/v1/pods"]
    [n1, _] = json.loads((await shown("nodes", "-o", "json")).partition("\n!")[0])
    assert (n1["cards"], n1["allocated"], n1["widest"]) == (2, None, None)


async def test_a_cluster_without_dra_and_without_the_agent(cluster: Cluster) -> None:
    cluster.objects = {"/api/v1/nodes": [{"metadata": {"name": "plain"}}]}
    assert await shown() == "no NPUs found"


@pytest.mark.parametrize(
    "words", [(), ("pods", "-A"), ("top", "-A"), ("why", "p0"), ("node", "n1")]
)
async def test_a_server_that_has_nothing_is_no_empty_cluster(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    cluster.instead = dict.fromkeys((*_KINDS, "/api/v1/namespaces/default/pods"), MISSING)
    with pytest.raises(ApiError, match="check that this is a Kubernetes API server"):
        await shown(*words)
    cluster.instead = {path: MISSING for path in _KINDS if path.startswith(_DRA)}
    if words[:1] != ("why",):
        assert "n2" in await shown(*words) or words[:1] == ("node",)


EXAMPLE = "example.com/npu"


def renamed(cluster: Cluster) -> None:
    """The agent of n2 serves its cards by a name of another domain, and n1 has another's GPUs."""
    text = json.dumps(cluster.objects).replace(NPU, EXAMPLE)
    cluster.objects = json.loads(text)
    gpus = {"other.example/gpu": "1"}
    cluster.objects["/api/v1/nodes"][0]["status"]["capacity"].update(gpus)
    cluster.objects["/api/v1/pods"].append(pod("gpu", gpus, on="n1"))
    cluster.page = {**json.loads(json.dumps(PAGE).replace(NPU, EXAMPLE)), "resources": []}
    cluster.page["resources"].append({"resource": EXAMPLE})
    of_dra = {**PAGE, "cards": [], "resources": []}
    cluster.instead[f"agent-1:9100/{PROXY}"] = says(of_dra)


async def test_resources_of_another_domain_are_known_from_the_agents_page(cluster: Cluster) -> None:
    renamed(cluster)
    lines = [" ".join(line.split()) for line in (await shown("nodes", "-o", "wide")).splitlines()]
    assert lines[1:] == [
        "n1 2 1 16 4 4 4 - 1.0 dra",
        "n2 2 2 16 16 0 - - 1.0 device-plugin",
    ]
    lines = [" ".join(line.split()) for line in (await shown("pods", "-A")).splitlines()]
    assert [line.partition(" ")[2] for line in lines[1:]] == [
        "dra n1 npu0 4-7 - ? Running".replace("?", lines[1].split()[-2]),
        f"p1 n2 npu1 0-7 90% {lines[2].split()[-2]} Running",
        f"p0 n2 npu0 0-7 0% {lines[3].split()[-2]} Running",
        "waits - - - - - Pending",
    ]
    assert "  example.com/npu: npu1, cores 0-7, load 90%" in await shown("why", "p1", "-n", SPACE)


async def test_a_value_of_such_resources_that_no_page_has_is_unknown_and_never_0(
    cluster: Cluster,
) -> None:
    renamed(cluster)
    cluster.instead[PROXY] = says("gone", 503)
    text = await shown("nodes")
    (line,) = [line for line in text.splitlines() if line.startswith("n2")]
    assert line.split() == ["n2", *"------", "-", "1.0"]
    assert "! 1 pages of agents were not read; of Node n2: cannot get the proxy/status.json" in text
    pods = cluster.objects["/api/v1/pods"]
    cluster.objects["/api/v1/pods"] = [one for one in pods if one["metadata"]["name"] != "dra"]
    text = await shown("pods", "-A")
    assert text.startswith("no Pod holds an NPU, or waits for one in what could be read")


async def test_the_agents_own_container_and_port_are_asked_behind_those_of_a_mesh(
    cluster: Cluster,
) -> None:
    await shown("node", "n2")
    (page,) = [request for request in cluster.asked if request.path.endswith(PROXY)]
    assert "/pods/agent-2:9100/proxy/" in page.path


async def test_a_list_that_expires_between_two_pages_is_read_again_once(cluster: Cluster) -> None:
    expired = status(410, "The provided continue parameter is too old")
    left = 1

    async def once(request: web.Request) -> web.StreamResponse:
        nonlocal left
        if "continue" in request.query and left:
            left -= 1
            return await expired(request)
        cluster.instead.clear()
        try:
            return await cluster.answer(request)
        finally:
            cluster.instead["/nodes"] = once

    cluster.instead["/nodes"] = once
    names = [line.split()[0] for line in (await shown("nodes")).splitlines()]
    assert names == ["NODE", "n1", "n2"]
    left = 2
    with pytest.raises(ApiError, match="410 Gone"):
        await shown("nodes")


@pytest.mark.usefixtures("cluster")
async def test_selectors_and_names() -> None:
    assert await shown("-l", "zone=a") == "no NPUs found"
    assert await shown("-o", "name") == "node/n1\nnode/n2"


async def test_a_nodes_page_and_one_that_wants_a_token(cluster: Cluster) -> None:
    text = await shown("node", "n2")
    assert "npu0   rngd     8       healthy   -          ml/p0" in text
    assert "npu1 is hot\n  cool it\n  $ cordon it\n  last, as it deletes Pods: $ at last" in text
    cluster.instead[PROXY] = says("send a bearer token", 401)
    with pytest.raises(ApiError, match="port-forward agent-2 9100"):
        await shown("node", "n2")
    assert "wants a token" in await shown("pods", "-A")
    cluster.instead[PROXY] = FORBIDDEN
    with pytest.raises(CommandError, match=r"cannot get .*npu-viewer\.yaml") as caught:
        await asyncio.to_thread(kubectl.main, kubectl.parser().parse_args(("node", "n2")))
    assert "doctor" not in str(caught.value)


async def test_a_page_that_redirects_is_not_followed(cluster: Cluster) -> None:
    """It would be read with the person's rights: through kubectl's socket all is one host."""
    secrets = f"{cluster.url}/api/v1/secrets"
    cluster.instead[f"agent-1:9100/{PROXY}"] = says("", 302, {"Location": secrets})
    text = await shown("pods", "-A")
    assert "dra" in text
    assert "of Node n1: cannot get the proxy/status.json of Pod " in text
    assert f"answered 302 Found that leads to {secrets}: no redirect is followed" in text
    assert "/api/v1/secrets" not in [request.path for request in cluster.asked]


@pytest.mark.usefixtures("cluster")
async def test_by_the_name_of_a_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-npu"])
    monkeypatch.setattr(kubectl, "run_until_signal", lambda work: asyncio.run(work) or 0)
    assert await asyncio.to_thread(cli.main, ["-o", "name"]) == 0
    assert capsys.readouterr().out == "node/n1\nnode/n2\n"
    assert await asyncio.to_thread(cli.main, ["why", "none"]) == 1
    assert capsys.readouterr().err.startswith("kubectl npu: error: there is no Pod none")
    with pytest.raises(SystemExit):
        cli.main(["cordn"])
    assert capsys.readouterr().err.startswith("kubectl npu: error: cordn: no such command: did you")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause of --watch, which takes none; the third ends it."""
    taken: list[float] = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        if len(taken) == 3:
            raise asyncio.CancelledError

    stand_in = SimpleNamespace(sleep=sleep, CancelledError=asyncio.CancelledError)
    monkeypatch.setattr(screen, "asyncio", stand_in)
    return taken


async def test_a_large_cluster_is_not_read_all_the_time(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    clock = iter([0.0, 0.1, 100.0, 103.0, 200.0, 200.1])  # before and after each reading
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def text() -> str:
        return "n1"

    with pytest.raises(asyncio.CancelledError):
        await screen.watch(kubectl.parser().parse_args(["-w"]), text)
    assert pauses == [2.0, pytest.approx(15.0), 2.0]


@pytest.mark.usefixtures("cluster")
async def test_why_a_pod_is_pending() -> None:
    sentence, *lines = (await shown("why", "waits", "-n", SPACE)).splitlines()
    assert sentence == "Pod ml/waits is Pending."
    assert lines == [
        "The scheduler: 0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu.",
        "  requests: 9 beta.furiosa.ai/npu",
        "  beta.furiosa.ai/npu: Nodes offer it: n2 (3 of 4 allocatable, Pods have 2)",
        (
            "  n1: 1 of 2 cards healthy; 4 of 16 cores free, the widest free device has 4; taint "
            "npu.furiosa.ai/unhealthy:NoSchedule on npu1; in use by ml/dra"
        ),
        (
            "  n2: 1 of 2 cards healthy; 4 of 16 cores free, the widest free device has 4; "
            "in use by ml/p1, ml/p0"
        ),
    ]
    data = json.loads(await shown("why", "waits", "-n", SPACE, "-o", "json"))
    assert data["sentence"] == sentence
    assert data["scheduler"].startswith("0/3 nodes")
    assert data["facts"][0] == {"subject": "requests", "text": "9 beta.furiosa.ai/npu"}


async def test_pods_that_have_ended_are_not_read_but_by_name(cluster: Cluster) -> None:
    ended = pod("ended", {NPU: "1"}, on="n2", status={"phase": "Succeeded"})
    cluster.objects["/api/v1/pods"].append(ended)
    assert "ended" not in await shown("pods", "-A")
    assert "ml/ended has ended" in await shown("why", "ended", "-n", SPACE)


async def test_why_of_a_running_pod_has_what_pods_has(cluster: Cluster) -> None:
    running = await shown("why", "p1", "-n", SPACE)
    assert running.splitlines() == [
        "Pod ml/p1 is on Node n2: its phase is Running.",
        f"  {NPU}: npu1, cores 0-7, load 90%",
    ]
    row = next(line.split() for line in (await shown("pods", "-A")).splitlines() if "p1" in line)
    assert (row[3], row[4], row[5]) == ("npu1", "0-7", "90%")
    cluster.instead[PROXY] = FORBIDDEN
    unread = await shown("why", "p1", "-n", SPACE)
    assert f"  {NPU}: ? (1)\n! you may not read the agents' pages (pods/proxy): ask an" in unread


async def test_why_with_rights_in_one_namespace(cluster: Cluster) -> None:
    with pytest.raises(CommandError, match="there is no Pod none in namespace ml"):
        await shown("why", "none", "-n", SPACE)
    templates = f"{_DRA}/namespaces/ml/resourceclaimtemplates"
    cluster.instead = dict.fromkeys((*_KINDS, templates), FORBIDDEN)
    assert (await shown("why", "waits", "-n", SPACE)).splitlines() == [
        "Pod ml/waits is Pending.",
        "The scheduler: 0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu.",
        "  requests: 9 beta.furiosa.ai/npu",
        (
            "! you may not list DaemonSets, DeviceClasses, DeviceTaintRules, Nodes, Pods, "
            "ResourceClaimTemplates, ResourceClaims, ResourceSlices: ask an administrator for the "
            "ClusterRole npu-viewer, k8s/examples/npu-viewer.yaml in npu-agent's repository, and "
            "`kubectl create clusterrolebinding npu-viewer --clusterrole=npu-viewer --user=YOU`"
        ),
    ]
    cluster.instead["/api/v1/namespaces/ml/pods"] = FORBIDDEN
    with pytest.raises(CommandError, match="cannot list Pods"):
        await shown("why", "waits", "-n", SPACE)


@pytest.mark.usefixtures("cluster")
async def test_yaml_is_a_document_or_several() -> None:
    [n1, n2] = yaml.safe_load(await shown("-o", "yaml"))
    assert (n1["node"], n1["free"], n2["node"]) == ("n1", 4, "n2")
    assert (await shown("-o", "yaml", "-w")).startswith("---\n- node: n1")
    assert yaml.safe_load(await shown("why", "waits", "-n", SPACE, "-o", "yaml"))["facts"]


@pytest.mark.usefixtures("cluster", "pauses")
async def test_watching_prints_what_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter([("a", ["refused"]), ("a", ["refused"]), ("b", [])])

    async def text(*_: object) -> tuple[str, list[str]]:
        return next(texts)

    monkeypatch.setattr(kubectl, "_text", text)
    with pytest.raises(asyncio.CancelledError):
        await kubectl._show(kubectl.parser().parse_args(["-w"]))
    assert capsys.readouterr() == ("a\nb\n", "kubectl npu: refused\n")


async def test_names_are_whole(cluster: Cluster) -> None:
    name = "n" * 253
    cluster.objects["/api/v1/nodes"][1]["metadata"]["name"] = name
    assert f"node/{name}" in (await shown("-o", "name")).splitlines()


HOSTILE = "x\x1b]0;owned\x07\u202e\nroot"
"""What would change a terminal's title, its direction, and begin a line of its own."""


@pytest.mark.parametrize(
    "words",
    [
        *((), ("-o", "name"), ("-o", "json"), ("-o", "yaml"), ("pods", "-A"), ("top", "-A")),
        *(("pods", "-A", "-o", "wide"), ("pods", "-A", "-o", "name"), ("node", "n2")),
        *(("why", HOSTILE, "-n", SPACE), ("why", "waits", "-n", SPACE)),
    ],
)
async def test_hostile_words_of_objects_and_pages_reach_no_terminal(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    cluster.objects["/api/v1/pods"].append(pod(HOSTILE, {NPU: "1"}, on="n2"))
    cluster.objects["/api/v1/nodes"][0]["metadata"]["name"] = HOSTILE
    slices = cluster.objects[f"{_DRA}/resourceslices"]
    slices[1]["spec"]["nodeName"] = slices[1]["spec"]["pool"]["name"] = HOSTILE
    card = {**PAGE["cards"][0], "cordoned": HOSTILE, "name": HOSTILE}  # type: ignore[index]
    card["holders"] = [{"namespace": SPACE, "pod": HOSTILE, "resource": HOSTILE}]
    problem = {"severity": HOSTILE, "text": HOSTILE, "remedy": HOSTILE, "command": HOSTILE}
    cluster.page = {**PAGE, "version": HOSTILE, "cards": [card], "problems": [problem]}
    text = await shown(*words)
    assert "owned" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert not [line for line in text.splitlines() if line.startswith("root")]


HUGE = {"namespace": "ml", "pod": "p", "cores": "0-9999999999"}


@pytest.mark.parametrize(
    "card",
    [
        *({}, {"name": "npu0"}, {"name": 0, "core_count": 8}, None),
        *({"name": "a", "core_count": 10**12}, {"name": "a", "core_count": 8, "holders": [HUGE]}),
    ],
)
async def test_a_page_of_another_version_is_named_and_the_rest_is_shown(
    cluster: Cluster, card: Any
) -> None:
    cluster.page = {"version": "9.9", "cards": [card]}
    text = await shown("pods", "-A")
    assert "p0" in text
    assert (
        "2 pages of agents were not read; of Node n1: the page of the agent on Node n1 cannot"
        in text
    )
    with pytest.raises(CommandError, match=r"on Node n2 cannot be used.*cards\["):
        await shown("node", "n2")


async def test_without_an_agent(cluster: Cluster) -> None:
    pods = cluster.objects["/api/v1/pods"]
    cluster.objects["/api/v1/pods"] = [one for one in pods if "labels" not in one["metadata"]]
    lines = [line.split() for line in (await shown("--no-headers")).splitlines()]
    assert [(row[0], row[2], row[-1]) for row in lines] == [("n1", "1", "-"), ("n2", "1", "-")]
    assert "npu0" in await shown("pods", "-A")
    with pytest.raises(CommandError, match="no agent runs on Node n2: `kubectl get pods"):
        await shown("node", "n2")


async def test_credentials_that_have_expired(cluster: Cluster) -> None:
    cluster.instead[""] = status(401, "Unauthorized")
    with pytest.raises(ApiError, match=r"answered 401 Unauthorized.*log in again"):
        await shown()


async def test_an_api_server_that_has_too_much_to_do_for_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.busy = 10**6
    monkeypatch.setattr(fetch, "_PATIENCE", 0.2)
    with pytest.raises(ApiError, match=r"overloaded for 0\.2 s: try again later"):
        await shown()
