"""The whole agent between a simulated driver tree and the stand-in for the kubelet."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import AgentTiming, Host
from npu_agent.agent.run import serve
from npu_agent.config import Effective, MetricsConfig, default_config, load
from npu_agent.config.schema import AllocationConfig, HealthConfig, ResourceSpec
from npu_agent.core.hardware import HealthState
from npu_agent.core.problems import problems, unready
from npu_agent.kubelet import cdi
from npu_agent.kubelet.record import RECORD
from npu_agent.outputs.labels.outputs import FILE as FEATURES
from npu_agent.people import simulator
from npu_agent.people.simulator.cards import card
from npu_agent.people.simulator.kubelet import ListedPlugin
from npu_agent.vendors import SPEC
from tests.kubelet.kubelet import FaultyKubelet
from tests.outputs.deviceplugin.client import Client
from tests.outputs.deviceplugin.helpers import names, short_directory
from tests.processes import started
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"
DEADLINE = 30.0
"""Seconds; guards against hanging and measures nothing."""
UUIDS = [card("warboy", index).uuid for index in range(2)]


@dataclass
class Node:
    """A host with simulated cards and a kubelet."""

    root: Path
    plugins: Path
    kubelet: FaultyKubelet
    timing: AgentTiming = field(default_factory=AgentTiming)

    def cards(self, text: str) -> None:
        simulator.make(self.root, simulator.parse_cards(text), plain_nodes=True)

    def fault(self, card: str, fault: str) -> None:
        simulator.apply_fault(self.root, card, fault)

    @asynccontextmanager
    async def agent(
        self,
        config_file: Path | None = None,
        node_name: str | None = "this-node",
        **config: Any,
    ) -> AsyncIterator[Agent]:
        """The agent in this process, which looks often; configured by a file, or by these keys."""
        settings = {
            "health": HealthConfig(interval=0.05),
            "metrics": MetricsConfig(listen="127.0.0.1:0"),
            "plugin_dir": str(self.plugins),
        }
        made = replace(default_config(SPEC), **{**settings, **config})
        metrics = replace(made.metrics, schema=made.metrics.schema or SPEC.metric_schema)
        labels = replace(made.labels, sets=made.labels.sets or (SPEC.label_set,))
        effective = Effective(replace(made, metrics=metrics, labels=labels), {})
        if config_file:
            effective = load(config_file, SPEC)
        agent = Agent(
            effective,
            Host(self.root, node_name),
            config_file=config_file,
            timing=self.timing,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(serve(agent, stop))
        try:
            yield agent
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE):
                await running

    @property
    def arguments(self) -> tuple[str | Path, ...]:
        where = ("--host-root", self.root, "--plugin-dir", self.plugins)
        return ("run", *where, "--health-interval", "0.05", "--metrics-listen", "127.0.0.1:0")

    async def told(
        self, condition: Callable[[ListedPlugin], bool], resource: str = NPU
    ) -> ListedPlugin:
        return await self.kubelet.until(resource, condition, DEADLINE)

    async def listed(self, count: int, resource: str = NPU) -> ListedPlugin:
        return await self.told(lambda p: len(p.devices) == count, resource)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    with short_directory() as directory:
        plugins = directory / "plugins"
        plugins.mkdir()
        kubelet = FaultyKubelet(plugins, directory / "pod-resources")
        await kubelet.start()
        yield Node(directory / "host", plugins, kubelet)
        await kubelet.stop()


async def test_a_hot_card_is_the_last_that_a_pod_gets(node: Node) -> None:
    """Else the Pod that replaces the one that had made it hot has it again."""
    node.cards("rngd=3")
    often = MetricsConfig(listen="127.0.0.1:0", interval=0.1)
    async with node.agent(metrics=often) as agent:
        await node.listed(3)
        agent.hardware.readers.touch()  # else it reads them once a minute
        node.fault("npu0", "hot")
        await first(agent.inventory.degraded, len)
        (hot,) = agent.inventory.degraded.value
        for _ in range(3):
            await node.kubelet.allocate(NPU, 1)
        assert [*node.kubelet.taken[NPU]].index(hot) == 2


async def test_each_resource_has_a_registration_of_its_own(node: Node) -> None:
    node.cards("warboy=1,rngd=1")
    half = ResourceSpec(name="furiosa.ai/rngd-4core.24gb", family="rngd", cores_per_device=4)
    async with node.agent(resources=(half,)) as agent:
        await node.listed(1)
        plugin = await node.listed(2, half.name)
        rngd = card("rngd", 1).uuid
        assert [id_ for id_, _ in plugin.devices] == [f"{rngd}_cores_0-3", f"{rngd}_cores_4-7"]
        assert len(agent.kubelet.sessions) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process_ends_cleanly_with_a_kubelet_connected(
    node: Node, number: signal.Signals
) -> None:
    node.cards("warboy=2")
    (node.plugins / "kubelet_internal_checkpoint").write_text("{}", encoding="utf-8")
    with started(*node.arguments) as process:
        plugin = await node.listed(2)
        client = Client(node.plugins / plugin.endpoint)  # the C core, beside the stand-in
        stream = client.watch()
        await asyncio.to_thread(next, stream)
        code, out, err = await asyncio.to_thread(process.end, number)

        assert code == 0
        assert out == ""
        assert "Traceback" not in err
        assert f"shutting down signal={number.name}" in err
        assert await asyncio.to_thread(list, stream) == []
        assert stream.code() is grpc.StatusCode.OK
        await asyncio.to_thread(client.close)
        await node.told(lambda p: not p.connected)
        assert names(node.plugins) == ["kubelet.sock", "kubelet_internal_checkpoint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own takes root")
async def test_first_process_of_a_container_can_be_ended_while_it_starts(node: Node) -> None:
    # Such a process has no default for SIGTERM: the signal would be lost.
    node.cards("warboy=1")
    early = node.plugins.parent / "early"
    early.mkdir()
    # In the place of a library that is imported before anything runs.
    program = "import os, signal, time\nos.kill(1, signal.SIGTERM)\ntime.sleep(100)\n"
    (early / "grpclib.py").write_text(program, encoding="utf-8")
    run = [sys.executable, "-m", "npu_agent", *node.arguments]
    ended = await asyncio.to_thread(
        subprocess.run,
        ["unshare", "--pid", "--fork", "--kill-child", *run],
        env={**os.environ, "PYTHONPATH": str(early)},
        timeout=DEADLINE,
    )
    assert ended.returncode == 0


def rewrite(file: Path, text: str) -> None:
    """Replaces a config file whole: no half of it is ever read."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.rename(file)


