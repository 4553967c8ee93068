"""The guided tour: simulated cards, a stand-in for the kubelet, and the whole agent between them.

Each step is proven by what the stand-in received, never by the agent's own words.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from npu_agent import logs
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.agent.run import serve
from npu_agent.cli import FAILED, CommandError
from npu_agent.config import load
from npu_agent.core.hardware import CoreRange
from npu_agent.core.offer import device_id
from npu_agent.core.vendor_spec import LabelSource, MetricSource
from npu_agent.kubelet.rpc import GRPCError
from npu_agent.outputs.labels import nfd
from npu_agent.people import simulator
from npu_agent.people.commands.demo_claims import DEADLINE, ClaimsNode, Lines, Step
from npu_agent.people.simulator.kubelet import ListedPlugin, NotEnoughError, StandInKubelet
from npu_agent.people.simulator.pluginmanager import PrepareError
from npu_agent.text import reason
from npu_agent.vendors import REGISTRY, VENDORS

_CONFIG = """\
defaultPe: Fusion
pluginDir: {plugins}
# Brisk: the tour should not take long.
health: {{interval: 0.1}}
metrics: {{interval: 1, listen: '127.0.0.1:0', probes: '127.0.0.1:0'}}
# There is no API server here: labels go to a file, and Events nowhere.
labels: {{output: nfd}}
events: false
cordon: false
"""


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if a step of the tour did not happen."""
    try:
        return asyncio.run(run(once=args.once))
    except ExceptionGroup as errors:  # of what runs side by side
        first = errors.exceptions[0]
        if isinstance(first, OSError):  # such as of stdout, which `npu_agent.cli` knows about
            raise first from errors
        if isinstance(first, simulator.SimulatorError):
            raise CommandError(str(first)) from errors
        raise


