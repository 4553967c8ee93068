"""`kubectl npu` between a person's kubeconfig and a stand-in API server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web

from npu_agent.cli import CommandError
from npu_agent.cli import main as cli
from npu_agent.core.cordon import ANNOTATION
from npu_agent.kube import Api, ApiError
from npu_agent.people.cluster import fetch
from npu_agent.people.cluster.why import Explanation, Fact
from npu_agent.people.commands import cordon, drain, kubectl, kubectl_why, screen
from npu_agent.people.simulator.apiserver import served
from tests.kube.helpers import status
from tests.people.commands.reached import reach

Object = dict[str, Any]
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
READY = {"type": "Ready", "status": "True"}
UNSCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "message": "0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu.",
}
AGENT = {"app.kubernetes.io/name": "npu-agent"}


@dataclass
class Cluster:
    """Node n1 has two cards by DRA, in parts, and n2 two by the device plugin."""

    objects: dict[str, list[Object]] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    """Paths that the user may not read."""
    missing: set[str] = field(default_factory=set)
    """Paths that the server does not have."""
    busy: int = 0
    """How often it has too much to do."""
    token: bool = False
    """Whether the pages want a token."""
    expired: bool = False
    """Whether the user's credentials are."""
    page: Any = None
    """In place of `PAGE`."""
    asked: list[web.Request] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        if self.expired:
            return await status(401, "Unauthorized")(request)
        path = request.path
        if path in self.forbidden or ("proxy" in path and "proxy" in self.forbidden):
            return await status(403, "pods is forbidden: User cannot list")(request)
        if path in self.missing:
            return await status(404, "404 page not found")(request)
        if self.busy:
            self.busy -= 1
            return await status(429, "too many requests", Retry_After="0")(request)
        if "proxy" in path:
            if self.token:
                return web.Response(status=401, text="send a bearer token")
            return web.json_response(self.page or PAGE)
        fields = request.query.get("fieldSelector", "")
        if "/namespaces/" in path:
            front, _, rest = path.partition("/namespaces/")
            namespace, _, resource = rest.partition("/")
            items = [
                one
                for one in self.objects.get(f"{front}/{resource}", [])
                if one["metadata"]["namespace"] == namespace and meets(one, fields)
            ]
            return web.json_response(
                {"kind": _KINDS[f"{front}/{resource}"] + "List", "items": items}
            )
        items = [one for one in self.objects.get(path, []) if meets(one, fields)]
        if selector := request.query.get("labelSelector"):
            key, _, value = selector.partition("=")
            items = [one for one in items if one["metadata"].get("labels", {}).get(key) == value]
        # Two objects a page, so that all lists are read to their ends.
        at = int(request.query.get("continue", "0"))
        meta = {"continue": str(at + 2)} if at + 2 < len(items) else {}
        body = {"kind": f"{_KINDS[path]}List", "metadata": meta, "items": items[at : at + 2]}
        return web.json_response(body)


def meets(one: Object, fields: str) -> bool:
    """Whether an object meets a field selector."""
    for wanted in filter(None, fields.split(",")):
        path, differs, value = re.fullmatch(r"(?s)([\w.]+)(!?)=(.*)", wanted).groups()  # type: ignore[union-attr]
        found: Any = one
        for key in path.split("."):
            found = found.get(key, {})
        if (found == value) is bool(differs):
            return False
    return True


def node(name: str, **status_: Any) -> Object:
    labels = {"beta.furiosa.ai/npu.count": "2", "beta.furiosa.ai/npu.family": "renegade"}
    return {"metadata": {"name": name, "labels": labels}, "status": status_}


DAEMON_SET = {
    "metadata": {"name": "npu-agent", "namespace": "kube-system", "uid": "set", "labels": AGENT},
    "spec": {"template": {"spec": {"serviceAccountName": "npu-agent"}}},
}
OWNED = [{"kind": "DaemonSet", "name": "npu-agent", "uid": "set", "controller": True}]


def agent(name: str, node_name: str, tag: str = "1.0") -> Object:
    containers = [{"name": "npu-agent", "image": f"reg:5000/npu-agent:{tag}"}]
    account = "npu-agent"
    made = pod(name, node_name, "kube-system", containers=containers, serviceAccountName=account)
    made["metadata"] |= {"labels": AGENT, "ownerReferences": OWNED}
    return made


