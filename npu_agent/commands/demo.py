"""The guided tour: simulated cards, a stand-in for the kubelet, and the whole agent between them.

Each step is proven by what the stand-in received, never by the agent's own words.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from grpclib.exceptions import GRPCError

from npu_agent import logs, simulator
from npu_agent.agent import Agent
from npu_agent.config import load
from npu_agent.core.ledger import SETTLED
from npu_agent.core.offer import split_id
from npu_agent.outputs.labels import nfd
from npu_agent.simulator.kubelet import NotEnoughError, Plugin, StandInKubelet
from npu_agent.vendors import WORDS

_CARDS = "warboy=2"
_COUNT = "beta.furiosa.ai/npu.count"
_DEADLINE = 10.0
"""Seconds a step may take; each takes less than one."""
_RUNS = 2.0 + SETTLED
"""Seconds that the second Pod runs, so that pod-resources, which is asked every second, lists it.
What it never listed may be a Pod that starts: its cores are kept for a minute."""
_BRISK = 0.1
"""Seconds between probes of the cards, so that nobody has to wait for the tour."""


class Tour:
    """Walks through the steps and prints what happened, for people."""

    def __init__(
        self,
        root: Path,
        kubelet: StandInKubelet,
        agent: Agent,
        config: Path,
        names: Mapping[str, str],
    ) -> None:
        """`names` has the card's name for each device ID; `config` is the agent's config file.

        Of the agent itself only the state of its config and its address are read.
        """
        self._root = root
        self._kubelet = kubelet
        self._config = config
        self._states = agent.poller.states
        self._resource = agent.poller.configs.value.resource_name
        self._names = names
        self._listening = agent.server.listening
        self._step = 0

    async def walk(self) -> bool:
        """Returns whether every step happened; stops at the first that did not."""
        steps: tuple[tuple[str, Callable[[], Coroutine[Any, Any, Iterable[str]]]], ...] = (
            ("The agent registers with the kubelet", self._registered),
            ("It lists the cards that the driver's files show, for the kubelet", self._listed),
            ("It labels the Node with what is installed", self._labelled),
            ("It serves a status page, and metrics for Prometheus", self._serves),
            ("A Pod asks for one NPU", self._pod),
            ("A second Pod gets the other card, a third has to wait", self._more_pods),
            ("npu1 is taken out of the host: list and labels follow", self._vanishes),
            ("npu1 comes back: so does its device, under the same ID", self._returns),
            ("npu1 dies, and recovers", self._dies),
            ("The config is edited while the agent runs: single cores, please", self._edited),
            ("A bad edit is refused as a whole, and nothing changes", self._bad_edit),
            ("The kubelet restarts and forgets the agent, which registers again", self._restarts),
        )
        for title, step in steps:
            self._step += 1
            print(f"\n{_bold(f'{self._step}. {title}')}", flush=True)
            try:
                async with asyncio.timeout(_DEADLINE):
                    lines = await step()
            except TimeoutError:
                _failed(f"this did not happen within {_DEADLINE:g} s")
                return False
            except GRPCError as error:
                _failed(f"{error.status.name}: {error.message}")
                return False
            except (NotEnoughError, OSError) as error:
                _failed(str(error))
                return False
            for line in lines:
                print(f"   {_green('✔')} {line}", flush=True)
        return True

    async def _plugin(self, condition: Callable[[Plugin], bool]) -> Plugin:
        return await self._kubelet.until(self._resource, condition, _DEADLINE)

    async def _registered(self) -> list[str]:
        plugin = await self._plugin(lambda p: p.connected)
        return [f"it serves the resource {self._resource} on the socket {plugin.endpoint}"]

    async def _listed(self) -> list[str]:
        plugin = await self._plugin(lambda p: len(p.devices) == 2)
        return [
            f"{self._names[id_]} is the device {id_}: {health}" for id_, health in plugin.devices
        ]

    async def _labelled(self) -> list[str]:
        labels = await self._labels(bool)
        return [f"{key}={value}" for key, value in labels.items()]

    async def _labels(self, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The labels as Node Feature Discovery finds them; in a cluster they go straight there."""
        file = self._root / nfd.FILE
        while True:
            content = await asyncio.to_thread(lambda: file.read_bytes() if file.exists() else None)
            if condition(labels := nfd.parse(content)):
                return labels
            await asyncio.sleep(0.02)

    async def _serves(self) -> list[str]:
        address = await self.address()
        alive = [line for line in await self._metrics() if line.startswith("furiosa_npu_alive{")]
        return [
            f"the status page: http://{address}/",
            f"the metrics:     http://{address}/metrics",
            *(f"among them:      {_brief(line)}" for line in alive),
        ]

    async def address(self) -> str:
        """Where the agent serves its pages."""
        async for address in self._listening.watch():
            if address:
                return f"{address[0]}:{address[1]}"
        raise OSError("the server has ended")

    async def _metrics(self, *wanted: str) -> list[str]:
        """The lines of /metrics, as soon as one has every text in `wanted`; asked as others ask."""
        from aiohttp import ClientSession, ClientTimeout

        url = f"http://{await self.address()}/metrics"
        async with ClientSession(timeout=ClientTimeout(total=_DEADLINE)) as session:
            while True:
                async with session.get(url) as answer:
                    lines = (await answer.text()).splitlines()
                if any(all(text in line for text in wanted) for line in lines):
                    return lines
                await asyncio.sleep(0.05)

    async def _metric(self, *wanted: str) -> str:
        lines = await self._metrics(*wanted)
        return next(line for line in lines if all(text in line for text in wanted))

    async def _pod(self) -> list[str]:
        given = await self._kubelet.allocate(self._resource, 1)
        assigned = await self._metric("furiosa_npu_assigned{")
        return [
            f"the Pod gets {self._named(given.ids)}",
            *(f"environment: {k}={v}" for k, v in sorted(given.environment.items())),
            f"device nodes: {' '.join(given.nodes)}",
            f"/metrics: {_brief(assigned)}",
        ]

    async def _more_pods(self) -> list[str]:
        second = await self._kubelet.allocate(self._resource, 1)
        try:
            await self._kubelet.allocate(self._resource, 1)
        except NotEnoughError as error:
            waiting = f"the third Pod stays Pending: {error}"
        else:
            raise NotEnoughError("a third Pod got a card that is in use")
        card, devname = self._named(second.ids), second.environment["NPU_DEVNAME"]
        await asyncio.sleep(_RUNS)
        self._kubelet.release(self._resource, second.ids)
        return [
            f"the second Pod gets {card}: NPU_DEVNAME={devname}",
            waiting,
            f"the second Pod ends, and {card} is free again",
        ]

    async def _vanishes(self) -> list[str]:
        before = await self._labels(bool)
        await asyncio.to_thread(simulator.apply_fault, self._root, "npu1", "gone")
        plugin = await self._plugin(lambda p: len(p.devices) == 1)
        after = await self._labels(lambda found: found != before)
        return [
            f"the list is now: {self._listing(plugin)}",
            *(
                f"label {key}: {before.get(key, 'none')} -> {after.get(key, 'none')}"
                for key in sorted(before.keys() | after.keys())
                if before.get(key) != after.get(key)
            ),
        ]

    async def _returns(self) -> list[str]:
        await asyncio.to_thread(simulator.apply_fault, self._root, "npu1", "back")
        plugin = await self._plugin(lambda p: len(p.healthy()) == 2)
        await self._labels(lambda found: found.get(_COUNT) == "2")
        return [
            f"the list is now: {self._listing(plugin)}",
            f"label {_COUNT}: 2 again",
            f"{plugin.messages} messages from the agent so far: it sends changes only",
        ]

    async def _dies(self) -> list[str]:
        await asyncio.to_thread(simulator.apply_fault, self._root, "npu1", "dead")
        dead = await self._plugin(lambda p: len(p.healthy()) == 1)
        metric = await self._metric("furiosa_npu_health{", '"npu1"', 'state="unhealthy"', "} 1")
        await asyncio.to_thread(simulator.apply_fault, self._root, "npu1", "ok")
        well = await self._plugin(lambda p: len(p.healthy()) == 2)
        return [
            f"it dies:     {self._listing(dead)}",
            f"/metrics:    {_brief(metric)}",
            f"it recovers: {self._listing(well)}",
        ]

    async def _edited(self) -> list[str]:
        await self._edit("defaultPe: Fusion", "defaultPe: Single")
        single = await self._plugin(lambda p: len(p.devices) == 4 and len(p.healthy()) == 2)
        await self._edit("defaultPe: Single", "defaultPe: Fusion")
        fusion = await self._plugin(lambda p: len(p.devices) == 2 and len(p.healthy()) == 2)
        return [
            f"defaultPe: Single: {self._listing(single)}",
            "the cores of npu0 wait, as the first Pod still holds the whole card",
            f"defaultPe: Fusion again: {self._listing(fusion)}",
        ]

    async def _bad_edit(self) -> list[str]:
        before = self._kubelet.plugins.value[self._resource]
        await self._edit("defaultPe: Fusion", "defaultPe: Sinlge")
        error = await self._config_error(refused=True)
        await self._edit("defaultPe: Sinlge", "defaultPe: Fusion")
        await self._config_error(refused=False)
        if self._kubelet.plugins.value[self._resource] != before:
            raise OSError("the kubelet got another list")
        return [f"the agent reports: {error}", "the kubelet got nothing"]

    async def _config_error(self, *, refused: bool) -> str | None:
        async for state in self._states.watch():
            if refused == bool(state.error):
                return state.error
        raise OSError("the agent no longer follows its config")

    async def _edit(self, old: str, new: str) -> None:
        text = await asyncio.to_thread(self._config.read_text)
        await asyncio.to_thread(self._config.write_text, text.replace(old, new))

    async def _restarts(self) -> list[str]:
        before = self._kubelet.plugins.value[self._resource].endpoint
        await self._kubelet.stop()
        await self._kubelet.start()
        plugin = await self._plugin(lambda p: p.endpoint != before and len(p.healthy()) == 2)
        return [
            f"registered again, on the new socket {plugin.endpoint}",
            f"the list is again: {self._listing(plugin)}",
        ]

    def _named(self, ids: Iterable[str]) -> str:
        return ", ".join(map(self._name, ids))

    def _listing(self, plugin: Plugin) -> str:
        return ", ".join(f"{self._name(id_)} {health}" for id_, health in plugin.devices)

    def _name(self, id_: str) -> str:
        card, cores = split_id(id_)
        return self._names.get(card, card) + (f" core {cores}" if cores else "")


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if a step of the tour did not happen."""
    return asyncio.run(run(once=args.once))


async def run(*, once: bool) -> int:
    """Gives the tour; without `once` stays up until Ctrl-C. Returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="npu-demo-") as temporary:
        directory = Path(temporary)
        root, plugins, log = directory / "host", directory / "plugins", directory / "agent.log"
        plugins.mkdir()
        specs = simulator.parse_cards(_CARDS)
        simulator.make(root, specs)
        (root / nfd.FILE).parent.mkdir(parents=True)
        _log_to(log)
        print(
            "The whole agent on two simulated Warboy cards, npu0 and npu1, and a stand-in for the\n"
            "kubelet. Each line below is what that kubelet, or Node Feature Discovery, would see.\n"
            f"The driver's files are in {root}, the config is\n"
            f"{directory}/config.yaml, the agent's log is in {log}."
        )
        file = directory / "config.yaml"
        file.write_text(
            f"defaultPe: Fusion\npluginDir: {plugins}\n"
            f"health: {{interval: {_BRISK}}}\n"
            "metrics: {interval: 1, listen: '127.0.0.1:0'}\n"
            # There is no API server here: labels go to a file, and Events nowhere.
            "labels: {output: nfd}\nevents: false\n"
        )
        kubelet = StandInKubelet(plugins, directory / "pod-resources")
        await kubelet.start()
        effective = load(file, WORDS)
        agent = Agent(effective, host_root=root, node_name="demo-node", config_file=file)
        async with _in_background(simulator.Simulation(root).run(), agent.run(stop)):
            names = {spec.uuid: spec.name for spec in specs}
            tour = Tour(root, kubelet, agent, file, names)
            walk = asyncio.create_task(tour.walk())
            ended = asyncio.create_task(stop.wait())
            await asyncio.wait({walk, ended}, return_when=asyncio.FIRST_COMPLETED)
            happened = walk.done() and walk.result()
            walk.cancel()
            if happened and not once:
                print(
                    f"\n{_bold('All of it happened.')} The agent stays up until Ctrl-C: see\n"
                    f"   http://{await tour.address()}/   and try:\n"
                    f"   npu-agent info --host-root {root}\n"
                    f"   npu-agent simulate {root} fault npu0 dead     (and: ... npu0 ok)\n"
                    f"   an edit of {file}\n"
                    "Its log from here on:",
                    flush=True,
                )
                logs.setup("info")
                await ended
            elif happened:
                print(f"\n{_bold('All of it happened.')}")
            elif walk.done():
                last = log.read_text().splitlines()[-10:]
                print("\nThe end of the agent's log:", *last, sep="\n   ")
            ended.cancel()
            stop.set()
        await kubelet.stop()
    return 0 if happened else 1


@contextlib.asynccontextmanager
async def _in_background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `parts` meanwhile; gives them two seconds to end by themselves afterwards."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
    finally:
        await asyncio.wait(tasks[1:], timeout=2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_to(path: Path) -> None:
    logs.setup("debug")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().handlers[:] = [handler]


def _brief(line: str) -> str:
    """A line of /metrics without the labels that keep the cards of many nodes apart."""
    often = "uuid|pci_bus_id|driver_version|firmware_version|hostname|resource"
    return re.sub(rf'(?:{often})="[^"]*",?', "", line).replace(",}", "}")


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def _green(text: str) -> str:
    return f"\033[32m{text}\033[0m" if sys.stdout.isatty() else text


def _failed(reason: str) -> None:
    print(f"   ✘ {reason}", flush=True)
