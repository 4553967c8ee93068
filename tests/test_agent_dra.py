"""The whole agent with its DRA driver, on simulated cards, a stand-in kubelet and API server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpclib.exceptions import GRPCError

from npu_agent.agent import run
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import AgentTiming
from npu_agent.cli.main import main
from npu_agent.config import MetricsConfig
from npu_agent.config.schema import AllocationConfig, DraConfig, LabelsConfig, ResourceSpec
from npu_agent.core.ledger import Assignment, PreparedClaim
from npu_agent.core.pool import ClaimRef
from npu_agent.core.problems import problems, unready
from npu_agent.core.state import SessionPhase
from npu_agent.core.vendor import Entry
from npu_agent.kubelet import podresources
from npu_agent.kubelet.allocator import Allocator
from npu_agent.kubelet.record import RECORD
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.outputs.condition import condition
from npu_agent.outputs.dra import claims, driver, slices
from npu_agent.outputs.labels.outputs import FILE as FEATURES
from npu_agent.people import simulator
from npu_agent.people.simulator.apiserver import GROUP, served
from npu_agent.people.simulator.cards import card
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from npu_agent.vendors.furiosa.sysfs import Furiosa
from npu_agent.wording import ENGLISH
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import drops, kubeconfig
from tests.kubelet.kubelet import FaultyKubelet
from tests.outputs.deviceplugin.helpers import short_directory
from tests.outputs.dra.api import DRIVER, api_server
from tests.test_agent import NPU, UUIDS, Node, rewrite
from tests.until import first, until

NODE = "this-node"
NAMES = [f"npu-{uuid.lower()}" for uuid in UUIDS]
RNGD = f"npu-{card('rngd', 1).uuid.lower()}"
CARDS = "rngd=9,warboy=1"
DRA = AllocationConfig(api="dra")
AUTO = AllocationConfig(api="auto")
NOTHING_ELSE: dict[str, Any] = {
    "labels": LabelsConfig(output="none"),
    "events": False,
    "cordon": False,
}
"""What else asks the API server."""


@dataclass
class Room:
    """A node of a cluster."""

    node: Node
    cluster: FaultyApiServer
    manager: StandInPluginManager

    @property
    def root(self) -> Path:
        """The kubelet's."""
        return self.node.plugins.parent

    def configure(self, keys: str) -> Path:
        """Replaces the config file: these keys, without labels and Events."""
        file = self.root / "config.yaml"
        base = "metrics: {listen: '127.0.0.1:0'}\nlabels: {output: none}\nevents: false\n"
        rewrite(file, f"pluginDir: {self.node.plugins}\n{base}{keys}")
        return file

    def claim(self, name: str, *devices: str, driver: str = DRIVER) -> ClaimRef:
        """The scheduler has allocated these devices to a claim of a Pod."""
        return self.cluster.allocate(
            driver, name, devices, pod=f"pod-{name}", namespace="team", uid=f"uid-{name}"
        )

    async def registered(self) -> None:
        await first(self.manager.instances, len)

    async def offered(self, *names: str) -> None:
        await until(
            lambda: self.cluster.slices and list(self.cluster.devices()) == list(names), str(names)
        )

    async def free(self, *names: str) -> None:
        """These are offered, and none of them has a taint."""
        await self.offered(*names)
        await until(lambda: not self.cluster.taints())

    async def prepared(self, ref: ClaimRef) -> list[v1.Device]:
        return (await self.manager.prepare(DRIVER, ref))[ref.uid]

    async def prepared_before(self, ref: ClaimRef, **config: Any) -> None:
        """The agent before this one prepares a claim, and ends."""
        async with self.node.agent(allocation=DRA, **NOTHING_ELSE, **config):
            await self.registered()
            await self.prepared(ref)
        await first(self.manager.instances, lambda now: not now)

    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.node.root / "var/run/cdi").glob("*"))


@pytest.fixture
async def room(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Room]:
    with short_directory() as directory:
        plugins = directory / "device-plugins"
        plugins.mkdir()
        cluster = api_server(NODE)
        kubelet = FaultyKubelet(plugins, directory / "pod-resources")
        manager = StandInPluginManager(directory)
        async with served(cluster.answer) as url:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(directory, url)))
            await kubelet.start()
            await manager.start()
            node = Node(directory / "host", plugins, kubelet, timing())
            yield Room(node, cluster, manager)
            await manager.stop()
            await kubelet.stop()


