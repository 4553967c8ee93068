"""cordon, uncordon and drain between a stand-in API server and an agent's page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from npu_agent.cli import CommandError, catalogue
from npu_agent.core.cordon import ANNOTATION
from npu_agent.kubelet.cordons import FILE
from npu_agent.people import simulator
from npu_agent.people.commands import cordon, drain, kubectl
from npu_agent.people.commands.cordon import _change
from npu_agent.people.commands.drain import _drain
from npu_agent.people.simulator.apiserver import NODES, served
from npu_agent.people.simulator.cards import card
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import status
from tests.people.cluster.build import (
    DAEMON_SET,
    NPU,
    SPACE,
    Json,
    agent,
    claims,
    device,
    held,
    pod,
    slice_,
)
from tests.people.commands.reached import reach

NODE = "n1"
GARBAGE = "{npu1"
OWNED = {"ownerReferences": [{"kind": "DaemonSet"}]}
CARDS = {"npu0": "UUID-0", "npu1": "UUID-1"}


def slices() -> list[Json]:
    """A device for each card."""
    return [slice_(NODE, *(device(name, index=at) for at, name in enumerate(CARDS)))]


@dataclass
class Cluster:
    """A Node with two cards, and the Pods that hold them."""

    server: FaultyApiServer = field(default_factory=lambda: FaultyApiServer(NODE))
    held: dict[str, str] = field(default_factory=dict)
    """By Pod, the name of the card."""
    refusals: list[web.Response] = field(default_factory=list)
    """Answers to the next evictions."""
    slices: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    """Pods that the page names and that are on another Node."""
    lingers: int = 0
    """How often the page still names evicted Pods whose objects are gone."""
    more: list[Json] = field(default_factory=list)
    """More Pods of the Node."""
    page: Json | None = None
    """In place of the real one."""
    first_ids: dict[str, str] = field(default_factory=dict)
    """The page's: by name, the ID of the card that it meant first."""
    daemon_sets: list[Json] = field(default_factory=lambda: [DAEMON_SET])
    evictions: list[Json] = field(default_factory=list)
    agent: str = "agent"
    agents: list[Json] = field(default_factory=list)
    """More Pods with the agent's label."""
    replaced: bool = False
    """Whether the agent is another one by the time that its page is asked for again."""
    refused: bool = False
    """Whether an eviction was refused."""

    @property
    def annotation(self) -> dict[str, str]:
        return dict(json.loads(self.text or "{}")) if self.text != GARBAGE else {}

    @property
    def text(self) -> str | None:
        meta = self.server.objects[NODES][NODE]["metadata"]
        found: str | None = meta.get("annotations", {}).get(ANNOTATION)
        return found

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.split("/")
        match path[3:]:
            case ["pods"]:
                assert request.query["fieldSelector"].endswith(f",spec.nodeName={NODE}")
                if "labelSelector" not in request.query:
                    here = [name for name in self.held if name not in self.elsewhere]
                    holders = [pod(name, {NPU: "1"}, on=NODE) for name in here]
                    return listed("Pod", [*holders, *self.more])
                return listed("Pod", [agent(self.agent, NODE), *self.agents])
            case ["v1", "daemonsets"]:
                return listed("DaemonSet", self.daemon_sets)
            case ["v1", "resourceclaims"]:
                return listed("ResourceClaim", self.claims)
            case ["v1", "resourceslices"]:
                return listed("ResourceSlice", self.slices)
            case ["namespaces", "kube-system", "pods", name, "proxy", "status.json"]:
                if self.replaced and self.refused:
                    self.agent = "next"
                if name != f"{self.agent}:9100":
                    return await status(503, "error trying to reach service")(request)
                cards = [self.card(card) for card in CARDS]
                if self.elsewhere and self.lingers:
                    self.lingers -= 1
                    if not self.lingers:
                        self.held.clear()
                return web.json_response(self.page or {"cards": cards, "first_ids": self.first_ids})
            case ["namespaces", "ml", "pods", name, "eviction"]:
                if self.refusals:
                    self.refused = True
                    return self.refusals.pop(0)
                assert CARDS[self.held[name]] in self.annotation, "cordoned first"
                self.evictions.append(await request.json())
                if self.lingers:
                    self.elsewhere.add(name)
                else:
                    del self.held[name]
                return web.json_response({"kind": "Status", "status": "Success"}, status=201)
        return await self.server.answer(request)

    def card(self, name: str) -> Json:
        pods = [pod for pod, card in self.held.items() if card == name]
        holders = [{"namespace": SPACE, "pod": pod, "resource": NPU} for pod in pods]
        return {
            "id": CARDS[name],
            "name": name,
            "uuid": CARDS[name],
            "family": "rngd",
            "core_count": 8,
            "holders": holders,
            "cordoned": self.annotation.get(CARDS[name]),
            "held_by": "a Pod" if holders else None,
        }

    def has_a_claim(self) -> None:
        """Pod ml/dra has the device npu1 by the claim `mine`."""
        self.claims = [held("mine", NODE, "npu1", by="dra")]
        self.more = [pod("dra", on=NODE, resourceClaims=claims(c="mine"))]

    async def run(self, *words: str) -> None:
        args = catalogue.parse([*words, "--node", NODE])
        async with asyncio.timeout(20):
            await (_drain if words[0] == "drain" else _change)(args)