def pod(name: str, node_name: str = "", namespace: str = "team", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"u-{name}", "labels": {}},
        "spec": {"nodeName": node_name, "containers": [{"name": "c"}], **spec},
        "status": {
            "phase": "Running" if node_name else "Pending",
            "startTime": "2026-01-01T00:00:00Z" if node_name else None,
            "conditions": [READY if node_name else UNSCHEDULED],
        },
    }


def asks(resource: str, count: int) -> list[Object]:
    limits = {resource: str(count)}
    return [{"name": "c", "image": "x", "resources": {"limits": limits, "requests": limits}}]


def device(name: str, card: int, cores: range, *taints: str) -> Object:
    return {
        "name": name,
        "attributes": {"index": {"int": card}, "cores": {"int": len(cores)}},
        "consumesCounters": [
            {"counterSet": f"npu{card}", "counters": {f"core-{n}": {"value": "1"} for n in cores}}
        ],
        "taints": [{"key": f"npu.furiosa.ai/{key}", "effect": "NoSchedule"} for key in taints],
    }


PAGE = {
    "version": "1.0",
    "node": "n2",
    "ready": True,
    "problems": [
        {
            "severity": "warning",
            "text": "npu1 is hot",
            "remedy": "cool it",
            "command": "",
            "last_command": "at last",
        }
    ],
    "cards": [
        {
            "id": f"UUID-{at}",
            "name": f"npu{at}",
            "family": "rngd",
            "core_count": 8,
            "cordoned": None,
            "health": {"state": "healthy", "reason": ""},
            "holders": [
                {
                    "namespace": "team",
                    "pod": f"p{at}",
                    "cores": None,
                    "claim": None,
                    "resource": "beta.furiosa.ai/npu",
                }
            ],
            "reading": {"cores": [{"core": n, "utilization": 90.0 * at} for n in range(8)]},
        }
        for at in range(2)
    ],
}


def example() -> dict[str, list[Object]]:
    devices = [
        device(f"npu{card}-{first}", card, range(first, first + width), *taints)
        for card, taints in ((0, ()), (1, ("unhealthy",)))
        for width in (8, 4)
        for first in range(0, 8, width)
    ]
    devices[0]["name"], devices[3]["name"] = "npu0", "npu1"
    slice_ = {
        "driver": "npu.furiosa.ai",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 2, "resourceSliceCount": 1},
        "devices": devices,
    }
    stale = {**slice_, "pool": {**slice_["pool"], "generation": 1}}  # type: ignore[dict-item]
    result = {"request": "r", "driver": "npu.furiosa.ai", "pool": "n1", "device": "npu0-4"}
    claim = {
        "metadata": {"name": "mine", "namespace": "team"},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "dra", "uid": "u-dra"}],
        },
    }
    counts = {"beta.furiosa.ai/npu": "4"}
    return {
        "/api/v1/nodes": [
            node("n1"),
            node("n2", capacity=counts, allocatable={"beta.furiosa.ai/npu": "3"}),
            {"metadata": {"name": "plain"}},
        ],
        f"{_DRA}/resourceslices": [
            {"metadata": {"name": "s0"}, "spec": stale},
            {"metadata": {"name": "s1"}, "spec": slice_},
        ],
        f"{_DRA}/resourceclaims": [claim],
        "/apis/apps/v1/daemonsets": [DAEMON_SET],
        "/api/v1/pods": [
            agent("agent-2", "n2"),
            agent("agent-1", "n1"),
            pod("dra", "n1", resourceClaims=[{"name": "c", "resourceClaimName": "mine"}]),
            pod("p1", "n2", containers=asks("beta.furiosa.ai/npu", 1)),
            pod("p0", "n2", containers=asks("beta.furiosa.ai/npu", 1)),
            pod("waits", containers=asks("beta.furiosa.ai/npu", 9)),
            pod("other", "n2"),
        ],
    }


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    found = Cluster(example())
    async with served(found.answer) as url:
        reach(url, monkeypatch)
        yield found


