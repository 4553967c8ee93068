"""The API parts of many agents in one process: `python -m bench.fleet.agents`.

The parts are those of the agent, put together as in `npu_agent.agent.parts`; the cards are values.
What is to be done comes as a line of JSON, and each is answered by one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from npu_agent import __version__
from npu_agent.core.hardware import HealthState, Snapshot
from npu_agent.core.plan import DraWishes, taints
from npu_agent.core.pool import PoolDevice, pool
from npu_agent.core.state import AgentState, ConfigState
from npu_agent.core.trends import Trends
from npu_agent.feed import Feed
from npu_agent.kube import Api
from npu_agent.kube.credentials import Credentials
from npu_agent.kube.credentials import at as credentials_at
from npu_agent.kube.node import NodeWatch, OwnNode
from npu_agent.kubelet.allocator import ClaimPool
from npu_agent.outputs.condition import ConditionWriter, Observed
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.support import SupportWatch
from npu_agent.outputs.events import Events, TimelineWriter
from npu_agent.outputs.labels.compute import Machine
from npu_agent.outputs.labels.labeller import Labeller, LabelSettings
from npu_agent.outputs.labels.outputs import NodeOutput
from npu_agent.outputs.prometheus.own import LoopLag
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.attributes import DRA
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import snapshot
from tests.outputs.dra.cards import card

CARDS = 8
CONDITION = "furiosa.ai/NPUReady"
ALL_SETS = tuple(SPEC.label_sets)


def cards(sick: int = 0) -> Snapshot:
    """The cards of a node, of which the first ones are unhealthy."""
    states = (HealthState.UNHEALTHY if at < sick else HealthState.HEALTHY for at in range(CARDS))
    return snapshot(*(card("rngd", at, health=state) for at, state in enumerate(states)))


WELL, ILL = cards(), cards(sick=1)


def _labels(found: OwnNode | None) -> Mapping[str, str] | None:
    return None if found is None else found.labels


def _devices(partitions: bool, found: Snapshot) -> tuple[PoolDevice, ...] | None:
    """What `npu_agent.core.plan.claim_pool` gives where there are no holders and no cordons."""
    devices = pool(found, dra=DRA, families=FAMILIES, partitions=partitions)
    return tuple(replace(one, taints=taints(DRA.driver, one.device)) for one in devices)


POOLS = {(parts, id(one)): _devices(parts, one) for parts in (False, True) for one in (WELL, ILL)}
"""All nodes have the same cards: computed once."""


async def _machine() -> Machine:
    return Machine(vendor="Vendor", name="Server")


class Agent:
    """Whatever of one node's agent asks the API server."""

    def __init__(self, name: str, credentials: Credentials) -> None:
        self.snapshots = Feed(WELL)
        self.partitions = Feed(False)
        self.sets: Feed[tuple[str, ...]] = Feed(())
        self.condition_type: Feed[str] = Feed("")
        self._name, self._credentials = name, credentials
        self._task: asyncio.Task[None] | None = None
        self.parts: Parts | None = None

    @property
    def right(self) -> bool:
        """Whether the API server has what it should have, as far as the agent knows."""
        if self._task and self._task.done():
            self._task.result()  # it has failed, and all of it is to end
        return self.parts is not None and self.parts.right

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = self.parts = None

    async def _run(self) -> None:
        parts = self.parts = Parts(self, self._name, Api(lambda: self._credentials))
        try:
            async with asyncio.TaskGroup() as group:
                for run in parts.runs:
                    group.create_task(run())
        finally:
            await parts.api.close()


def _label_settings(sets: tuple[str, ...]) -> LabelSettings:
    return LabelSettings(tuple(SPEC.label_sets[name] for name in sets or (SPEC.label_set,)), 300.0)