async def run(*, once: bool, deadline: float = DEADLINE) -> int:
    """Gives the tour; without `once` stays up until Ctrl-C. A step may take `deadline` seconds."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with _writing():
        made = tempfile.TemporaryDirectory(prefix="npu-demo-")
    with made as name:
        directory = Path(name)
        root, log, file = directory / "host", directory / "agent.log", directory / "config.yaml"
        plugins = directory / "plugins"
        specs = simulator.parse_cards(simulator.default_cards())
        kubelet = StandInKubelet(plugins, directory / "pod-resources")
        with _writing():
            plugins.mkdir()
            simulator.make(root, specs)
            (root / nfd.FILE).parent.mkdir(parents=True)
            file.write_text(_CONFIG.format(plugins=plugins))
            _log_to(log)
            await kubelet.start()
        print(
            f"The whole agent on two simulated cards ({specs[0].traits.title}), npu0 and npu1, and "
            "a\nstand-in for the kubelet. Each line below is what that kubelet, Node Feature\n"
            f"Discovery or the API server would see. The driver's files are in {root},\n"
            f"the config is {file},\n"
            f"the agent's log is in {log}."
        )
        host = Host(root, "demo-node", simulation=partial(simulator.simulate, root))
        agent = Agent(load(file, REGISTRY), host, config_file=file)
        tour = Tour(root, file, specs, kubelet, agent)
        claims = ClaimsNode(directory / "dra", specs)
        async with contextlib.AsyncExitStack() as ends, asyncio.TaskGroup() as parts:
            ends.push_async_callback(kubelet.stop)
            ends.push_async_callback(claims.stop)
            parts.create_task(serve(agent, stop))
            walk = parts.create_task(tour.walk(claims.steps, deadline))
            ended = parts.create_task(stop.wait())
            await asyncio.wait({walk, ended}, return_when=asyncio.FIRST_COMPLETED)
            happened = walk.done() and walk.result()
            failed = walk.done() and not happened  # not if a person ends it before
            if happened and not once:
                print(
                    f"\n{_bold('All steps passed.')} The agent stays up until Ctrl-C: see\n"
                    f"   http://{await tour.address()}/   and try:\n"
                    f"   {_command()} info --host-root {root}\n"
                    f"   {_command()} simulate {root} fault npu0 dead     (and: ... npu0 ok)\n"
                    f"   an edit of {file}\n"
                    "   simulated cards in a cluster: Helm value or component `simulate`\n"
                    "Its log from here on:",
                    flush=True,
                )
                logs.setup("info")
                await ended
            elif happened:
                print(f"\n{_bold('All steps passed.')}")
            elif failed:
                last = log.read_text().splitlines()[-10:]
                print("\nThe end of the agent's log:", *last, sep="\n   ")
            walk.cancel()
            stop.set()
    return FAILED if failed else 0


def _command() -> str:
    """Returns the command to type: as this process was started, if it is not on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "npu-agent":
        return f"{sys.executable} -m npu_agent"
    path = shutil.which("npu-agent")
    return "npu-agent" if path and called.exists() and called.samefile(path) else str(called)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raises CommandError if what is done there below the temporary directory fails."""
    try:
        yield
    except (simulator.SimulatorError, OSError) as error:
        raise CommandError(
            f"{reason(error)}: set TMPDIR to a directory with 10 MB to spare, and a short path"
        ) from error


def _log_to(path: Path) -> None:
    logs.setup("debug")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().handlers[:] = [handler]


class Tour:
    """Walks through the steps and prints what happened, for people."""

    def __init__(
        self,
        root: Path,
        config: Path,
        specs: Iterable[simulator.CardSpec],
        kubelet: StandInKubelet,
        agent: Agent,
    ) -> None:
        """Of the agent only the state of its `config` file and its address are read."""
        self._root = root
        self._config = config
        self._names = {spec.uuid: spec.name for spec in specs} | {
            device_id(spec.uuid, CoreRange(core, core)): f"{spec.name} core {core}"
            for spec in specs
            for core in range(spec.traits.cores)
        }
        self._kubelet = kubelet
        self._agent = agent
        self._resource = agent.common.poller.configs.value.resource_name

    async def walk(self, more: Iterable[Step], deadline: float) -> bool:
        """Runs its own steps, then `more`; returns whether all happened, and stops at a failure."""
        steps: tuple[Step, ...] = (
            ("The agent registers with the kubelet", self._registers),
            ("It lists the cards that the driver's files show, for the kubelet", self._lists),
            ("It labels the Node with what is installed", self._labels_the_node),
            ("It serves a status page, and metrics for Prometheus", self._serves),
            ("A Pod asks for one NPU", self._pod),
            ("A second Pod gets the other card, a third has to wait", self._more_pods),
            ("npu1 is taken out of the host: list and labels follow", self._vanishes),
            ("npu1 comes back: so does its device, under the same ID", self._returns),
            ("npu1 dies, and recovers", self._dies),
            ("The config is edited while the agent runs: switch to single cores", self._edited),
            ("A bad edit is refused as a whole, and nothing changes", self._bad_edit),
            ("The kubelet restarts and forgets the agent, which registers again", self._restarts),
            *more,
        )
        for number, (title, step) in enumerate(steps, 1):
            print(f"\n{_bold(f'{number}. {title}')}", flush=True)
            try:
                async with asyncio.timeout(deadline):
                    lines = [line async for line in step()]
            except TimeoutError:
                return _failed(f"this did not happen within {deadline:g} s")
            except GRPCError as error:
                return _failed(f"{error.status.name}: {error.message}")
            except (NotEnoughError, PrepareError, simulator.SimulatorError, OSError) as error:
                return _failed(str(error))
            for line in lines:
                print(f"   {_green('✔')} {line}", flush=True)
        return True

    async def _registers(self) -> Lines:
        plugin = await self._plugin(lambda p: p.connected)
        yield f"it serves the resource {self._resource} on the socket {plugin.endpoint}"

    async def _lists(self) -> Lines:
        for id_, health in (await self._plugin(lambda p: len(p.devices) == 2)).devices:
            yield f"{self._names[id_]} is the device {id_}: {health}"

    async def _labels_the_node(self) -> Lines:
        for key, value in (await self._labels(bool)).items():
            yield f"{key}={value}"

    async def _serves(self) -> Lines:
        address = await self.address()
        yield f"the status page: http://{address}/"
        yield f"the metrics:     http://{address}/metrics"
        for line in await self._metrics(MetricSource.ALIVE):
            yield f"among them:      {line}"

    async def _pod(self) -> Lines:
        given = await self._kubelet.allocate(self._resource, 1)
        yield f"the Pod gets {self._named(given.ids)}"
        for variable, value in sorted(given.environment.items()):
            yield f"environment: {variable}={value}"
        yield f"device nodes: {' '.join(given.nodes)}"
        for line in await self._metrics(MetricSource.ASSIGNED):
            yield f"/metrics: {line}"

    async def _more_pods(self) -> Lines:
        second = await self._kubelet.allocate(self._resource, 1)
        card, (variable, _) = self._named(second.ids), VENDORS[0].profile.environment[0]
        yield f"the second Pod gets {card}: {variable}={second.environment[variable]}"
        try:
            await self._kubelet.allocate(self._resource, 1)
        except NotEnoughError as error:
            yield f"the third Pod stays Pending: {error}"
        else:
            raise NotEnoughError("a third Pod got a card that is in use")
        # What pod-resources never listed may be a Pod that starts: it is held for a minute.
        await self._metrics(MetricSource.ASSIGNED, f'"{card}"')
        self._kubelet.release(self._resource, second.ids)
        yield f"the second Pod ends, and {card} is free again"

    async def _vanishes(self) -> Lines:
        before = await self._labels(bool)
        await self._fault("gone")
        plugin = await self._plugin(lambda p: len(p.devices) == 1)
        yield f"the list is now: {self._listing(plugin)}"
        after = await self._labels(lambda labels: labels != before)
        for key in sorted(before.keys() | after.keys()):
            if (old := before.get(key, "none")) != (new := after.get(key, "none")):
                yield f"label {key}: {old} -> {new}"

    async def _returns(self) -> Lines:
        labels = REGISTRY.label_sets[REGISTRY.label_set]
        (count,) = (
            labels.prefix + label.key
            for label in labels.labels
            if label.source is LabelSource.COUNT
        )
        await self._fault("back")
        plugin = await self._plugin(lambda p: len(p.healthy()) == 2)
        yield f"the list is now: {self._listing(plugin)}"
        await self._labels(lambda labels: labels.get(count) == "2")
        yield f"label {count}: 2 again"
        yield f"{plugin.messages} messages from the agent so far: it sends changes only"

    async def _dies(self) -> Lines:
        await self._fault("dead")
        dead = await self._plugin(lambda p: len(p.healthy()) == 1)
        yield f"it dies:     {self._listing(dead)}"
        for line in await self._metrics(MetricSource.HEALTH, '"npu1"', 'state="unhealthy"', "} 1"):
            yield f"/metrics:    {line}"
        await self._fault("ok")
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
        before = self._kubelet.plugins.value[self._resource]
        await self._edit("defaultPe: Fusion", "defaultPe: Sinlge")
        yield f"the agent reports: {await self._config_error(refused=True)}"
        await self._edit("defaultPe: Sinlge", "defaultPe: Fusion")
        await self._config_error(refused=False)
        if self._kubelet.plugins.value[self._resource] != before:
            raise OSError("the kubelet got another list")
        yield "the kubelet got nothing"

    async def _restarts(self) -> Lines:
        before = self._kubelet.plugins.value[self._resource].endpoint
        await self._kubelet.stop()
        await self._kubelet.start()
        plugin = await self._plugin(lambda p: p.endpoint != before and len(p.healthy()) == 2)
        yield f"registered again, on the new socket {plugin.endpoint}"
        yield f"the list is again: {self._listing(plugin)}"

    async def _plugin(self, condition: Callable[[ListedPlugin], bool]) -> ListedPlugin:
        return await self._kubelet.until(self._resource, condition, DEADLINE)

    async def _labels(self, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The labels as Node Feature Discovery finds them; in a cluster they go straight there."""
        file = self._root / nfd.FILE
        while True:
            content = await asyncio.to_thread(lambda: file.read_bytes() if file.exists() else None)
            if condition(labels := nfd.parse(content)):
                return labels
            await asyncio.sleep(0.02)

    async def _metrics(self, quantity: MetricSource, *texts: str) -> list[str]:
        """The lines of /metrics on `quantity` that have all `texts`, as soon as there are any."""
        from aiohttp import ClientSession, ClientTimeout

        schema = REGISTRY.metric_schemas[REGISTRY.metric_schema]
        (name,) = (metric.name for metric in schema.metrics if metric.source is quantity)
        url = f"http://{await self.address()}/metrics"
        async with ClientSession(timeout=ClientTimeout(total=DEADLINE)) as session:
            while True:
                async with session.get(url) as answer:
                    lines = (await answer.text()).splitlines()
                mine = [line for line in lines if line.startswith(f"{name}{{")]
                if wanted := [line for line in mine if all(text in line for text in texts)]:
                    return [_brief(line) for line in wanted]
                await asyncio.sleep(0.05)

    async def address(self) -> str:
        address = await self._agent.pages.server.listening.until(bool)
        return ":".join(map(str, address or ()))

    async def _fault(self, name: str) -> None:
        await asyncio.to_thread(simulator.apply_fault, self._root, "npu1", name)

    async def _edit(self, old: str, new: str) -> None:
        text = await asyncio.to_thread(self._config.read_text)
        await asyncio.to_thread(self._config.write_text, text.replace(old, new))
        self._agent.common.poller.read_now()

    async def _config_error(self, *, refused: bool) -> str | None:
        states = self._agent.common.poller.states
        return (await states.until(lambda state: refused == bool(state.error))).error

    def _named(self, ids: Iterable[str]) -> str:
        return ", ".join(self._names[id_] for id_ in ids)

    def _listing(self, plugin: ListedPlugin) -> str:
        return ", ".join(f"{self._names[id_]} {health}" for id_, health in plugin.devices)


def _brief(line: str) -> str:
    """A line of /metrics without the labels that keep the cards of many nodes apart."""
    often = "uuid|pci_bus_id|driver_version|firmware_version|hostname|resource"
    return re.sub(rf'(?:{often})="[^"]*",?', "", line).replace(",}", "}")


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def _green(text: str) -> str:
    return f"\033[32m{text}\033[0m" if sys.stdout.isatty() else text


def _failed(reason: str) -> bool:
    print(f"   ✘ {reason}", flush=True)
    return False