@dataclass
class Followed:
    """An agent that follows a config file."""

    file: Path
    agent: Agent
    text: str

    def edit(self, keys: str) -> None:
        """Puts these keys into the file in the place of those that a test put there before."""
        rewrite(self.file, self.text + keys)

    async def get(self, path: str) -> str:
        """The text of a page."""
        address = self.agent.web.server.listening.value
        assert address is not None
        url = f"http://{address[0]}:{address[1]}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.text()

    async def scrape(self, condition: Callable[[str], bool]) -> str:
        """/metrics, once it meets the condition."""
        async with asyncio.timeout(DEADLINE):
            while not condition(text := await self.get("/metrics")):
                await asyncio.sleep(0.05)
        return text


@asynccontextmanager
async def followed(node: Node, keys: str) -> AsyncIterator[Followed]:
    """The agent with a config file that has these keys, once it listens."""
    file = node.root.parent / "config.yaml"
    text = f"pluginDir: {node.plugins}\nhealth: {{interval: 0.05}}\n"
    file.write_text(text + keys, encoding="utf-8")
    async with node.agent(config_file=file) as agent:
        await first(agent.web.server.listening, bool)
        yield Followed(file, agent, text)


def _series(text: str, name: str) -> str:
    return next((line for line in text.splitlines() if line.startswith(f"{name}{{")), "")


async def test_pages_that_need_a_right_are_shown_to_no_client_without_a_token(node: Node) -> None:
    # A config file has to have a certificate beside it.
    metrics = MetricsConfig(listen="127.0.0.1:0", authorization="kubernetes")
    async with node.agent(metrics=metrics) as agent:
        it = Followed(node.root, agent, "")
        await first(agent.web.server.listening, bool)
        assert "send a bearer token" in await it.get("/metrics")


