"""Three nodes with an agent each, on simulated cards, and a real Prometheus that scrapes them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml
from grpclib import GRPCError

from bench.process import free_port
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.agent.run import serve
from npu_agent.config import Effective, MetricsConfig, default_config
from npu_agent.config.schema import HealthConfig, LabelsConfig
from npu_agent.outputs.labels import outputs
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.vendors import SPEC
from tests.monitoring.helpers import manifest, write_rules
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"
DEADLINE = 60.0
"""Seconds; guards against hanging and measures nothing."""

Schema = Literal["0.8", "2025", "prometheus"]
NODES: tuple[tuple[str, str, Schema], ...] = (
    ("node-1", "warboy=2", "0.8"),
    ("node-2", "rngd=2", "2025"),
    ("node-3", "rngd=1", "prometheus"),
)
FAULTS = {
    "node-1": {"npu0": "idle", "npu1": "idle"},
    "node-2": {"npu0": "busy", "npu1": "idle"},
    "node-3": {"npu0": "idle"},
}
Sample = dict[str, Any]
"""``{"metric": {label: value}, "value": [seconds, text]}``"""


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        async with self.session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{parameters}: {answer['error']}"
        return answer["data"]

    async def query(self, expression: str) -> list[Sample]:
        """What an instant query finds now, without what is not a number."""
        data = await self.get("query", query=expression)
        assert data["resultType"] == "vector"
        return [sample for sample in data["result"] if sample["value"][1] != "NaN"]


@asynccontextmanager
async def fleet() -> AsyncIterator[Prometheus]:
    """A Prometheus whose three nodes serve a schema each.

    ``node-1`` (schema 0.8) has two Warboys: npu0 was healthy and is dead, npu1 is free. ``node-2``
    (schema 2025) has two RNGDs: npu0 works for one Pod, npu1 idles for another. ``node-3`` (schema
    prometheus) has an RNGD that is free.
    """
    async with AsyncExitStack() as stack:
        # Not pytest's own directory: its path may be too long for a socket.
        directory = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="npu-", ignore_cleanup_errors=True)
            )
        )
        targets = {}
        for name, cards, schema in NODES:
            (directory / name).mkdir()
            targets[name] = await stack.enter_async_context(
                _node(name, directory / name, cards, schema)
            )
        prometheus = await stack.enter_async_context(_prometheus(directory, targets))
        healthy = 'furiosa_npu_health{hostname="node-1",device="npu0",state="healthy"} == 1'
        await until(lambda: prometheus.query(healthy), "Prometheus has seen npu0 of node-1 healthy")
        simulator.apply_fault(directory / "node-1" / "host", "npu0", "dead")
        yield prometheus


@asynccontextmanager
async def _node(name: str, directory: Path, cards: str, schema: Schema) -> AsyncIterator[str]:
    """A node with an agent; yields the address of its metrics."""
    root, plugins = directory / "host", directory / "plugins"
    plugins.mkdir()
    simulator.make(root, simulator.parse_cards(cards), plain_nodes=True)
    (root / outputs.FILE).parent.mkdir(parents=True)
    busy = name == "node-2"
    for card, fault in FAULTS[name].items():
        simulator.apply_fault(root, card, fault)
    kubelet = StandInKubelet(plugins, directory / "pod-resources")
    await kubelet.start()
    config = replace(
        default_config(SPEC),
        plugin_dir=str(plugins),
        health=HealthConfig(interval=0.1),
        labels=LabelsConfig(output="nfd", sets=(SPEC.label_set,)),
        metrics=MetricsConfig(listen="127.0.0.1:0", schema=schema, interval=1),
        events=False,
    )
    agent = Agent(Effective(config, {}), Host(root, name))
    stop = asyncio.Event()
    parts = [asyncio.create_task(serve(agent, stop))]
    parts.append(asyncio.create_task(simulator.simulate(root, interval=0.5)))
    if busy:
        parts.append(asyncio.create_task(_allocate(kubelet)))
    try:
        address = await first(agent.web.server.listening, bool)
        assert address
        yield f"{address[0]}:{address[1]}"
    finally:
        stop.set()
        for part in parts[1:]:
            part.cancel()
        ends = await asyncio.gather(*parts, return_exceptions=True)
        await kubelet.stop()
        for end in ends:
            if isinstance(end, Exception):
                raise end


async def _allocate(kubelet: StandInKubelet) -> None:
    """Starts two Pods, and then asks for a device again and again: Allocate has a rate.

    For one that there is not: the ledger would take another grant of a card for its new holder.
    """
    await kubelet.until(NPU, lambda p: len(p.healthy()) == 2, DEADLINE)
    for pod in ("train-0", "notebook-0"):
        await kubelet.allocate(NPU, 1, pod)
    while True:
        with suppress(GRPCError):
            await kubelet.allocate_ids(NPU, ["no-such-device"])
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _prometheus(directory: Path, targets: dict[str, str]) -> AsyncIterator[Prometheus]:
    """A Prometheus with the alert rules, which scrapes as the PodMonitor says, but more often."""
    [endpoint] = manifest("components/podmonitor/podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    config = {
        "global": {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",  # a busy machine takes a while for a page
            "evaluation_interval": "500ms",
        },
        "rule_files": [str(write_rules(directory, interval="500ms"))],
        "scrape_configs": [
            {
                "job_name": "npu-agent",
                "honor_labels": endpoint["honorLabels"],
                "static_configs": [
                    {"targets": [address], "labels": _discovered(name)}
                    for name, address in targets.items()
                ],
                "relabel_configs": [
                    {_snake_case(key): value for key, value in rule.items()}
                    for rule in endpoint["relabelings"]
                ],
            }
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    async with prometheus_of(directory) as prometheus:
        yield prometheus


@asynccontextmanager
async def prometheus_of(directory: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with the prometheus.yaml and the data of this directory."""
    log = directory / "prometheus.log"
    url = f"127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yaml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={url}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:

            async def is_up() -> bool:
                assert process.poll() is None, log.read_text(encoding="utf-8")
                try:
                    async with session.get(f"http://{url}/-/ready") as response:
                        return response.ok
                except aiohttp.ClientError:
                    return False

            await until(is_up, "Prometheus is ready")
            yield Prometheus(f"http://{url}", session)
    finally:
        process.kill()
        process.wait()


def _discovered(node: str) -> dict[str, str]:
    """The labels of a target as Prometheus Operator has them before the PodMonitor's relabelings.

    Not by the real discovery of Pods: Debian's Prometheus is built without it.
    """
    return {
        "namespace": "kube-system",
        "pod": f"npu-agent-on-{node}",
        "container": "npu-agent",
        "endpoint": "metrics",
        "__meta_kubernetes_pod_node_name": node,
    }


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda upper: f"_{upper[0].lower()}", name)