def timing(**drivers: Any) -> AgentTiming:
    """The agent's, with these of its drivers; a holder is waited for as long as tests do."""
    return AgentTiming(
        driver=driver.DriverTiming(**{"claims": claims.PrepareTiming(holder_ends=1.0), **drivers})
    )


def reasons(agent: Agent) -> list[str]:
    return [ENGLISH.unready(problem) for problem in unready(agent.state())]


async def test_a_claim_from_the_offer_to_the_end(room: Room) -> None:
    room.node.cards("warboy=2")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE) as agent:
        await room.registered()
        await room.free(*NAMES)
        await until(lambda: reasons(agent) == [])
        ref = room.claim("c", NAMES[1])
        device = v1.Device(["npu"], NODE, NAMES[1], ["furiosa.ai/claim=uid-c-npu"])
        assert await room.prepared(ref) == [device]
        (name,) = room.specs()
        spec = json.loads((room.node.root / "var/run/cdi" / name).read_bytes())
        assert "NPU_DEVNAME=npu1pe0-1" in spec["devices"][0]["containerEdits"]["env"]
        (dra,) = agent.state().dra
        assert (dra.name, dra.session.phase) == (DRIVER, SessionPhase.REGISTERED)
        assert [claim.holder for claim in dra.claims] == ["Pod team/pod-c (ResourceClaim team/c)"]
        assert [one.name for one in dra.devices] == NAMES
        assert dra.counts.prepares["prepared"] == 1
        assert (dra.slices.published, dra.slices.devices) == (True, 2)
        await room.manager.unprepare(DRIVER, ref)
        assert room.specs() == []
        assert agent.state().dra[0].claims == ()
        assert room.node.kubelet.calls == 0  # and the device plugin offers nothing
        assert agent.state().resources == ()
    await first(room.manager.instances, lambda now: not now)
    assert (
        list(room.cluster.devices()) == NAMES
    )  # the next agent goes on with them, and has to know
    record = json.loads((room.node.plugins / RECORD).read_bytes())
    assert record["published"].keys() == set(UUIDS)
    assert (record["prepared"], record["allocations"]) == ({}, [])


@pytest.mark.parametrize(("partitions", "devices"), [("true", 123), ("false", 9)])
async def test_the_template_of_a_node_is_what_its_agent_publishes(
    room: Room, capsys: pytest.CaptureFixture[str], partitions: str, devices: int
) -> None:
    config = room.configure(
        "allocation: {api: dra}\ncordon: false\n"
        "disabledDevices: [{devName: npu1}, {devName: npu2, nodeName: another-node}]\n"
        f"dra: {{partitions: {partitions}}}\n"
    )
    room.node.cards(CARDS)
    async with room.node.agent(config):
        await until(lambda: len(room.cluster.devices()) == devices)
        published = [room.cluster.slices[name] for name in sorted(room.cluster.slices)]
    assert main(["dra", "slices", "--template", CARDS, "--config-file", str(config)]) == 0
    printed = capsys.readouterr().out
    template = [*yaml.safe_load_all(printed)]
    left_out = printed.partition("\n")[0].partition("has them: ")[2].removesuffix(".").split(", ")
    assert template == [
        _as_template(live, left_out, resourceSliceCount=len(template)) for live in published
    ]


def _as_template(live: dict[str, Any], left_out: list[str], **pool: int) -> dict[str, Any]:
    """A slice that an agent has published, without what only its host has."""
    text = json.dumps(live).replace(NODE, "template")
    for spec in simulator.parse_cards(CARDS):
        text = text.replace(f"npu-{spec.uuid.lower()}", spec.name)
    found: dict[str, Any] = json.loads(text)
    found["metadata"] = {"name": found["metadata"]["name"]}
    found["spec"]["pool"] = {"name": "template", "generation": 1, **pool}
    for device in found["spec"].get("devices", ()):
        for name in left_out:
            del device["attributes"][name]
    return found