async def shown(*words: str) -> str:
    """What the command prints; it is run on a thread, as it has a loop of its own."""

    def act() -> str:
        args = kubectl.parse(words)
        reached: Any = vars(kubectl)["through_kubectl"]

        async def text() -> str:
            async with reached(()) as (api, place):
                args.namespace = args.namespace or place.namespace
                found, notes = await kubectl._text(api, args)
            return "\n".join([found, *(f"! {note}" for note in notes)])

        return asyncio.run(text())

    return await asyncio.to_thread(act)


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
    lines = (await shown("pods", "-n", "team")).splitlines()
    cells = [line.split() for line in lines]
    assert [row[:6] for row in cells[1:]] == [
        ["team", "dra", "n1", "npu0", "4-7", "0%"],
        ["team", "p1", "n2", "npu1", "0-7", "90%"],
        ["team", "p0", "n2", "npu0", "0-7", "0%"],
        ["team", "waits", "-", "-", "-", "-"],
    ]
    assert (await shown("pods")).startswith("no Pod holds an NPU")  # of the context's namespace


@pytest.mark.usefixtures("cluster")
async def test_idle_holders_come_first() -> None:
    found = json.loads(await shown("top", "-A", "-o", "json"))
    assert [(row["pod"], row["load"]) for row in found][-1] == ("p1", 90.0)
    assert "waits" not in {row["pod"] for row in found}


async def test_what_may_not_be_read_is_said_once_and_the_rest_is_shown(cluster: Cluster) -> None:
    cluster.forbidden = {"proxy", f"{_DRA}/resourceclaims"}
    lines = (await shown("pods", "-A", "--no-headers")).splitlines()
    assert [line.split()[1] for line in lines if not line.startswith("!")] == ["p1", "p0", "waits"]
    notes = [line for line in lines if line.startswith("!")]
    assert len(notes) == 2
    assert notes[0].startswith("! you may not list ResourceClaims: ")
    assert all("npu-viewer.yaml" in line for line in notes)
    cluster.forbidden.add("/api/v1/pods")
    assert (await shown("top", "-A")).startswith("no Pod holds an NPU, or waits for one in what")
    cluster.forbidden.remove("/api/v1/pods")
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
    cluster.missing = {*_KINDS, "/api/v1/namespaces/default/pods"}
    with pytest.raises(ApiError, match="check that this is a Kubernetes API server"):
        await shown(*words)
    cluster.missing = {path for path in _KINDS if path.startswith(_DRA)}
    if words[:1] != ("why",):
        assert "n2" in await shown(*words) or words[:1] == ("node",)


@pytest.mark.usefixtures("cluster")
async def test_selectors_and_names() -> None:
    assert await shown("-l", "zone=a") == "no NPUs found"
    assert await shown("-o", "name") == "node/n1\nnode/n2"


async def test_a_nodes_page_and_one_that_wants_a_token(cluster: Cluster) -> None:
    text = await shown("node", "n2")
    assert "npu0   rngd     8       healthy   -          team/p0" in text
    assert "warning: npu1 is hot\n  cool it\n  at last" in text
    cluster.token = True
    with pytest.raises(ApiError, match="port-forward agent-2 9100"):
        await shown("node", "n2")
    assert "wants a token" in await shown("pods", "-A")
    cluster.forbidden = {"proxy"}
    with pytest.raises(CommandError, match=r"cannot get .*npu-viewer\.yaml") as caught:
        await asyncio.to_thread(kubectl.main, kubectl.parse(("node", "n2")))
    assert "doctor" not in str(caught.value)


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