def listed(kind: str, items: list[Json]) -> web.Response:
    return web.json_response({"kind": f"{kind}List", "items": items})


def refusal(message: str, *causes: tuple[str, str], **headers: str) -> web.Response:
    """A 429 of the API server."""
    details = {"causes": [{"reason": reason, "message": text} for reason, text in causes]}
    body = {"kind": "Status", "code": 429, "message": message, "details": details}
    return web.json_response(body, status=429, headers=headers)


NEEDS = "The disruption budget train needs 1 healthy pods and has 1 currently"


def budget() -> web.Response:
    return refusal("Cannot evict pod: budget", ("DisruptionBudget", NEEDS))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    found = Cluster()
    async with served(found.answer) as url:
        reach(url, monkeypatch)
        yield found


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause of drain, which takes none."""
    taken: list[float] = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)

    monkeypatch.setattr(drain, "asyncio", SimpleNamespace(run=asyncio.run, sleep=sleep))
    return taken


async def test_a_card_is_cordoned_by_its_id_and_brought_back(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.server.annotate(ANNOTATION, '{"NPU1": "by hand", "npu9": "another"}')
    await cluster.run("cordon", "npu1", "--reason", "swap fan")
    assert cluster.annotation == {"npu9": "another", "UUID-1": "swap fan"}
    await cluster.run("uncordon", "npu9")  # a card that is gone
    await cluster.run("uncordon", "uuid-1")
    assert cluster.text is None
    assert capsys.readouterr().out.splitlines() == [
        f"npu1 of Node {NODE} is cordoned",
        f"npu9 of Node {NODE} is uncordoned",
        f"uuid-1 of Node {NODE} is uncordoned",
    ]


async def test_a_cordon_stays_with_the_card_that_its_name_meant_first(cluster: Cluster) -> None:
    """npu1 was UUID-0, and npu7 is of a card that is npu0 by now, or of one that is gone."""
    cluster.first_ids = {"npu1": "UUID-0", "npu7": "UUID-0", "npu8": "UUID-8", "npu9": "UUID-9"}
    there = {"NPU1": "fan", "npu7": "fan", "npu8": "gone", "npu9": "gone"}
    cluster.server.annotate(ANNOTATION, json.dumps(there))
    for command in ("cordon", "drain"):
        await cluster.run(command, "npu1", "--reason", "swap")
        assert cluster.annotation == {**there, "UUID-1": "swap"}
        await cluster.run("uncordon", "npu1")
        assert cluster.annotation == there
    with pytest.raises(CommandError, match="npu1 of Node n1 is not cordoned"):
        await cluster.run("uncordon", "npu1")
    await cluster.run("cordon", "uuid-0", "--reason", "in place of its names")
    assert cluster.annotation.keys() - {"npu8", "npu9"} == {"UUID-0"}
    cluster.server.annotate(ANNOTATION, json.dumps(there))
    await cluster.run("uncordon", "npu0")  # as the page calls it
    assert cluster.annotation.keys() == {"npu8", "npu9"}
    await cluster.run("uncordon", "npu8")
    await cluster.run("uncordon", "uuid-9")
    assert cluster.text is None


async def test_the_node_of_this_pod_has_what_names_meant_first_on_its_disk(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator.make(tmp_path, simulator.parse_cards("warboy=2"))
    (tmp_path / "config.yaml").write_text(f"pluginDir: {tmp_path}\n", encoding="utf-8")
    monkeypatch.setenv("NODE_NAME", NODE)
    monkeypatch.setenv("NPU_AGENT_HOST_ROOT", str(tmp_path))
    monkeypatch.setenv("NPU_AGENT_CONFIG_FILE", str(tmp_path / "config.yaml"))
    uuids = [str(card("warboy", index).uuid) for index in range(2)]
    annotation = '{"npu1": "fan"}'
    saved = {"annotation": annotation, "first_ids": {"npu1": uuids[0]}}
    (tmp_path / FILE).write_text(json.dumps(saved), encoding="utf-8")
    cluster.server.annotate(ANNOTATION, annotation)
    await _change(catalogue.parse(["cordon", "npu1", "--reason", "swap"]))
    assert cluster.annotation == {"npu1": "fan", uuids[1]: "swap"}


async def test_as_commands_of_kubectl_npu(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held = {"a": "npu1"}
    for words in (
        ("cordon", NODE, "npu1", "--reason=fan"),
        ("uncordon", NODE, "npu1"),
        ("drain", NODE, "npu1", "--dry-run"),
        ("drain", NODE, "npu0", "--reason=fan"),
    ):
        assert await asyncio.to_thread(kubectl.main, kubectl.parser().parse_args(words)) == 0
    assert cluster.annotation == {"UUID-0": "fan"}
    assert capsys.readouterr().out.splitlines() == [
        "npu1 of Node n1 is cordoned",
        "npu1 of Node n1 is uncordoned",
        "would evict ml/a",
        "npu0 of Node n1 is cordoned: fan",
        "npu0 is free and can be reset; then `kubectl npu uncordon n1 npu0`",
    ]


async def test_of_people_who_cordon_together_none_is_lost(cluster: Cluster) -> None:
    await asyncio.gather(*(cluster.run("cordon", card, "--reason", card) for card in CARDS))
    assert cluster.annotation == {"UUID-0": "npu0", "UUID-1": "npu1"}
    assert "patch n1" in cluster.server.calls


async def test_a_card_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(CommandError, match="npu7: no such card here; there are npu0, npu1"):
        await cluster.run("cordon", "npu7")
    assert cluster.text is None


async def test_an_annotation_that_cannot_be_read_is_not_overwritten(cluster: Cluster) -> None:
    cluster.server.annotate(ANNOTATION, GARBAGE)
    with pytest.raises(CommandError, match=f"kubectl annotate node n1 {ANNOTATION}-"):
        await cluster.run("cordon", "npu1")
    assert cluster.text == GARBAGE


async def test_missing_rights_are_said(cluster: Cluster) -> None:
    cluster.server.instead["patch"] = status(403, "nodes is forbidden: cannot patch")
    with pytest.raises(CommandError, match=r"k8s/examples/npu-service.yaml"):
        await cluster.run("cordon", "npu1")
    cluster.server.instead["patch"] = status(403, 'admission webhook "freeze" denied the request')
    with pytest.raises(
        CommandError, match=r"not RBAC's refusal: see the admission policy"
    ) as caught:
        await cluster.run("cordon", "npu1")
    assert "npu-service.yaml" not in str(caught.value)


async def test_a_named_node_is_that_of_the_context_also_in_a_pod(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cordon, "in_pod", lambda: True)
    await cluster.run("cordon", "npu1")
    assert cluster.annotation
    assert "context here (https://10.96.0.1)" in capsys.readouterr().err


async def test_a_drain_evicts_the_pods_of_the_card_and_no_other(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held = {"a": "npu1", "b": "npu1", "c": "npu0"}
    await cluster.run("drain", "npu1", "--dry-run")
    assert capsys.readouterr().out.splitlines() == ["would evict ml/a", "would evict ml/b"]
    assert cluster.text is None
    cluster.refusals = [budget(), budget()]
    await cluster.run("drain", "npu1", "--reason", "swap fan", "--grace-period", "7")
    assert cluster.held == {"c": "npu0"}
    assert [one["deleteOptions"] for one in cluster.evictions] == [
        {"preconditions": {"uid": "uid-a"}, "gracePeriodSeconds": 7},
        {"preconditions": {"uid": "uid-b"}, "gracePeriodSeconds": 7},
    ]
    out = capsys.readouterr().out
    assert "npu1 is free and can be reset; then `npu-agent uncordon npu1 --node n1`" in out


async def test_a_budget_that_holds_is_said_once_and_the_card_stays_cordoned(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held, cluster.refusals = {"a": "npu1"}, [budget() for _ in range(1000)]
    kept = f"ml/a is kept by its PodDisruptionBudget ({NEEDS}): `kubectl get pdb -n ml`"
    with pytest.raises(CommandError, match="and still cordoned: ml/a is kept by its Pod"):
        await cluster.run("drain", "npu1", "--timeout", "0.5")
    assert cluster.annotation
    assert capsys.readouterr().out.splitlines()[1:] == [kept]


async def test_a_server_that_has_too_much_to_do_is_no_budget_and_chooses_the_pause(
    cluster: Cluster, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the timeout of the command."""
    cluster.held = {"a": "npu1"}
    busy = [refusal("Too many requests", **{"Retry-After": after}) for after in ("7", "300")]
    cluster.refusals = [*busy, budget()]
    await cluster.run("drain", "npu1", "--timeout", "60")
    asked, bounded, *others = pauses
    assert asked == 7.0 < bounded <= 60.0
    assert others == [1.0, 1.0]
    said = capsys.readouterr().out
    assert "ml/a is not evicted: " in said
    assert "Too many requests" in said