async def test_while_the_first_search_for_cards_is_late_no_output_says_that_there_are_none(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.node.cards("warboy=2")
    features = room.node.root / FEATURES
    features.parent.mkdir(parents=True)
    quiet: dict[str, Any] = {**NOTHING_ELSE, "labels": LabelsConfig(output="nfd")}
    async with room.node.agent(allocation=DRA, **quiet):
        await room.free(*NAMES)
        await until(features.exists)
    written, labels = dict(room.cluster.slices), features.read_bytes()
    search, go_on = Furiosa.scan, threading.Event()

    def late(self: Furiosa) -> tuple[Entry, ...]:
        go_on.wait(30)
        return search(self)

    monkeypatch.setattr(Furiosa, "scan", late)
    async with room.node.agent(allocation=DRA, **quiet) as agent:
        await first(agent.inventory.snapshots, lambda now: now.skipped)
        await first(agent.allocator.asked, bool)  # then it plans
        await agent.allocator.replan()
        assert agent.allocator.pool.offered.value is None
        assert condition(agent.state(), 2) is None
        assert reasons(agent)
        unread = [one for one in problems(agent.state()) if one.kind == "EntryUnreadable"]
        assert "searched for cards" in str(unread[0].facts["error"])
        go_on.set()
        await until(lambda: reasons(agent) == [])
    assert room.cluster.slices == written
    assert features.read_bytes() == labels


async def test_no_container_gets_a_claims_device_by_the_device_plugin(room: Room) -> None:
    room.node.timing = timing(linger=1.0)
    room.node.cards("warboy=2")
    ref = room.claim("c", NAMES[0])
    await room.prepared_before(ref)
    assert room.specs()
    seldom = MetricsConfig(listen="127.0.0.1:0", interval=600)  # so that no answer brings it about
    async with room.node.agent(**NOTHING_ELSE, metrics=seldom) as agent:
        await room.node.told(lambda plugin: plugin.healthy() == (UUIDS[1],))
        assert not room.cluster.devices()
        assert [holding.assignment.claim for holding in agent.state().usages] == ["c"]
        await room.registered()  # else its Pod would stay Terminating
        assert [one.name for one in agent.state().dra] == [DRIVER]
        await until(lambda: not agent.allocator.states.value.allocations)
        assert (await room.prepared(ref))[0].device_name == NAMES[
            0
        ]  # after a restart of the kubelet
        await room.manager.unprepare(DRIVER, ref)
        await room.node.told(lambda p: len(p.healthy()) == 2)
        await first(room.manager.instances, lambda now: not now)
        assert agent.state().dra == ()
        assert reasons(agent) == []


async def test_the_last_claim_is_answered_for_before_the_driver_goes(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is: without a driver to ask again, its Pod would stay Terminating."""
    room.node.timing = timing(socket_check=0.02)
    room.node.cards("warboy=1")
    ref = room.claim("c", NAMES[0])
    await room.prepared_before(ref)
    async with room.node.agent(**NOTHING_ELSE) as agent:
        await room.registered()
        save = agent.allocator.saved

        async def slow() -> None:
            await asyncio.sleep(0.5)
            await save()

        monkeypatch.setattr(agent.allocator, "saved", slow)
        await room.manager.unprepare(DRIVER, ref)
        await until(lambda: agent.state().dra == ())
        await room.manager.unprepare(DRIVER, ref)  # as if it had not got the answer


async def test_the_driver_is_ended_before_the_rest(room: Room) -> None:
    """And not when the time for the end is over."""
    room.node.timing = AgentTiming(end=1000.0)
    room.node.cards("warboy=1")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE):
        await room.registered()


@pytest.mark.parametrize("allocation", [AUTO, DRA], ids=["auto", "dra"])
async def test_no_device_is_offered_before_it_is_known_whether_dra_can_be(
    room: Room, allocation: AllocationConfig
) -> None:
    """It is not ready either: else a rollout would end the agent that works."""
    room.node.cards("warboy=2")
    room.cluster.trouble = drops
    async with room.node.agent(allocation=allocation, **NOTHING_ELSE) as agent:
        await first(agent.inventory.snapshots, lambda now: now.complete)
        await until(lambda: len(room.cluster.calls) > 1)  # it goes on asking
        words = "cannot tell yet" if allocation is DRA else "allocation.api: auto is not decided"
        await until(lambda: any(words in one for one in reasons(agent)))
        now = condition(agent.state(), 2)
        assert now
        assert (now.status, now.reason) == (False, "DRANotServed")
        assert room.node.kubelet.calls == 0
        assert room.manager.instances.value == ()
        room.cluster.trouble = None
        await room.registered()
        await room.free(*NAMES)
        await until(lambda: not reasons(agent))
        assert room.node.kubelet.calls == 0


@pytest.mark.parametrize("partitions", [False, True])
async def test_a_degraded_card_says_so_and_comes_last(room: Room, partitions: bool) -> None:
    """Selectors of claims see attributes, and no taints; the scheduler takes cards in order."""
    room.node.cards("warboy=1,rngd=2")
    often = MetricsConfig(listen="127.0.0.1:0", interval=0.1)

    def found() -> list[tuple[int, Any]]:
        each = (device["attributes"] for device in room.cluster.devices().values())
        return [
            (attributes["index"]["int"], attributes.get("degraded", {}).get("string"))
            for attributes in each
            if attributes["type"] == {"string": "card"}
        ]

    cut = DraConfig(partitions=partitions)
    async with room.node.agent(allocation=DRA, metrics=often, dra=cut, **NOTHING_ELSE) as agent:
        agent.hardware.readers.touch()  # else it reads them once a minute
        await until(lambda: found() == [(1, None), (2, None), (0, None)])
        room.node.fault("npu1", "hot")
        # Behind the others of its family only: a claim may name none, and mean the first one.
        moved, stays = (2, None), (1, "hot")
        first_two = [stays, moved] if partitions else [moved, stays]
        await until(lambda: found() == [*first_two, (0, None)])
        room.node.fault("npu1", "ok")
        await until(lambda: found() == [(1, None), (2, None), (0, None)])


async def test_evict_and_disabled_are_followed(room: Room) -> None:
    room.node.cards("warboy=2")

    def effects() -> list[str]:
        return [taint["effect"] for taint in room.cluster.taints().get(NAMES[0], ())]

    by_dra = "allocation: {api: dra}\n"
    file = room.configure(f"{by_dra}health: {{interval: 0.05}}\n")
    async with room.node.agent(config_file=file):
        await room.free(*NAMES)
        room.node.fault("npu0", "dead")
        await until(lambda: effects() == ["NoSchedule"])
        room.configure(f"{by_dra}health: {{interval: 0.05, evict: true, evictAfter: 0.2}}\n")
        await until(lambda: effects() == ["NoExecute"])
        assert room.cluster.taints().keys() == {NAMES[0]}
        here, elsewhere = "{devName: npu0, nodeName: this-node}", "{devName: npu1, nodeName: x}"
        room.configure(f"{by_dra}disabledDevices: [{here}, {elsewhere}]")
        await room.free(NAMES[1])


async def test_the_agent_is_not_ready_without_the_nodes_name(room: Room) -> None:
    room.node.cards("warboy=1")
    async with room.node.agent(node_name=None, allocation=DRA, **NOTHING_ELSE) as agent:
        await until(lambda: any("set NODE_NAME" in one for one in reasons(agent)))
        assert room.manager.instances.value == ()
        assert not {"events", "node condition"} & {name for name, _ in run._parts(agent)}


async def test_a_kubelet_that_restarts_finds_driver_and_slices_again(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubted: list[Allocator] = []

    def kubelet_lost(allocator: Allocator) -> None:
        doubted.append(allocator)

    monkeypatch.setattr(Allocator, "kubelet_lost", kubelet_lost)
    room.node.cards("warboy=1")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE) as agent:
        await room.registered()
        await room.free(NAMES[0])
        assert doubted == []
        lists = room.cluster.calls.count("list")
        await room.manager.restart()
        await room.registered()
        await until(lambda: room.cluster.calls.count("list") > lists)  # no event may tell of that
        await until(lambda: agent.state().dra[0].session.registrations == 2)
        assert doubted == [agent.allocator]  # it does not list all of its Pods yet


async def test_claims_in_use_are_found_although_their_record_is_lost_and_no_card_is_for_dra(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device plugin would give a second Pod what a claim's has."""
    use = Assignment("team", "pod-c", "main", DRIVER, NAMES[0], "c")
    room.node.cards("warboy=2")
    await room.prepared_before(room.claim("c", NAMES[0]))
    (room.node.plugins / RECORD).unlink()
    monkeypatch.setattr(podresources, "read_list", lambda _: ((), (use,)))
    async with room.node.agent(**NOTHING_ELSE) as agent:
        await until(lambda: agent.allocator.prepared.value.keys() == {"uid-c"})
        await until(lambda: room.node.kubelet.plugins.value[NPU].healthy() == (UUIDS[1],))
        with pytest.raises(GRPCError, match=r"ResourceClaim team/c\) still holds"):
            await room.node.kubelet.allocate_ids(NPU, [UUIDS[0]])


async def test_restarts_of_the_kubelet_are_still_counted_when_a_resource_is_served_no_more(
    room: Room,
) -> None:
    room.node.cards("warboy=1")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE) as agent:
        await room.registered()
        agent.kubelet.sessions[0].counts.returns = 3
        assert agent.state().resources == ()
        assert agent.state().kubelet_restarts == 3


async def test_dra_that_is_impossible_is_said_and_asked_for_again(room: Room) -> None:
    """By `dra`, that is: what `auto` stands for was decided, and Pods have begun to rely on it."""
    room.node.timing = AgentTiming(ask_again=0.05)
    room.node.cards("warboy=1,rngd=1")
    room.cluster.groups.clear()
    by_dra = ResourceSpec(name="furiosa.ai/rngd", family="rngd", api="dra")
    async with room.node.agent(allocation=AUTO, resources=(by_dra,), **NOTHING_ELSE) as agent:
        await until(lambda: any("does not serve resource" in one for one in reasons(agent)))
        assert (await room.node.listed(1)).devices == ((UUIDS[0], "Healthy"),)
        await first(room.manager.instances, lambda now: not now)
        room.cluster.groups.add(GROUP)
        await room.registered()
        await room.free(RNGD)
        await until(lambda: reasons(agent) == [])
        assert (await room.node.listed(1)).devices == ((UUIDS[0], "Healthy"),)


async def test_a_kubelet_that_refuses_the_driver_is_trouble(room: Room) -> None:
    await room.manager.stop()
    old = StandInPluginManager(room.root, service="v0.DRAPlugin")
    await old.start()
    room.node.cards("warboy=1")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE) as agent:
        await until(lambda: any("the kubelet refuses" in one for one in reasons(agent)))
    await old.stop()


