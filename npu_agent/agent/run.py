"""Runs the parts of the agent together, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from npu_agent import __version__, logs
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.config import Effective, LogConfig
from npu_agent.config.resources import resources_of
from npu_agent.core.ledger import cores_by_card
from npu_agent.feed import Feed
from npu_agent.files import SIMULATION
from npu_agent.kube import credentials
from npu_agent.kubelet.ownership import HAND_OVER
from npu_agent.kubelet.podresources import socket_beside
from npu_agent.logs import logger
from npu_agent.shutdown import LONGEST, Shutdown
from npu_agent.supervise import keep_running
from npu_agent.ticks import until_tick
from npu_agent.vendors import SPEC

log = logger(__name__)

_Part = tuple[str, Callable[[], Coroutine[Any, Any, None]]]
"""A name, for the log and the metric of restarts, and what runs until it is cancelled."""


async def run(
    effective: Effective,
    host: Host,
    *,
    config_file: Path | None,
    shutdown: Shutdown,
) -> bool:
    """Runs the agent until SIGTERM or SIGINT (`npu-agent run`). SIGHUP reads the config now.

    Returns False if it ends by itself: only a new container gets back to the kubelet.
    """
    config = effective.config
    log.info(
        "npu-agent starts",
        version=__version__,
        node=host.node_name or "unknown (NODE_NAME is not set)",
        host_root=host.root,
        plugin_dir=config.plugin_dir,
        resources=",".join(resource.name for resource in resources_of(config, SPEC.core_counts)),
    )
    if host.simulation:
        log.warning("the cards are simulated: containers get /dev/null in place of device nodes")
    credentials.trust_only_the_cluster()
    agent = Agent(effective, host, config_file=config_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.LoopErrors())

    def end(received: signal.Signals) -> None:
        log.info("shutting down", signal=received.name)
        stop.set()

    shutdown.begin(end)
    loop.add_signal_handler(signal.SIGHUP, agent.common.poller.read_now)
    deleted = asyncio.create_task(until_deleted(_directories(agent)))
    deleted.add_done_callback(lambda _: stop.set())
    await serve(agent, stop, shutdown.allow)
    if deleted.done():
        log.error(
            "a directory of the kubelet was deleted: exiting, because only a new container sees "
            "the directory in its place",
            directory=deleted.result(),
        )
        return False
    log.info("ended")
    return True


async def serve(
    agent: Agent, stop: asyncio.Event, allow: Callable[[float], None] = lambda _: None
) -> None:
    """Runs the parts until `stop` is set, then ends: within a second if nothing waits.

    Another agent that stands by is registered first, and a call of the kubelet is answered.
    `allow` is called with the seconds that the end may take from then on.
    """
    timing = agent.common.timing
    kubelet = agent.kubelet

    async with asyncio.TaskGroup() as group:

        def start(parts: Iterable[_Part]) -> list[asyncio.Task[None]]:
            return [
                group.create_task(keep_running(name, run, agent.restarts)) for name, run in parts
            ]

        rest = start(_parts(agent))
        streams = start(_streams(agent))
        servers = start((("server", agent.web.server.run), ("probes", agent.web.probes.run)))
        await stop.wait()
        allow(HAND_OVER + timing.calls + LONGEST)
        await kubelet.ownership.hand_over()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timing.calls):
                await asyncio.gather(
                    *(session.idle() for session in kubelet.sessions),
                    kubelet.driver.idle(),
                )
        allow(LONGEST)
        until = time.monotonic() + timing.end
        await agent.allocator.end()
        # The kubelet first: it should see the end of its stream while everything still works.
        # The servers have their own deadline, for clients that do not let go.
        for task in (*streams, *servers):
            task.cancel()
        await asyncio.wait(streams, timeout=max(0.0, until - time.monotonic()))
        for task in rest:
            task.cancel()
    await agent.common.api.close()


def _streams(agent: Agent) -> Iterator[_Part]:
    """Yields the parts that the kubelet calls."""
    for session in agent.kubelet.sessions:
        yield f"plugin {session.status.value.resource}", session.run
    driver = agent.kubelet.driver
    yield f"DRA {driver.status.value.resource}", driver.run


def _parts(agent: Agent) -> Iterator[_Part]:
    """Yields the parts other than those that the kubelet calls, and the servers."""
    if agent.common.host.simulation:
        held = agent.allocator.usages.map(cores_by_card)
        yield "simulation", partial(agent.common.host.simulation, held)
    yield "inventory", agent.inventory.run
    if not (agent.common.host.root / SIMULATION).is_dir():
        yield "kernel events", agent.hardware.kernel.run
    yield "readers", agent.hardware.readers.run
    yield "config", agent.common.poller.run
    yield "log settings", partial(_follow_log, agent.common.configs.map(lambda config: config.log))
    yield "pod resources", agent.allocator.pod_resources.run
    yield "allocator", agent.allocator.run
    yield "DRA support", agent.node.dra_support.run
    yield "Node", agent.node.watch.run
    yield "cordons", agent.allocator.cordons.run
    if agent.cluster.labeller:
        yield "labels", agent.cluster.labeller.run
    if agent.common.host.node_name:  # else the labeller reports that NODE_NAME is missing
        yield "events", agent.cluster.events.run
        yield "node condition", agent.cluster.condition.run
        yield "evictions", agent.cluster.evictor.run
    yield "history", agent.web.history.run
    yield "timeline", agent.web.timeline_writer.run
    yield "loop lag", agent.web.lag.run
    if agent.web.certificates:
        yield "certificates", agent.web.certificates.run


def _directories(agent: Agent) -> tuple[Path, ...]:
    """Returns the kubelet's directories that this agent uses."""
    plugins = agent.common.directory
    return plugins, socket_beside(plugins).parent, *agent.kubelet.driver.directories


async def until_deleted(directories: Collection[Path], every: float = 5.0) -> Path:
    """Waits until one of these is a deleted directory, and returns it; looks `every` seconds.

    A container goes on seeing a directory under its mount after ``rm -rf /var/lib/kubelet``. A path
    where there is nothing is none: what is made there later will be seen.
    """
    while True:
        for directory in directories:
            with contextlib.suppress(OSError):
                if not directory.stat().st_nlink:
                    return directory
        await asyncio.sleep(until_tick(every))


async def _follow_log(feed: Feed[LogConfig]) -> None:
    applied = feed.value
    async for settings in feed.watch():
        if settings != applied:
            applied = settings
            logs.setup(settings.level, settings.format)
