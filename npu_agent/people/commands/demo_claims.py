"""The guided tour's chapter on DRA: a second node, whose cards Pods get by ResourceClaims.

As in the first part each step is proven by what the stand-ins for the kubelet and the API server
received.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.agent.run import serve
from npu_agent.config import load
from npu_agent.core.claim import ClaimRef
from npu_agent.core.cordon import ANNOTATION
from npu_agent.kube import Api
from npu_agent.kube.credentials import at
from npu_agent.kubelet import cdi
from npu_agent.outputs.web.report import ReportedCard
from npu_agent.people import simulator
from npu_agent.people.commands.cordon import Target, set_cordon
from npu_agent.people.simulator.apiserver import NODES, Device, StandInApiServer, served
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from npu_agent.vendors import REGISTRY

_NODE = "claims-node"
_PLUGINS = "device-plugins"
DEADLINE = 10.0
"""Seconds that a step may take; each takes less than one."""
_WAITS = 0.5
"""Seconds for which the tour shows that a claim waits."""
_CONFIG = """\
allocation: {{api: dra}}
pluginDir: {plugins}
health: {{interval: 0.1, condition: {{type: {condition}}}}}
metrics: {{listen: '127.0.0.1:0', probes: '127.0.0.1:0'}}
labels: {{output: none}}
events: false
dra: {{partitions: {partitions}}}
"""
_WIDEST = max(REGISTRY.core_counts, key=REGISTRY.core_counts.__getitem__)
"""The family whose cards have the most cores."""

Lines = AsyncIterator[str]
Step = tuple[str, Callable[[], Lines]]
"""Its title, and what it shows, by and by."""


class ClaimsNode:
    """A node with an agent of its own; `steps` are the chapter, the first of which starts it."""

    def __init__(self, directory: Path, specs: Sequence[simulator.CardSpec]) -> None:
        """Nothing runs yet; of `specs` the last one has enough cores for several Pods."""
        self.steps: tuple[Step, ...] = (
            ("DRA: the agent of another node offers its cards to claims", self._publishes),
            ("A Pod claims one NPU, and the agent prepares the claim", self._prepares),
            ("The claimed card dies, and recovers", self._dies),
            ("A person takes the card out of service, and brings it back", self._cordoned),
            ("The Pod is deleted by force, so that its card looks free before it is", self._waits),
            ("Its container has ended, and the next Pod gets the card", self._ends),
            ("Cards are cut on demand: one card for three Pods", self._cuts),
        )
        self._root = directory / "host"
        self._directory = directory
        self._specs = (*specs, simulator.card(_WIDEST, len(specs)))
        self._api_server = StandInApiServer(_NODE)
        self._kubelet = StandInKubelet(directory / _PLUGINS, directory / "pod-resources")
        self._manager = StandInPluginManager(directory)
        self._stop = asyncio.Event()
        self._served = contextlib.AsyncExitStack()
        self._running: list[asyncio.Task[None]] = []
        self._names: dict[str, str] = {}
        self._claims: list[ClaimRef] = []
        # What one step makes, and those after it use:
        self._agent: Agent
        self._api: Api
        self._driver: str
        self._device: str
        self._kind: str
        self._waiting: asyncio.Task[Any]
        """The call to prepare a claim whose card is held."""

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._running[:1], return_exceptions=True)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._manager.stop()
        await self._kubelet.stop()
        await self._served.aclose()

    async def _publishes(self) -> Lines:
        await self._start()
        await self._api_server.until(lambda devices: len(devices) == len(self._specs), DEADLINE)
        self._driver = (await self._manager.instances.until(bool))[-1].driver
        yield f"the driver {self._driver} is registered with the kubelet"
        yield f"the API server has the ResourceSlice {', '.join(self._api_server.slices)}:"
        devices = self._api_server.devices().values()
        for device in devices:
            uuid = device["attributes"]["uuid"]["string"]
            (self._names[device["name"]],) = (s.name for s in self._specs if s.uuid == uuid)
        self._device = min(self._names, key=self._names.__getitem__)
        for device in sorted(devices, key=lambda device: self._names[device["name"]]):
            yield _described(device)

    async def _prepares(self) -> Lines:
        claim = self._claim("train-0")
        yield f"the scheduler allocates {self._named} to {claim}"
        (given,) = (await self._manager.prepare(self._driver, claim))[claim.uid]
        (cdi_id,) = given.cdi_ids
        self._kind = cdi_id.partition("=")[0]
        yield f"the kubelet gets the CDI device {cdi_id}"
        yield f"whose spec is {self._spec(claim)}:"
        for line in await self._edits(claim):
            yield line

    async def _dies(self) -> Lines:
        await self._fault("dead")
        (taint,) = await self._tainted(bool)
        said = f"{taint['key']}:{taint['effect']}"
        yield f"it dies:     the ResourceSlice has the taint {said} on {self._named}"
        state, message = await self._reported("Unhealthy")
        yield f"             in the Pod's status it is {state}: {message}"
        condition = await self._condition("False")
        yield f"             the Node's condition {condition['type']} is {condition['status']}:"
        yield f"             {condition['message']}"
        await self._fault("ok")
        await self._tainted(lambda taints: not taints)
        recovered, _ = await self._reported("Healthy")
        yield f"it recovers: the taint is gone, and in the Pod's status it is {recovered}"
        yield "             the condition is True again when the card has been well for 20 s"

    async def _cordoned(self) -> Lines:
        card = ReportedCard(self._names[self._device], 0)
        target = Target(card.name, card)
        await set_cordon(self._api, _NODE, target, "swap fan")
        yield f"`npu-agent cordon {card.name} --reason 'swap fan'` annotates the Node:"
        node = self._api_server.objects[NODES][_NODE]
        yield f"{ANNOTATION}: '{node['metadata']['annotations'][ANNOTATION]}'"
        (taint,) = await self._tainted(bool)
        yield f"the ResourceSlice has the taint {taint['key']}:{taint['effect']} on {self._named}"
        await set_cordon(self._api, _NODE, target, None)
        await self._tainted(lambda taints: not taints)
        yield f"`npu-agent uncordon {card.name}`: the taint is gone"

    async def _waits(self) -> Lines:
        # The claim is gone with its Pod; it was not unprepared, as its container still runs.
        self._api_server.forget(self._claims[0])
        claim = self._claim("train-1")
        yield f"the scheduler allocates {self._named} to {claim}"
        self._waiting = asyncio.create_task(self._manager.prepare(self._driver, claim))
        self._running.append(self._waiting)
        if (await asyncio.wait([self._waiting], timeout=_WAITS))[0]:
            raise OSError("two claims have the same card, or the second was refused")
        yield f"the agent does not answer yet: {self._claims[0]} still holds its cores"

    async def _ends(self) -> Lines:
        first, second = self._claims
        await self._manager.unprepare(self._driver, first)
        if await asyncio.to_thread(self._spec(first).exists):
            raise OSError(f"{self._spec(first)} is still there")
        yield f"{first} is unprepared, and its CDI spec is gone"
        await self._waiting
        yield f"{second} is prepared"

    async def _cuts(self) -> Lines:
        await self._configure("true")
        self._agent.common.poller.read_now()
        every = len(self._specs)
        devices = await self._api_server.until(lambda devices: len(devices) > every, DEADLINE)
        slices = len(self._api_server.slices)
        yield f"with dra.partitions there are {slices} ResourceSlices, {len(devices)} devices:"
        yield "each card in every width, with a counter for each core"
        cores, taken = REGISTRY.core_counts[_WIDEST], set[str]()
        for pod, width in (("half", cores // 2), ("quarter", cores // 4), ("core", 1)):
            device = self._first_fit(width, taken)
            claim = self._api_server.allocate(self._driver, pod, [device], pod=pod)
            await self._manager.prepare(self._driver, claim)
            yield f"Pod {pod:8} {(await self._edits(claim))[0]}"

    def _first_fit(self, width: int, taken: set[str]) -> str:
        """The first free part with so many cores of the last card; it is taken now."""
        for device in self._api_server.devices().values():
            (consumed,) = device["consumesCounters"]
            cores = {key for key in consumed["counters"] if key.startswith("core-")}
            mine = device["attributes"]["uuid"]["string"] == self._specs[-1].uuid
            if mine and len(cores) == width and taken.isdisjoint(cores):
                taken.update(cores)
                return str(device["name"])
        raise OSError(f"no {width} cores are free")

    async def _configure(self, partitions: str) -> Path:
        plugins, file = self._directory / _PLUGINS, self._directory / "config.yaml"
        text = _CONFIG.format(plugins=plugins, partitions=partitions, condition=REGISTRY.condition)
        await asyncio.to_thread(file.write_text, text)
        return file

    async def _start(self) -> None:
        await asyncio.to_thread((self._directory / _PLUGINS).mkdir, parents=True)
        await asyncio.to_thread(simulator.make, self._root, self._specs)
        file = await self._configure("false")
        url = await self._served.enter_async_context(served(self._api_server.answer))
        for part in (self._kubelet, self._manager):
            await part.start()
        config, self._api = load(file, REGISTRY), Api(lambda: at(url, "the demo"))
        self._agent = Agent(config, Host(self._root, _NODE), config_file=file, api=self._api)
        parts = (serve(self._agent, self._stop), simulator.simulate(self._root))
        self._running = [asyncio.create_task(part) for part in parts]

    def _claim(self, name: str) -> ClaimRef:
        claim = self._api_server.allocate(self._driver, name, [self._device], pod=name)
        self._claims.append(claim)
        return claim

    def _spec(self, claim: ClaimRef) -> Path:
        return self._root / cdi.DIRECTORY / cdi.claim_file(self._kind, claim.uid)

    async def _edits(self, claim: ClaimRef) -> list[str]:
        """Returns the edits of a claim's CDI spec with one device for one request."""
        (device,) = json.loads(await asyncio.to_thread(self._spec(claim).read_text))["devices"]
        edits = device["containerEdits"]
        nodes = " ".join(node["path"] for node in edits["deviceNodes"])
        return [
            *(f"environment: {variable}" for variable in edits["env"]),
            f"device nodes: {nodes}",
        ]

    @property
    def _named(self) -> str:
        return f"{self._device} ({self._names[self._device]})"

    async def _fault(self, fault: str) -> None:
        card = self._names[self._device]
        await asyncio.to_thread(simulator.apply_fault, self._root, card, fault)

    async def _tainted(self, condition: Callable[[list[Any]], bool]) -> list[Any]:
        """The taints of the claimed device, once they are so."""

        def taints(devices: Mapping[str, Device]) -> list[Any]:
            return list(devices[self._device].get("taints", ()))

        return taints(
            await self._api_server.until(lambda devices: condition(taints(devices)), DEADLINE)
        )

    async def _condition(self, status: str) -> Mapping[str, str]:
        """The Node's condition, once it has this status."""

        def now() -> list[Mapping[str, str]]:
            conditions = self._api_server.objects[NODES][_NODE]["status"].get("conditions", ())
            return [condition for condition in conditions if condition["status"] == status]

        await self._api_server.version.until(lambda _: bool(now()))
        return now()[0]

    async def _reported(self, state: str) -> tuple[str, str]:
        """The health of the device and its message, once it is `state` in the Pod's status."""
        reported = partial(self._manager.state, self._driver, _NODE, self._device)
        await self._manager.health.until(lambda _: reported()[0] == state)
        return reported()


def _described(device: Mapping[str, Any]) -> str:
    """A device of a ResourceSlice: some of its attributes, and what there is of it."""
    facts = {
        **{key: next(iter(value.values())) for key, value in device["attributes"].items()},
        **{key: capacity["value"] for key, capacity in device["capacity"].items()},
    }
    shown = " ".join(f"{key}={facts[key]}" for key in ("arch", "core", "memory") if key in facts)
    return f"{device['name']}: {shown}"