async def test_claims_of_another_vendors_driver_are_not_ours(room: Room) -> None:
    room.node.cards("warboy=1")
    async with room.node.agent(**NOTHING_ELSE) as agent:
        await room.node.listed(1)
        other = PreparedClaim(
            driver="gpu.example.com", uid="u", namespace="team", name="gpu", devices=()
        )
        await agent.allocator.prepare(other, ())
        assert agent.state().dra == ()


@pytest.mark.parametrize("method", ["writes", "collect_garbage", "ask_now"])
async def test_a_part_of_the_driver_that_fails_starts_the_driver_again(
    room: Room, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    room.node.cards("warboy=1")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE) as agent:
        driver = agent.kubelet.driver
        parts = (slices, driver.claims.upkeep, agent.allocator, driver.slices)
        (part,) = [part for part in parts if hasattr(part, method)]
        good = getattr(part, method)
        failed = False

        def fails_once(*args: Any, **named: Any) -> Any:
            nonlocal failed
            if failed:
                return good(*args, **named)
            failed = True
            raise RuntimeError("out of order")

        monkeypatch.setattr(part, method, fails_once)
        await until(lambda: agent.restarts[f"DRA {DRIVER}"] == 1)
        await until(lambda: reasons(agent) == [] and agent.state().dra[0].slices.published)
        await room.registered()
        await room.free(NAMES[0])