async def test_schema_and_pod_labels_of_the_metrics_are_followed(node: Node) -> None:
    node.cards("warboy=1")
    listen = "listen: '127.0.0.1:0', interval: 1"
    async with followed(node, f"metrics: {{{listen}}}\n") as one:
        await node.listed(1)
        await node.kubelet.allocate(NPU, 1, pod="yolo")
        text = await one.scrape(lambda text: 'pod="yolo"' in _series(text, "furiosa_npu_alive"))
        millidegrees = float(_series(text, "furiosa_npu_hw_temperature").rpartition(" ")[2])
        assert millidegrees > 1_000
        one.edit(f"metrics: {{{listen}, podLabels: false}}\n")
        text = await one.scrape(lambda text: "pod=" not in _series(text, "furiosa_npu_alive"))
        assert 'pod="yolo"' in _series(text, "furiosa_npu_assigned")
        one.edit(f"metrics: {{{listen}, schema: '2025'}}\n")

        def degrees(text: str) -> bool:
            return float(_series(text, "furiosa_npu_hw_temperature").rpartition(" ")[2]) < 1_000

        text = await one.scrape(degrees)
        assert 'pod="yolo"' in _series(text, "furiosa_npu_alive")


async def test_the_pages_have_the_state_of_the_real_parts(node: Node) -> None:
    node.cards("warboy=2")
    listen = "metrics: {listen: '127.0.0.1:0', interval: 1}\n"
    keys = (
        listen + "disabledDevices: [{devName: npu1, nodeName: this-node}]\nlabels: {output: none}\n"
    )
    async with followed(node, keys) as one:
        await node.listed(1)
        await node.kubelet.allocate(NPU, 1, pod="yolo")

        async def shown(condition: Callable[[Any], bool]) -> Any:
            async with asyncio.timeout(DEADLINE):
                while not condition(found := json.loads(await one.get("/status.json"))):
                    await asyncio.sleep(0.05)
            return found

        found = await shown(lambda it: it["cards"][0]["holders"] and it["ready"])
        assert found["node"] == "this-node"
        assert [card["disabled"] for card in found["cards"]] == [False, True]
        assert found["cards"][0]["holders"][0]["pod"] == "yolo"
        assert found["labels"] is None
        (resource,) = found["resources"]
        assert (resource["phase"], resource["offered"], resource["healthy"]) == ("registered", 1, 1)
        one.edit(listen + "labels: {output: none}\ninterval: wrong\n")
        found = await shown(lambda it: it["config"]["error"])
        assert found["unready"] == [f"config: {found['config']['error']}"]
        await node.kubelet.stop()
        found = await shown(lambda it: len(it["unready"]) == 2)
        text = await one.scrape(lambda text: f'npu_agent_registered{{resource="{NPU}"}} 0' in text)
        assert "npu_agent_config_last_load_successful 0" in text
        assert f'npu_agent_allocations_total{{resource="{NPU}",result="granted"}} 1' in text