class Parts:
    """The parts of a running agent."""

    def __init__(self, agent: Agent, name: str, api: Api) -> None:
        self.api, self._agent, self._name = api, agent, name
        snapshots, began = agent.snapshots, time.monotonic()
        config = Feed(ConfigState(loaded_at=began))
        support_watch = SupportWatch(api, name, auto=False, dra=True, ask_again=60.0)
        self.node = NodeWatch(api, name, Feed(True))
        self.labeller = Labeller(
            snapshots=snapshots,
            settings=agent.sets.map(_label_settings),
            output=NodeOutput(api, name),
            seen=self.node.state.map(_labels),
            machine=_machine,
        )
        events = Events(api=api, node_name=name, wanted=Feed(True))
        recorder = TimelineWriter(snapshots, Feed(Trends()), Feed(()), (), events)
        devices = snapshots.map_with(agent.partitions, lambda found, parts: POOLS[parts, id(found)])
        self.devices = devices
        wishes = Feed(DraWishes(families=frozenset()))
        pool = ClaimPool(DRA, (), wishes, snapshots)
        pool.offered = devices
        self.slices = SlicePublisher(api, name, pool)
        self.condition = ConditionWriter(
            api=api,
            node_name=name,
            observed=Observed(self._state, (snapshots, self.slices.state)),
            type_=agent.condition_type,
            directory=Path(tempfile.gettempdir()) / "npu-bench-fleet",
        )
        self._began, self._config, self._lag = began, config, LoopLag()
        self.runs: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            support_watch.run,
            self.node.run,
            self.labeller.run,
            events.run,
            recorder.run,
            self.slices.run,
            self.condition.run,
            self._kubelet,
        )

    async def _kubelet(self) -> None:
        """The kubelet that has just found the driver: see `Driver._registration`."""
        self.slices.ask_now()

    @property
    def right(self) -> bool:
        labels, slices = self.labeller.state.value, self.slices.state.value
        return (
            self.node.state.value is not None
            and self.node.error is None
            and labels.in_place
            and slices.published
            and slices.trouble is None
            and self.slices.confirmed.value == self.devices.value
        )

    def _state(self) -> AgentState:
        now = time.monotonic()
        return AgentState(
            version=__version__,
            node=self._name,
            hostname=self._name,
            started_at=self._began,
            now=time.time(),
            monotonic=now,
            snapshot=self._agent.snapshots.value,
            config=self._config.value,
            stale_after=30.0,
            lag=self._lag.seconds,
        )


class Fleet:
    """The agents of this process."""

    def __init__(self, names: list[str], credentials: Credentials) -> None:
        self.agents = [Agent(name, credentials) for name in names]

    async def start(self, agents: list[Agent], spread: float) -> None:
        """Starts these, at random within so many seconds."""
        await self._each(agents, spread, lambda one: one.start())

    async def restart(self, agents: list[Agent], spread: float) -> None:
        """Ends these and starts them again."""
        await asyncio.gather(*(one.stop() for one in agents))
        await self.start(agents, spread)

    async def fault(self, agents: list[Agent], spread: float) -> None:
        """A card fails."""
        await self._each(agents, spread, lambda one: one.snapshots.publish(ILL))

    async def recovery(self, agents: list[Agent], spread: float) -> None:
        await self._each(agents, spread, lambda one: one.snapshots.publish(WELL))

    async def configure(self, agents: list[Agent], spread: float) -> None:
        """A config that changes labels and slices."""

        def apply(one: Agent) -> None:
            one.sets.publish(() if one.sets.value else ALL_SETS)
            one.partitions.publish(not one.partitions.value)

        await self._each(agents, spread, apply)

    async def condition(self, agents: list[Agent], spread: float) -> None:
        await self._each(agents, spread, lambda one: one.condition_type.publish(CONDITION))

    async def no_condition(self, agents: list[Agent], spread: float) -> None:
        await self._each(agents, spread, lambda one: one.condition_type.publish(""))

    @staticmethod
    async def _each(agents: list[Agent], spread: float, do: Callable[[Agent], object]) -> None:
        began = time.monotonic()
        moments = sorted(random.uniform(0, spread) for _ in agents)
        for at, one in zip(moments, agents, strict=True):
            rest = began + at - time.monotonic()
            if rest > 0:  # a turn of a busy loop may take seconds
                await asyncio.sleep(rest)
            do(one)

    def counts(self) -> dict[str, float]:
        """How it stands."""
        return {
            "right": sum(one.right for one in self.agents),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


async def main() -> None:
    """Does what each line of the input says: ``{"do": "start", "of": [0, 100], "spread": 5}``."""
    given = json.loads(sys.argv[1])
    # One TLS context: each agent would make its own, and another one after each failure.
    ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]
    logging.disable(logging.CRITICAL)
    credentials = credentials_at(given["server"], "bench")
    credentials.configuration.api_key["BearerToken"] = given["login"]
    credentials.configuration.ssl_ca_cert = given["ca"]
    fleet = Fleet(given["names"], credentials)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        order: dict[str, Any] = json.loads(line)
        if order["do"] != "count":
            agents = fleet.agents[slice(*order["of"])]
            await getattr(fleet, order["do"])(agents, order["spread"])
        print(json.dumps(fleet.counts()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