async def test_a_holder_that_no_object_shows_is_said_before_the_cordon(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be waited for until --timeout, with the card out of service."""
    cluster.held = {"theirs": "npu1"}
    cluster.elsewhere = {"theirs"}
    with pytest.raises(CommandError, match="not free within"):
        await cluster.run("drain", "npu1", "--timeout", "0.1")
    first, second, *more = capsys.readouterr().out.splitlines()
    assert first.startswith("the agent names ml/theirs, which no object shows as a Pod of Node n1")
    assert second.startswith("npu1 of Node n1 is cordoned")
    assert more == []


async def test_a_pod_with_a_resource_of_another_domain_is_evicted_if_the_page_names_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = {"namespace": SPACE, "pod": "named", "resource": "example.com/npu"}
    cluster.page = {"cards": [{**cluster.card("npu1"), "holders": [holder]}]}
    cluster.more = [
        pod("named", {"example.com/npu": "1"}, on=NODE),
        pod("gpu", {"other.example/gpu": "1"}, on=NODE),
    ]
    await cluster.run("drain", "npu1", "--dry-run")
    assert capsys.readouterr().out == "would evict ml/named\n"


async def test_pods_that_no_object_shows_to_hold_an_npu_of_the_node_are_not_evicted(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held = dict.fromkeys(("a", "theirs", "plain"), "npu1")
    cluster.elsewhere, cluster.more = {"theirs", "plain"}, [pod("plain", on=NODE)]
    with pytest.raises(CommandError, match="which no object shows as a Pod of Node n1 with NPUs"):
        await cluster.run("drain", "npu1", "--timeout", "0.1")
    assert [one["metadata"]["name"] for one in cluster.evictions] == ["a"]
    assert "is free" not in capsys.readouterr().out


async def test_an_evicted_pod_that_the_page_still_names_is_ending(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held, cluster.lingers = {"a": "npu1"}, 3
    await cluster.run("drain", "npu1")
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[:2] == ["evicted ml/a", "ml/a is ending"]
    assert said[2].startswith("npu1 is free and can be reset")


async def test_a_card_that_a_claim_or_an_unknown_pod_has_is_not_free(cluster: Cluster) -> None:
    cluster.has_a_claim()
    cluster.slices = slices()
    cluster.more[0]["metadata"] |= OWNED
    with pytest.raises(CommandError, match="ml/dra is a Pod of a DaemonSet"):
        await cluster.run("drain", "npu1")
    cluster.more = [pod("unknown", {NPU: "1"}, on=NODE)]
    with pytest.raises(CommandError, match="ml/unknown has NPUs, and no agent says which"):
        await cluster.run("drain", "npu0", "--timeout", "0.1")


async def test_while_a_claim_cannot_be_read_its_holder_is_not_known(cluster: Cluster) -> None:
    cluster.has_a_claim()
    cluster.slices = slices()
    cluster.claims[0]["status"]["allocation"]["devices"]["results"][0]["request"] = "ODD"
    words = "ResourceClaims left out: ml/mine: .*: who holds it is not known"
    with pytest.raises(CommandError, match=words):
        await cluster.run("drain", "npu1")


async def test_a_claim_whose_device_has_left_the_slices_holds_the_card_that_the_page_names(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.has_a_claim()
    holder = {"namespace": SPACE, "pod": "dra", "claim": "mine"}
    cluster.page = {"cards": [cluster.card("npu0"), cluster.card("npu1") | {"holders": [holder]}]}
    await cluster.run("drain", "npu1", "--dry-run")
    assert capsys.readouterr().out == "would evict ml/dra\n"
    cluster.claims[0]["status"]["reservedFor"][0]["uid"] = "of another Pod"
    await cluster.run("drain", "npu1", "--dry-run")
    assert "the agent names ml/dra, which no object shows" in capsys.readouterr().out


async def test_a_card_that_leaves_ends_the_drain_as_a_failure(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(_: float) -> None:
        cluster.page = {"cards": [cluster.card("npu0")]}

    monkeypatch.setattr(drain, "asyncio", SimpleNamespace(run=asyncio.run, sleep=sleep))
    cluster.held = {"a": "npu1"}
    with pytest.raises(
        CommandError, match="npu1 has left Node n1, and is still cordoned"
    ) as caught:
        await cluster.run("drain", "npu1")
    assert caught.value.code == 1


async def test_agents_of_two_daemon_sets_are_both_named(cluster: Cluster) -> None:
    fake = {**DAEMON_SET, "metadata": {**DAEMON_SET["metadata"], "namespace": SPACE, "uid": "fake"}}
    cluster.daemon_sets.append(fake)
    theirs = agent("theirs", NODE)
    theirs["metadata"]["namespace"] = SPACE
    cluster.agents = [theirs]
    await cluster.run("cordon", "npu1")  # it says kube-system's DaemonSet, from another namespace
    theirs["metadata"]["ownerReferences"][0]["uid"] = "fake"
    with pytest.raises(CommandError, match="DaemonSets, kube-system/agent and ml/theirs"):
        await cluster.run("drain", "npu1")


async def test_a_drain_goes_on_with_the_agent_that_replaces_another(cluster: Cluster) -> None:
    cluster.held, cluster.replaced = {"a": "npu1"}, True
    cluster.refusals = [budget()]
    await cluster.run("drain", "npu1")
    assert cluster.agent == "next"
    assert not cluster.held


async def test_pods_of_a_daemonset_are_named(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held, cluster.elsewhere = {"a": "npu1", "gone": "npu1"}, {"a", "gone"}
    cluster.more = [pod("a", {NPU: "1"}, on=NODE, metadata=OWNED)]
    await cluster.run("drain", "npu1", "--dry-run")
    assert capsys.readouterr().out.splitlines() == [
        "ml/a stays: it is a Pod of a DaemonSet",
        "the agent names ml/gone, which no object shows as a Pod of Node n1 with NPUs",
    ]
    with pytest.raises(CommandError, match="ml/a is a Pod of a DaemonSet"):
        await cluster.run("drain", "npu1")
    assert not cluster.evictions
