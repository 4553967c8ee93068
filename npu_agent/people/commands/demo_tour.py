"""The steps of the guided tour: first the device plugin, then claims (DRA), by one agent.

Each step is proven by what the stand-ins for the kubelet and the API server received, never by the
agent's own words.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from npu_agent.agent.agent import Agent
from npu_agent.core.cordon import ANNOTATION
from npu_agent.core.hardware import CoreRange
from npu_agent.core.offer import device_id
from npu_agent.core.pool import ClaimRef
from npu_agent.core.vendor import LabelSource, MetricSource
from npu_agent.kubelet import cdi
from npu_agent.people import simulator
from npu_agent.people.commands.cordon import set_cordon
from npu_agent.people.report import ReportedCard
from npu_agent.people.simulator.apiserver import NODES, Object, StandInApiServer
from npu_agent.people.simulator.kubelet import ListedPlugin, StandInKubelet
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from npu_agent.vendors import SPEC

NODE = "demo-node"
CLAIMED = max(SPEC.core_counts, key=SPEC.core_counts.__getitem__)
"""The family of the card for claims: the one with the most cores, to be cut for several Pods."""
DEADLINE = 30.0
"""Seconds that a step may take; each takes less than three on an idle machine."""
_WAITS = 0.5
"""Seconds for which the tour shows that a claim waits."""

_Read = TypeVar("_Read")
Lines = AsyncIterator[str]
Step = tuple[str, Callable[[], Lines]]
"""Its title, and what it shows, by and by."""


@dataclass(kw_only=True)
class Tour:
    """The steps in their order; those on claims use what the ones before them made.

    Of the agent only the state of its `config` file and its address are read. The last of `specs`
    is the card for claims.
    """

    root: Path
    config: Path
    specs: Sequence[simulator.CardSpec]
    kubelet: StandInKubelet
    manager: StandInPluginManager
    """The kubelet's, for DRA drivers."""
    api_server: StandInApiServer
    agent: Agent
    _claims: list[ClaimRef] = field(default_factory=list)
    _driver: str = field(init=False)
    _device: str = field(init=False)
    """The claimed card in the ResourceSlice."""
    _kind: str = field(init=False)

    def __post_init__(self) -> None:
        self._names = {spec.uuid: spec.name for spec in self.specs} | {
            device_id(spec.uuid, CoreRange(core, core)): f"{spec.name} core {core}"
            for spec in self.specs
            for core in range(spec.traits.cores)
        }
        self._claimed = self.specs[-1].name
        self._resource = self.agent.common.config.resource_name

    def steps(self) -> Sequence[Step]:
        return (
            ("The agent registers with the kubelet", self._registers),
            ("It lists the cards that the driver's files show, for the kubelet", self._lists),
            ("It labels the Node with what is installed", self._labels_the_node),
            ("It serves a status page, and metrics for Prometheus", self._serves),
            ("A Pod asks for one NPU", self._pod),
            ("npu1 dies, and recovers", self._dies),
            ("The config is edited while the agent runs: switch to single cores", self._edited),
            ("A bad edit is refused as a whole, and nothing changes", self._bad_edit),
            ("The kubelet restarts and forgets the agent, which registers again", self._restarts),
            ("DRA: the same agent offers npu2 to claims", self._publishes),
            ("A Pod claims one NPU, and the agent prepares the claim", self._prepares),
            ("The claimed card dies, and recovers", self._claimed_dies),
            ("A person takes the card out of service, and brings it back", self._cordoned),
            ("The Pod is deleted by force: the next waits until its container ends", self._waits),
            ("Cards are cut on demand: one card for three Pods", self._cuts),
        )

    async def _registers(self) -> Lines:
        plugin = await self._plugin(lambda p: p.connected)
        yield f"it serves the resource {self._resource} on the socket {plugin.endpoint}"

    async def _lists(self) -> Lines:
        for id_, health in (await self._plugin(lambda p: len(p.devices) == 2)).devices:
            yield f"{self._names[id_]} is the device {id_}: {health}"

    async def _labels_the_node(self) -> Lines:
        labels = SPEC.label_sets[SPEC.label_set]
        (key,) = (label.key for label in labels.labels if label.source is LabelSource.COUNT)
        applied = await self._seen(
            lambda: self._node["metadata"]["labels"],
            lambda applied: applied.get(labels.prefix + key) == str(len(self.specs)),
        )
        for label, value in applied.items():
            yield f"{label}={value}"

    async def _serves(self) -> Lines:
        from aiohttp import ClientSession

        schema = SPEC.metric_schemas[SPEC.metric_schema]
        (name,) = (metric.name for metric in schema.metrics if metric.source is MetricSource.ALIVE)
        address = await self.address()
        yield f"the status page: http://{address}/"
        yield f"the metrics:     http://{address}/metrics"
        url = f"http://{address}/metrics"
        async with ClientSession() as session, session.get(url, allow_redirects=False) as answer:
            lines = (await answer.text()).splitlines()
        for line in lines:
            if line.startswith(f"{name}{{"):
                yield f"among them:      {_brief(line)}"

    async def _pod(self) -> Lines:
        given = await self.kubelet.allocate(self._resource, 1)
        yield f"the Pod gets {self._names[given.ids[0]]}"
        for variable, value in sorted(given.environment.items()):
            yield f"environment: {variable}={value}"
        yield f"device nodes: {' '.join(given.nodes)}"

    async def _dies(self) -> Lines:
        await self._fault("npu1", "dead")
        dead = await self._plugin(lambda p: len(p.healthy()) == 1)
        yield f"it dies:     {self._listing(dead)}"
        condition = await self._seen(
            lambda: self._node["status"].get("conditions", [{}])[0],
            # The driver of the other card may publish it only now.
            lambda condition: bool(re.search("npu1: (?!.* DRA )", condition.get("message", ""))),
        )
        yield f"condition {condition['type']} is {condition['status']}: {condition['message']}"
        await self._fault("npu1", "ok")
        well = await self._plugin(lambda p: len(p.healthy()) == 2)
        yield f"it recovers: {self._listing(well)}"

    async def _edited(self) -> Lines:
        await self._edit("defaultPe: Fusion", "defaultPe: Single")
        single = await self._plugin(lambda p: len(p.devices) == 4 and len(p.healthy()) == 2)
        yield f"defaultPe: Single: {self._listing(single)}"
        yield "the cores of npu0 wait, as the first Pod still holds the whole card"
        await self._edit("defaultPe: Single", "defaultPe: Fusion")
        fusion = await self._plugin(lambda p: len(p.devices) == 2 and len(p.healthy()) == 2)
        yield f"defaultPe: Fusion again: {self._listing(fusion)}"

    async def _bad_edit(self) -> Lines:
        plugin = self.kubelet.plugins.value[self._resource]
        await self._edit("defaultPe: Fusion", "defaultPe: Sinlge")
        yield f"the agent reports: {await self._config_error(refused=True)}"
        await self._edit("defaultPe: Sinlge", "defaultPe: Fusion")
        await self._config_error(refused=False)
        if self.kubelet.plugins.value[self._resource] != plugin:
            raise OSError("the kubelet got another list")
        yield "the kubelet got nothing"

    async def _restarts(self) -> Lines:
        endpoint = self.kubelet.plugins.value[self._resource].endpoint
        await self.kubelet.stop()
        await self.kubelet.start()
        plugin = await self._plugin(lambda p: p.endpoint != endpoint and len(p.healthy()) == 2)
        yield f"registered again, on the new socket {plugin.endpoint}"
        yield f"the list is again: {self._listing(plugin)}"

    async def _publishes(self) -> Lines:
        ((name, device),) = (await self.api_server.until(bool, DEADLINE)).items()
        self._driver = (await self.manager.instances.until(bool))[-1].driver
        self._device = name
        yield f"the driver {self._driver} is registered with the kubelet"
        yield f"the API server has the ResourceSlice {', '.join(self.api_server.slices)}:"
        facts = {key: next(iter(value.values())) for key, value in device["attributes"].items()}
        facts |= {key: capacity["value"] for key, capacity in device["capacity"].items()}
        shown = " ".join(f"{key}={facts[key]}" for key in ("arch", "core", "memory"))
        yield f"{self._claimed} is its device {name}: {shown}"

    async def _prepares(self) -> Lines:
        claim = self._claim("train-0", self._device)
        yield f"the scheduler allocates {self._claimed} to {claim}"
        (given,) = (await self.manager.prepare(self._driver, claim))[claim.uid]
        (cdi_id,) = given.cdi_device_ids
        self._kind = cdi_id.partition("=")[0]
        yield f"the kubelet gets the CDI device {cdi_id}"
        yield f"whose spec is /{self._spec(claim).relative_to(self.root)}:"
        edits = await self._edits(claim)
        for variable in edits["env"]:
            yield f"environment: {variable}"
        nodes = [node["path"] for node in edits["deviceNodes"]]
        yield f"device nodes: {len(nodes)}, {nodes[0]} to {nodes[-1]}"

    async def _claimed_dies(self) -> Lines:
        await self._fault(self._claimed, "dead")
        yield f"it dies:     {await self._taint()}"
        state, message = await self._reported("Unhealthy")
        yield f"             in the Pod's status it is {state}: {message}"
        await self._fault(self._claimed, "ok")
        await self._taints(0)
        recovered, _ = await self._reported("Healthy")
        yield f"it recovers: the taint is gone, and in the Pod's status it is {recovered}"

    async def _cordoned(self) -> Lines:
        api = self.agent.common.api
        card = ReportedCard(self._claimed, 0, self._claimed)
        await set_cordon(api, NODE, card, {}, "swap fan")
        yield f"`npu-agent cordon {self._claimed} --reason 'swap fan'` annotates the Node:"
        yield f"{ANNOTATION}: '{self._node['metadata']['annotations'][ANNOTATION]}'"
        yield await self._taint()
        await set_cordon(api, NODE, card, {}, None)
        await self._taints(0)
        yield f"`npu-agent uncordon {self._claimed}`: the taint is gone"

    async def _waits(self) -> Lines:
        # The claim is gone with its Pod; it was not unprepared, as its container still runs.
        (first,) = self._claims
        self.api_server.forget(first)
        second = self._claim("train-1", self._device)
        yield f"the scheduler allocates {self._claimed} to {second}"
        waiting = asyncio.create_task(self.manager.prepare(self._driver, second))
        if (await asyncio.wait([waiting], timeout=_WAITS))[0]:
            raise OSError("two claims have the same card, or the second was refused")
        yield f"the agent does not answer yet: {first} still holds its cores"
        yield await self._unprepared(first)
        await waiting
        yield f"{second} is prepared"

    async def _cuts(self) -> Lines:
        yield await self._unprepared(self._claims[1])
        await self._edit("partitions: false", "partitions: true")
        devices = await self.api_server.until(lambda devices: len(devices) > 1, DEADLINE)
        slices = len(self.api_server.slices)
        yield f"with dra.partitions there are {slices} ResourceSlices, {len(devices)} devices:"
        yield "the card in every width, with a counter for each core"
        for pod, cores in (("half", "0-3"), ("quarter", "4-5"), ("core", "6")):
            claim = self._claim(pod, f"{self._device}-cores-{cores}")
            await self.manager.prepare(self._driver, claim)
            yield f"Pod {pod:8} environment: {(await self._edits(claim))['env'][0]}"

    async def _plugin(self, condition: Callable[[ListedPlugin], bool]) -> ListedPlugin:
        return await self.kubelet.until(self._resource, condition, DEADLINE)

    @property
    def _node(self) -> Object:
        return self.api_server.objects[NODES][NODE]

    async def _seen(self, read: Callable[[], _Read], wanted: Callable[[_Read], bool]) -> _Read:
        """What there is at the API server, once it is as `wanted`."""
        await self.api_server.version.until(lambda _: wanted(read()))
        return read()

    async def address(self) -> str:
        address = await self.agent.web.server.listening.until(bool)
        return ":".join(map(str, address or ()))

    async def _fault(self, card: str, name: str) -> None:
        await asyncio.to_thread(simulator.apply_fault, self.root, card, name)

    async def _edit(self, old: str, new: str) -> None:
        text = await asyncio.to_thread(self.config.read_text)
        await asyncio.to_thread(self.config.write_text, text.replace(old, new))
        self.agent.common.poller.read_now()

    async def _config_error(self, *, refused: bool) -> str | None:
        states = self.agent.common.poller.states
        return (await states.until(lambda state: refused == bool(state.error))).error

    def _listing(self, plugin: ListedPlugin) -> str:
        return ", ".join(f"{self._names[id_]} {health}" for id_, health in plugin.devices)

    def _claim(self, name: str, device: str) -> ClaimRef:
        """A new claim for the Pod of this name."""
        claim = self.api_server.allocate(self._driver, name, [device], pod=name)
        self._claims.append(claim)
        return claim

    async def _unprepared(self, claim: ClaimRef) -> str:
        await self.manager.unprepare(self._driver, claim)
        if await asyncio.to_thread(self._spec(claim).exists):
            raise OSError(f"{self._spec(claim)} is still there")
        return f"{claim} is unprepared, and its CDI spec is gone"

    def _spec(self, claim: ClaimRef) -> Path:
        return self.root / cdi.DIRECTORY / cdi.claim_file(self._kind, claim.uid)

    async def _edits(self, claim: ClaimRef) -> Mapping[str, Any]:
        """The edits of a container by a claim's CDI spec with one device for one request."""
        (device,) = json.loads(await asyncio.to_thread(self._spec(claim).read_text))["devices"]
        edits: Mapping[str, Any] = device["containerEdits"]
        return edits

    async def _taints(self, count: int) -> Sequence[Mapping[str, str]]:
        """The taints of the claimed card, once there are so many."""
        return await self._seen(
            lambda: self.api_server.devices()[self._device].get("taints", ()),
            lambda taints: len(taints) == count,
        )

    async def _taint(self) -> str:
        (taint,) = await self._taints(1)
        said = f"{taint['key']}:{taint['effect']}"
        return f"the ResourceSlice has the taint {said} on {self._claimed}"

    async def _reported(self, state: str) -> tuple[str, str]:
        """The health of the device and its message, once it is `state` in the Pod's status."""
        reported = partial(self.manager.state, self._driver, NODE, self._device)
        await self.manager.health.until(lambda _: reported()[0] == state)
        return reported()


def _brief(line: str) -> str:
    """A line of /metrics without the labels that fill a terminal."""
    often = "arch|core|uuid|pci_bus_id|driver_version|firmware_version|hostname|resource|namespace"
    return re.sub(rf'(?:{often})="[^"]*",?', "", line).replace(",}", "}")