@pytest.mark.parametrize("jump", [315e6, -86_400.0])
async def test_the_wall_clock_is_set_and_everything_was_as_long_ago_as_before(
    node: Node, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    right, begun = time.time, time.time()
    node.cards("warboy=2")
    (node.root / FEATURES).parent.mkdir(parents=True)
    keys = "metrics: {listen: '127.0.0.1:0'}\nlabels: {output: nfd}\n"
    async with followed(node, keys) as one:
        await node.listed(2)
        state = one.agent.state
        await until(lambda: (labels := state().labels) and labels.applied_at)
        node.fault("npu0", "dead")
        await until(lambda: state().snapshot.cards[0].health.state is HealthState.UNHEALTHY)
        passed = right()
        node.fault("npu1", "gone")
        await until(lambda: state().timeline.gone)
        monkeypatch.setattr(time, "time", lambda: right() + jump)
        page = json.loads(await one.get("/status.json"))
        (card,), (gone,) = page["cards"], page["gone"]
        happened = [entry["at"] for entry in page["timeline"]]
        for at, latest in (
            (page["now"], right()),
            (page["started_at"], passed),
            (page["config"]["loaded_at"], passed),
            (page["labels"]["applied_at"], right()),
            (card["health"]["since"], passed),
            (gone["since"], right()),
            (happened[-1], passed),
            *((at, right()) for at in happened),
        ):
            # A second is what a busy machine may put between the readings of the two clocks.
            assert begun - 1 <= datetime.fromisoformat(at).timestamp() - jump <= latest + 1
        assert any("npu1 is gone" in problem["text"] for problem in page["problems"])
        text = await one.get("/metrics")
        name = "\nnpu_agent_config_last_success_timestamp_seconds "
        loaded_at = float(text.partition(name)[2].partition("\n")[0])
        assert loaded_at - jump == pytest.approx(begun, abs=passed - begun + 1)
        monkeypatch.undo()


async def test_cdi_specs_that_cannot_be_written_are_the_agents_problem_until_they_can(
    node: Node,
) -> None:
    node.cards("warboy=1")
    specs = node.root / cdi.DIRECTORY
    specs.parent.mkdir(parents=True)
    specs.write_text("in the way", encoding="utf-8")
    often = MetricsConfig(listen="127.0.0.1:0", interval=0.1)
    async with node.agent(allocation=AllocationConfig(method="cdi"), metrics=often) as agent:
        await node.told(lambda p: p.devices == ((UUIDS[0], "Unhealthy"),))
        (problem,) = (one for one in problems(agent.state()) if one.subject == "cdi")
        assert problem.kind == "CDINotWritten"
        assert unready(agent.state()) == (problem,)
        specs.unlink()
        await node.told(lambda p: p.devices == ((UUIDS[0], "Healthy"),))
        assert not [one for one in problems(agent.state()) if one.subject == "cdi"]
        assert unready(agent.state()) == ()


async def test_sighup_has_the_config_read_and_ends_nothing(node: Node) -> None:
    node.cards("warboy=1")
    file = node.root.parent / "config.yaml"
    text = (
        f"pluginDir: {node.plugins}\nmetrics: {{listen: '127.0.0.1:0'}}\nlabels: {{output: none}}\n"
    )
    file.write_text(text, encoding="utf-8")
    with started("run", "--host-root", node.root, "--config-file", file) as process:
        await node.listed(1)
        file.write_text(text + "defaultPe: Single\n", encoding="utf-8")
        os.kill(process.pid, signal.SIGHUP)
        await node.listed(2)
        assert (await asyncio.to_thread(process.end))[0] == 0


async def test_the_agent_before_is_remembered_and_its_record_is_written_again(node: Node) -> None:
    """The card that was known keeps its ID when another one says the same UUID at the start."""
    node.cards("warboy=2")
    async with node.agent() as agent:
        await node.listed(2)
        await node.kubelet.allocate(NPU, 1)  # else nothing is left for the next agent
        agent.allocator.pod_resources.ask()
        before = json.loads((node.plugins / RECORD).read_bytes())
        assert {device for (_, device), *_ in before["allocations"]} == set(UUIDS)
    (node.root / "sys/class/npu_mgmt/npu1_mgmt/device_uuid").write_text(
        f"{UUIDS[0]}\n", encoding="utf-8"
    )
    async with node.agent() as agent:
        devices = await first(agent.allocator.devices[NPU], bool)
    ids = {device.name: device.id for device in devices}
    assert ids["npu0"] == UUIDS[0]
    assert ids["npu1"] not in UUIDS


async def test_a_card_that_is_lost_while_no_agent_runs_is_missed(node: Node) -> None:
    node.cards("warboy=2")
    async with node.agent():
        await node.listed(2)
        await node.kubelet.allocate(NPU, 1)  # so that the record stays
    node.fault("npu1", "gone")
    async with node.agent() as agent:
        await node.listed(1)

        def missed() -> list[str]:
            return [
                str(problem.facts["earlier"])
                for problem in problems(agent.state())
                if problem.kind == "EarlierCardMissing"
            ]

        await until(missed)
        (cards,) = missed()
        assert "npu1 (" in cards, "by the name that the record has"
        node.fault("npu1", "back")
        await until(lambda: not missed())