async def test_a_large_cluster_is_not_read_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, paused = [0.1, 3.0], list[float]()
    clock = iter([0.0, taken[0], 100.0, 100.0 + taken[1]])
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def pause(_: asyncio.Event, seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == len(taken):
            raise asyncio.CancelledError

    async def text() -> str:
        return "n1"

    monkeypatch.setattr(screen, "set_within", pause)
    with pytest.raises(asyncio.CancelledError):
        await screen.watch(kubectl.parse(["-w"]), text)
    assert paused == [2.0, pytest.approx(15.0)]


@pytest.mark.usefixtures("cluster")
async def test_why_a_pod_is_pending() -> None:
    sentence, *lines = (await shown("why", "waits", "-n", "team")).splitlines()
    assert sentence == "Pod team/waits is Pending."
    assert lines == [
        "The scheduler: 0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu.",
        "  requests: 9 beta.furiosa.ai/npu",
        "  beta.furiosa.ai/npu: Nodes offer it: n2 (3 of 4 allocatable, Pods have 2)",
        (
            "  n1: 1 of 2 cards healthy; 4 of 16 cores free, the widest free device has 4; taint "
            "npu.furiosa.ai/unhealthy:NoSchedule on npu1; in use by team/dra"
        ),
        (
            "  n2: 1 of 2 cards healthy; 4 of 16 cores free, the widest free device has 4; "
            "in use by team/p1, team/p0"
        ),
    ]
    data = json.loads(await shown("why", "waits", "-n", "team", "-o", "json"))
    assert data["sentence"] == sentence
    assert data["scheduler"].startswith("0/3 nodes")
    assert data["facts"][0] == {"subject": "requests", "text": "9 beta.furiosa.ai/npu"}


@pytest.mark.usefixtures("cluster")
async def test_the_loop_goes_on_while_selectors_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, ran = asyncio.get_running_loop(), threading.Event()

    def why(*_: object) -> Explanation:
        loop.call_soon_threadsafe(ran.set)
        assert ran.wait(30)
        return Explanation("It is.")

    monkeypatch.setattr(kubectl_why, "why", why)
    async with vars(kubectl)["through_kubectl"](()) as (api, _):
        await kubectl_why.answer(api, "team", "waits", kubectl._WORDS)


def test_nodes_of_which_the_same_is_true_share_a_line() -> None:
    texts = ["full", "empty", "full", "full", "full", *(f"{n} free" for n in range(30))]
    found = Explanation(
        "It is.", None, tuple(Fact(f"n{at}", text) for at, text in enumerate(texts, 1))
    )
    lines = kubectl_why.lines(found).splitlines()
    assert lines[1:3] == ["  n1, n3, n4 and 1 more: full", "  n2: empty"]
    assert lines[21:] == ["  and 12 lines more: `-o wide` has them"]
    assert kubectl_why.lines(found, each=True).count("full") == 4


async def test_pods_that_have_ended_are_not_read_but_by_name(cluster: Cluster) -> None:
    ended = pod("ended", "n2", containers=asks("beta.furiosa.ai/npu", 1))
    ended["status"]["phase"] = "Succeeded"
    cluster.objects["/api/v1/pods"].append(ended)
    assert "ended" not in await shown("pods", "-A")
    assert "team/ended has ended" in await shown("why", "ended", "-n", "team")


async def test_why_with_rights_in_one_namespace(cluster: Cluster) -> None:
    with pytest.raises(CommandError, match="there is no Pod none in namespace team"):
        await shown("why", "none", "-n", "team")
    cluster.forbidden = {*_KINDS, f"{_DRA}/namespaces/team/resourceclaimtemplates"}
    assert (await shown("why", "waits", "-n", "team")).splitlines() == [
        "Pod team/waits is Pending.",
        "The scheduler: 0/3 nodes are available: 3 Insufficient beta.furiosa.ai/npu.",
        "  requests: 9 beta.furiosa.ai/npu",
        (
            "! you may not list DaemonSets, DeviceClasses, DeviceTaintRules, Nodes, Pods, "
            "ResourceClaimTemplates, ResourceClaims, ResourceSlices: the ClusterRole npu-viewer "
            "(k8s/examples/npu-viewer.yaml) allows it"
        ),
    ]
    cluster.forbidden.add("/api/v1/namespaces/team/pods")
    with pytest.raises(CommandError, match="cannot list Pods"):
        await shown("why", "waits", "-n", "team")


@pytest.mark.usefixtures("cluster")
async def test_yaml_is_a_document_or_several() -> None:
    [n1, n2] = yaml.safe_load(await shown("-o", "yaml"))
    assert (n1["node"], n1["free"], n2["node"]) == ("n1", 4, "n2")
    assert (await shown("-o", "yaml", "-w")).startswith("---\n- node: n1")
    assert yaml.safe_load(await shown("why", "waits", "-n", "team", "-o", "yaml"))["facts"]


async def test_watching_prints_what_differs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = 0

    async def pause(*_: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:  # the first two are alike
            del cluster.objects["/api/v1/nodes"][0]
        if rounds == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(screen, "set_within", pause)
    args = kubectl.parse(["-w", "--no-headers"])
    with pytest.raises(asyncio.CancelledError):
        await kubectl._show(args)
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["n1", "n2", "n2"]


async def test_after_q_the_cluster_is_not_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch(*_: object) -> None:
        cluster.asked.clear()

    monkeypatch.setattr(kubectl, "watch", watch)
    await kubectl._show(kubectl.parse(["-w"]))
    assert cluster.asked == []


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
        *(("why", HOSTILE, "-n", "team"), ("why", "waits", "-n", "team")),
    ],
)
async def test_hostile_words_of_objects_and_pages_reach_no_terminal(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    hostile = pod(HOSTILE, "n2", containers=asks("beta.furiosa.ai/npu", 1))
    cluster.objects["/api/v1/pods"].append(hostile)
    cluster.objects["/api/v1/nodes"][0]["metadata"]["name"] = HOSTILE
    slices = cluster.objects[f"{_DRA}/resourceslices"]
    slices[1]["spec"]["nodeName"] = slices[1]["spec"]["pool"]["name"] = HOSTILE
    card = {**PAGE["cards"][0], "cordoned": HOSTILE, "name": HOSTILE}  # type: ignore[index]
    card["holders"] = [{"namespace": "team", "pod": HOSTILE, "resource": HOSTILE}]
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


async def test_a_page_with_less_and_with_more_than_is_known(cluster: Cluster) -> None:
    cluster.page = {"cards": [{"name": "npu0", "core_count": 8, "aura": "good"}], "moods": []}
    text = await shown("node", "n2")
    assert "npu0" in text
    assert "agent ? on Node ?, not ready" in text


async def test_without_an_agent(cluster: Cluster) -> None:
    pods = cluster.objects["/api/v1/pods"]
    cluster.objects["/api/v1/pods"] = [one for one in pods if not one["metadata"]["labels"]]
    lines = [line.split() for line in (await shown("--no-headers")).splitlines()]
    assert [(row[0], row[2], row[-1]) for row in lines] == [("n1", "1", "-"), ("n2", "1", "-")]
    assert "npu0" in await shown("pods", "-A")
    with pytest.raises(CommandError, match="no agent runs on Node n2"):
        await shown("node", "n2")


async def test_credentials_that_have_expired(cluster: Cluster) -> None:
    cluster.expired = True
    with pytest.raises(ApiError, match=r"answered 401 Unauthorized.*log in again"):
        await shown()


async def test_an_api_server_that_has_too_much_to_do_for_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.busy = 10**6
    monkeypatch.setattr(fetch, "_PATIENCE", 0.2)
    with pytest.raises(ApiError, match=r"overloaded for 0\.2 s: try again later"):
        await shown()


@pytest.mark.usefixtures("cluster")
async def test_a_card_is_cordoned_and_brought_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/people/commands/test_cordon.py has the rest of these commands."""
    written: list[str | None] = [None]

    async def change(_: Api, name: str, key: str, by: Callable[[str | None], str | None]) -> None:
        assert (name, key) == ("n2", ANNOTATION)
        written.append(by(written[-1]))

    monkeypatch.setattr(cordon, "change_annotation", change)
    for words in (
        ("cordon", "n2", "npu1", "--reason=fan"),
        ("uncordon", "n2", "npu1"),
        ("drain", "n2", "npu1", "--dry-run"),
    ):
        assert await asyncio.to_thread(kubectl.main, kubectl.parse(words)) == 0
    assert written[1:] == ['{"npu1": "fan"}', None]
    assert capsys.readouterr().out.splitlines() == [
        "npu1 of Node n2 is cordoned",
        "npu1 of Node n2 is uncordoned",
        "would evict team/p1",
    ]


@pytest.mark.usefixtures("cluster")
async def test_a_drain_that_is_done_names_the_way_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def done(*_: object) -> None:
        pass

    monkeypatch.setattr(drain, "set_cordon", done)
    monkeypatch.setattr(drain, "_empty", done)
    await asyncio.to_thread(kubectl.main, kubectl.parse(["drain", "n2", "npu0"]))
    assert "then `kubectl npu uncordon n2 npu0`" in capsys.readouterr().out
