"""cordon, uncordon and drain between a stand-in API server and an agent's page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.cli import CommandError, catalogue
from npu_agent.core.cordon import ANNOTATION
from npu_agent.people.commands import drain
from npu_agent.people.commands.cordon import _change
from npu_agent.people.commands.drain import _drain
from npu_agent.people.simulator.apiserver import NODES, StandInApiServer, served, status
from tests.kube.helpers import kubeconfig

NODE = "n1"
GARBAGE = "{npu1"
CARDS = {"npu0": "UUID-0", "npu1": "UUID-1"}


@dataclass
class Cluster:
    """A Node with two cards, and the Pods that hold them."""

    server: StandInApiServer = field(default_factory=lambda: StandInApiServer(NODE))
    held: dict[str, str] = field(default_factory=dict)
    """By Pod, the name of the card."""
    budget: int = 0
    """How often an eviction is refused for a PodDisruptionBudget."""
    evictions: list[dict[str, Any]] = field(default_factory=list)
    owners: list[dict[str, str]] = field(default_factory=list)
    agent: str | None = "agent"
    replaced: bool = False
    """Whether an eviction that is refused finds another agent there."""
    listings: int = 0

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
                assert (
                    request.query["fieldSelector"] == f"spec.nodeName={NODE},status.phase=Running"
                )
                self.listings += 1
                items = [pod(self.agent, "kube-system")] if self.agent else []
                return web.json_response({"kind": "PodList", "items": items})
            case ["namespaces", "kube-system", "pods", name, "proxy", "status.json"]:
                if name != f"{self.agent}:":
                    return await status(404, "not found")(request)
                return web.json_response({"cards": [self.card(card) for card in CARDS]})
            case ["namespaces", "team", "pods", name]:
                if name not in self.held:
                    return await status(404, "not found")(request)
                return web.json_response(pod(name, "team", ownerReferences=self.owners))
            case ["namespaces", "team", "pods", name, "eviction"]:
                if self.budget:
                    self.budget -= 1
                    self.agent = "next" if self.replaced else self.agent
                    return await status(429, "Cannot evict pod: budget")(request)
                assert CARDS[self.held[name]] in self.annotation, "cordoned first"
                self.evictions.append(await request.json())
                del self.held[name]
                return web.json_response({"kind": "Status", "status": "Success"}, status=201)
        return await self.server.answer(request)

    def card(self, name: str) -> dict[str, Any]:
        holders = [{"namespace": "team", "pod": one} for one, of in self.held.items() if of == name]
        known = {"id": CARDS[name], "name": name, "uuid": CARDS[name], "pci_bus_id": None}
        return {
            **known,
            "holders": holders,
            "cordoned": self.annotation.get(CARDS[name]),
            "held_by": "a Pod" if holders else None,
        }

    async def run(self, *words: str) -> None:
        args = catalogue.parse([*words, "--node", NODE])
        async with asyncio.timeout(20):
            await (_drain if words[0] == "drain" else _change)(args)


def pod(name: str, namespace: str, **meta: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", **meta},
    }


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    found = Cluster()
    async with served(found.answer) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        yield found


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


async def test_of_people_who_cordon_together_none_is_lost(cluster: Cluster) -> None:
    await asyncio.gather(*(cluster.run("cordon", card, "--reason", card) for card in CARDS))
    assert cluster.annotation == {"UUID-0": "npu0", "UUID-1": "npu1"}
    assert "patch n1" in cluster.server.calls


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("cordon", "npu7"), "npu7: no such card here; there are npu0, npu1"),
        (("uncordon", "npu1"), "npu1 of Node n1 is not cordoned"),
        (("drain", "npu7"), "no such card here"),
    ],
)
async def test_errors_are_a_line(cluster: Cluster, words: tuple[str, ...], error: str) -> None:
    with pytest.raises(CommandError, match=error):
        await cluster.run(*words)
    assert cluster.text is None


async def test_what_cannot_be_read_is_not_overwritten(cluster: Cluster) -> None:
    cluster.server.annotate(ANNOTATION, GARBAGE)
    with pytest.raises(CommandError, match=f"kubectl annotate node n1 {ANNOTATION}-"):
        await cluster.run("cordon", "npu1")
    assert cluster.text == GARBAGE


async def test_missing_rights_and_agents_are_said(cluster: Cluster) -> None:
    cluster.server.instead["patch"] = status(403, "nodes is forbidden: cannot patch")
    with pytest.raises(CommandError, match=r"k8s/examples/npu-service.yaml"):
        await cluster.run("cordon", "npu1")
    cluster.agent = None
    with pytest.raises(CommandError, match="no agent runs on Node n1: `kubectl get pods"):
        await cluster.run("drain", "npu1")


async def test_without_a_kubeconfig_the_remedy_is_a_persons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(CommandError, match="set KUBECONFIG to") as caught:
        await _change(catalogue.parse(["cordon", "npu0", "--node", NODE]))
    assert "labels.output" not in str(caught.value)


async def test_a_drain_evicts_the_pods_of_the_card_and_no_other(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.held = {"a": "npu1", "b": "npu1", "c": "npu0"}
    await cluster.run("drain", "npu1", "--dry-run")
    assert capsys.readouterr().out.splitlines() == ["would evict team/a", "would evict team/b"]
    assert cluster.text is None
    cluster.budget = 2
    await cluster.run("drain", "npu1", "--reason", "swap fan", "--grace-period", "7")
    assert cluster.held == {"c": "npu0"}
    assert [one["deleteOptions"] for one in cluster.evictions] == [
        {"preconditions": {"uid": "uid-a"}, "gracePeriodSeconds": 7},
        {"preconditions": {"uid": "uid-b"}, "gracePeriodSeconds": 7},
    ]
    out = capsys.readouterr().out
    assert "npu1 is free and can be reset; then `npu-agent uncordon npu1 --node n1`" in out


async def test_a_budget_that_holds_ends_the_drain_and_the_card_stays_cordoned(
    cluster: Cluster,
) -> None:
    cluster.held, cluster.budget = {"a": "npu1"}, 1000
    with pytest.raises(CommandError, match=r"team/a is kept by its PodDisruptionBudget"):
        await cluster.run("drain", "npu1", "--timeout", "0.1")
    assert "UUID-1" in cluster.annotation


@pytest.mark.parametrize(("replaced", "listings"), [(False, 1), (True, 2)])
async def test_a_drain_looks_for_the_agent_once_and_again_when_it_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, replaced: bool, listings: int
) -> None:
    monkeypatch.setattr(drain, "_EVERY", 0.0)
    cluster.held, cluster.budget, cluster.replaced = {"a": "npu1"}, 5, replaced
    await cluster.run("drain", "npu1")
    assert cluster.listings == listings


async def test_pods_of_a_daemonset_are_named(cluster: Cluster) -> None:
    cluster.held, cluster.owners = {"a": "npu1"}, [{"kind": "DaemonSet"}]
    with pytest.raises(CommandError, match="team/a is a Pod of a DaemonSet"):
        await cluster.run("drain", "npu1")
    assert not cluster.evictions
